import json
from types import SimpleNamespace

import numpy as np
import pytest

from data.files import describe_file
from data.rows import PackedRows
from data.text.tokens.published import open_tokenizer
from data.text.tokens.token_file import TokenFile, TokenFileWriter, identify
from data.text.tokens.tokenizer import ByteTokenizer
from tests.cases import table
from tests.data import test_packed
from tests.data.test_packed import overwrite
from tests.data.test_tokenizer import make_hugging_face
from tests.support.fuzzing import set_field

DOCUMENTS = {"train": [[5, 6, 256], [7, 256], [8]], "validation": [[1, 2, 3, 256]]}


def write(directory, documents=DOCUMENTS, tokenizer=None):
    with TokenFileWriter(directory, tokenizer or ByteTokenizer()) as writer:
        for split, contents in documents.items():
            for tokens in contents:
                writer.write(split, np.array(tokens))
    return directory


def wide(size):
    return SimpleNamespace(name="wide", path=None, vocab_size=size, end_of_document=0)


def test_documents_and_their_loss_masks_come_back(tmp_path):
    directory = tmp_path / "corpus"
    with TokenFileWriter(directory, ByteTokenizer(), has_loss_mask=True) as writer:
        for split, documents in DOCUMENTS.items():
            for tokens in documents:
                writer.write(split, np.array(tokens), np.array(tokens) > 6)
    train = TokenFile.open(directory, "train")
    assert train.tokens[:].tolist() == [5, 6, 256, 7, 256, 8]
    assert train.tokens.dtype == np.uint16
    assert train.starts.tolist() == [0, 3, 5]
    assert (train.vocab_size, train.largest_token) == (257, 256)
    train.check_vocabulary(257)
    with pytest.raises(ValueError, match=r"token 256, .*vocab_size=256 .*least 257"):
        train.check_vocabulary(256)
    assert train.weights(np.array([1, 2, 5])).tolist() == [False, True, True]
    validation = TokenFile.open(directory, "validation")
    assert validation.tokens[:].tolist() == [1, 2, 3, 256]
    assert validation.starts.tolist() == [0]
    assert validation.weights(np.arange(4)).tolist() == [False] * 3 + [True]
    # Little-endian, as documented.
    tokens = (directory / "train.tokens.bin").read_bytes()
    starts = (directory / "train.documents.bin").read_bytes()
    assert tokens[:6] == b"\x05\0\x06\0\0\x01"
    assert starts[8:16] == b"\x03\0\0\0\0\0\0\0"


@pytest.mark.parametrize("tokens, has_mask, mask, match", table("data.txt", "document"))
def test_writer_refuses_bad_documents(tmp_path, tokens, has_mask, mask, match):
    writer = TokenFileWriter(tmp_path / "a", ByteTokenizer(), has_loss_mask=has_mask)
    mask = None if mask is None else np.array(mask)
    with pytest.raises(ValueError, match=match), writer:
        writer.write("train", np.array(tokens), mask)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("vocab_size, dtype", [(65536, "uint16"), (65537, "uint32")])
def test_wide_vocabularies_are_stored_wide(tmp_path, vocab_size, dtype):
    largest, tokenizer = vocab_size - 1, wide(vocab_size)
    directory = write(tmp_path / "corpus", {"train": [[0, largest]]}, tokenizer)
    corpus = TokenFile.open(directory, "train")
    assert corpus.tokens.dtype == dtype
    assert corpus.tokens[:].tolist() == [0, largest] and corpus.largest_token == largest


def test_where_texts_are_from_is_not_which_they_are(tmp_path):
    source = tmp_path / "a.txt"
    source.write_text("text")
    for name in "one", "other":
        with TokenFileWriter(tmp_path / name, ByteTokenizer()) as writer:
            writer.write("train", np.arange(3))
            writer.write("validation", np.arange(4))
            writer.add_sources([{"path": str(source)} | describe_file(source)])
        source.write_text("other text")
    digest, _ = identify(tmp_path / "one")
    assert identify(tmp_path / "one") == identify(tmp_path / "other") == (digest, "")
    set_field(tmp_path / "one" / "meta.json", "files", None)
    with pytest.raises(ValueError, match="meta.json does not describe its files"):
        identify(tmp_path / "one")


def test_corpus_keeps_its_tokenizer(tmp_path):
    config = {"add_bos_token": True, "bos_token": "<pad>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    made = open_tokenizer(str(make_hugging_face(tmp_path / "some.json")))
    content = made.path.read_bytes()
    corpus = TokenFile.open(write(tmp_path / "a", tokenizer=made), "train")
    made.path.unlink()
    path = tmp_path / "a" / "tokenizer.json"
    assert corpus.tokenizer == str(path) and path.read_bytes() == content
    again = open_tokenizer(corpus.tokenizer)
    assert again.begin_of_document == made.begin_of_document == (0,)
    assert again.stop_tokens == made.stop_tokens == (1, 7)
    assert again.names == made.names
    assert identify(path.parent)[1] == ""
    beside = "generation_config.json", "tokenizer_config.json"
    for file in (path, *map(path.with_name, beside)):
        file.write_bytes(file.read_bytes().swapcase())
        with pytest.raises(ValueError, match=f"{file} is not what was written, by its"):
            identify(path.parent)
        file.write_bytes(file.read_bytes().swapcase())
    plain = TokenFile.open(write(tmp_path / "b"), "train")
    assert open_tokenizer(plain.tokenizer).decode([104, 105]) == "hi"


@pytest.mark.parametrize("starts, match", table("data.txt", "starts"))
def test_damaged_bounds_are_refused(tmp_path, starts, match):
    directory = write(tmp_path / "corpus")
    np.array(starts, "<u8").tofile(directory / "train.documents.bin")
    match = rf"train\.documents\.bin is damaged: .*{match}"
    with pytest.raises(ValueError, match=match):
        TokenFile.open(directory, "train")


@pytest.mark.parametrize("field, value, match", table("data.txt", "meta"))
def test_meta_of_another_form_is_refused(tmp_path, field, value, match):
    directory = write(tmp_path / "corpus")
    set_field(directory / "meta.json", field, value)
    with pytest.raises(ValueError, match=match):
        TokenFile.open(directory, "train")


def test_ids_and_marks_that_no_corpus_has_are_never_read(tmp_path):
    """Neither as negative ones, beyond 31 bits."""
    directory = write(tmp_path / "corpus", {"train": [[5, 6, 7]]}, wide(1 << 17))
    overwrite(directory / "train.tokens.bin", 4, np.array([2**32 - 1], "<u4"))
    rows = PackedRows(TokenFile.open(directory, "train"), 2)
    match = (
        r"train\.tokens\.bin has token 4294967295 at place 1, and 7 is the largest "
        r"\(vocab_size=131072\): it was damaged or replaced"
    )
    with pytest.raises(ValueError, match=match):
        rows.read(0, np.arange(2, dtype=np.int32))
    directory = test_packed.write(tmp_path / "masked")
    overwrite(directory / "train.loss.bin", 1, np.array([7], "u1"))
    match = r"train\.loss\.bin has weight 7 at place 1, and 1 is the largest"
    with pytest.raises(ValueError, match=match):
        TokenFile.open(directory, "train").weights(np.arange(3))
