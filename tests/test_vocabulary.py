"""The vocabulary: the corpus's, unless the config sets one."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from data.text.token_file import TokenFileWriter
from tasks import task, text
from tests.runs import small_config


@pytest.fixture
def corpus(tmp_path):
    """One of a tokenizer of 290 ids."""
    tokenizer = SimpleNamespace(
        name="wide", path=None, vocab_size=290, end_of_document=0
    )
    with TokenFileWriter(tmp_path / "corpus", tokenizer) as writer:
        for split in "train", "validation":
            writer.write(split, np.arange(290))
    return tmp_path / "corpus"


def size(corpus: Path | str, vocab_size: int = 0) -> int:
    config = small_config(corpus, "runs/x", model__vocab_size=vocab_size)
    return text.sizes(config).vocab_size


def test_it_is_the_corpus_rounded_up_unless_the_config_sets_one(corpus):
    assert size(corpus) == 296
    assert size(corpus, vocab_size=291) == 291
    assert size("") == 264  # bytes


def test_runs_record_which_it_was(corpus):
    """So that a run goes on with either way to say it."""
    own, given = (
        task.run_settings(small_config(corpus, "runs/x", model__vocab_size=size), print)
        for size in (0, 296)
    )
    assert own == given and own["model.vocab_size"] == 296


def test_a_corpus_without_one_is_refused(corpus, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no corpus .*or set config.model.voc"):
        size(tmp_path / "nowhere")
    meta = json.loads((corpus / "meta.json").read_text())
    (corpus / "meta.json").write_text(json.dumps(meta | {"vocab_size": 0}))
    with pytest.raises(ValueError, match=r"vocab_size=0 must be .*prepare the corpus"):
        size(corpus)
