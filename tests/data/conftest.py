"""Tokenizers of every kind."""

import pytest


@pytest.fixture(scope="session")
def specs(tmp_path_factory):
    """What `open_tokenizer` opens, by the names of the kinds."""
    from tests.data.test_tokenizer import make_hugging_face, make_sentence_piece

    directory = tmp_path_factory.mktemp("tokenizers")
    return {
        "bytes": "bytes",
        "huggingface": str(make_hugging_face(directory / "tokenizer.json")),
        "sentencepiece": str(make_sentence_piece(directory / "tokenizer.model")),
    }
