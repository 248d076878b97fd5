"""What a corpus holds is what was written, or it is refused by file and place."""

import hashlib
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest

from data import versioned
from data.rows import ROW_PLANS
from data.text.token_file import TokenFile, identify
from tests.data.test_token_file import write as write_splits
from tests.data.test_token_file import write_masked
from tests.fuzzing import set_field


def write(directory, documents=((5, 6, 256), (7, 256)), tokenizer=None):
    return write_splits(directory, {"train": documents}, tokenizer)


def overwrite(path, place, values):
    with path.open("r+b") as file:
        file.seek(place)
        file.write(values.tobytes())


@pytest.mark.parametrize("plan", ROW_PLANS)
def test_ids_beyond_the_largest_are_never_read(tmp_path, plan):
    directory = write(tmp_path / "corpus")
    overwrite(directory / "train.tokens.bin", 2 * 1, np.array([32768], "<u2"))
    rows = ROW_PLANS[plan](TokenFile.open(directory, "train"), 3)
    match = (
        r"train\.tokens\.bin has token 32768 at place 1, and 256 is the largest "
        r"\(vocab_size=257\): it was damaged or replaced"
    )
    with pytest.raises(ValueError, match=match):
        for row in range(rows.rows):
            rows.read(row, np.arange(3, dtype=np.int32))


def test_ids_above_31_bits_are_no_negative_ones(tmp_path):
    tokenizer = SimpleNamespace(
        name="wide", path=None, vocab_size=1 << 17, end_of_document=0
    )
    directory = write(tmp_path / "corpus", [[5, 6, 7]], tokenizer)
    overwrite(directory / "train.tokens.bin", 4, np.array([2**32 - 1], "<u4"))
    with pytest.raises(ValueError, match="token 4294967295 at place 1, and 7 is"):
        TokenFile.open(directory, "train").ids(np.arange(3))


def test_marks_that_are_no_marks_are_never_read(tmp_path):
    directory = write_masked(tmp_path / "corpus", ([5, 6, 256], [False, True, True]))
    overwrite(directory / "train.loss.bin", 1, np.array([7], "u1"))
    match = r"train\.loss\.bin has mark 7 at place 1, and 1 is the largest"
    with pytest.raises(ValueError, match=match):
        TokenFile.open(directory, "train").is_supervised(np.arange(3))


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path):
    """And no SIGBUS, which would end the process here."""
    directory = write(tmp_path / "corpus", [[7] * 30_000])
    corpus = TokenFile.open(directory, "train")
    assert corpus.ids(np.array([29_999])).tolist() == [7]
    os.truncate(directory / "train.tokens.bin", 4096)
    assert corpus.ids(np.array([2047])).tolist() == [7]
    match = r"train\.tokens\.bin ends at byte 59998 and .*cut short while it was read"
    with pytest.raises(OSError, match=match):
        corpus.ids(np.array([29_999]))


@pytest.mark.parametrize("name", ["tokens", "documents", "loss"])
def test_a_changed_byte_is_found_by_the_digests(tmp_path, name, monkeypatch):
    directory = write_masked(
        tmp_path / "corpus", ([5, 6], [False, True]), ([9], [True])
    )
    meta = json.loads((directory / "meta.json").read_text())
    files = {path.name for path in directory.iterdir()} - {"meta.json"}
    assert set(meta["files"]) == files and len(files) == 6
    for file, facts in meta["files"].items():
        content = (directory / file).read_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        assert facts == {"bytes": len(content), "sha256": sha256}
    digest, unread = identify(directory)
    assert len(digest) == 16 and unread == ""
    path = directory / f"train.{name}.bin"
    overwrite(path, 0, np.array([path.read_bytes()[0] ^ 1], "u1"))
    match = rf"train\.{name}\.bin is not what was written, by its digest: .*prepare"
    with pytest.raises(ValueError, match=match):
        identify(directory)
    monkeypatch.setattr(versioned, "COMPARED_BYTES", 10)
    same, unread = identify(directory)
    assert same == digest and "not compared with their digests: config.data" in unread
    with pytest.raises(ValueError, match=match):
        identify(directory, compare=True)


def test_a_corpus_from_before_there_were_digests_is_taken_and_it_is_said(tmp_path):
    directory = write(tmp_path / "corpus")
    digest, _ = identify(directory)
    set_field(directory / "meta.json", "files", None)
    other, unread = identify(directory)
    assert other != digest and "has no digests, of an older program" in unread
    assert TokenFile.open(directory, "train").tokens.size == 5


@pytest.mark.parametrize(
    "files, match",
    [
        ([], "does not describe its files .*AttributeError"),
        ({"train.tokens.bin": "00"}, "does not describe its files .*TypeError"),
        ({"train.tokens.bin": {"bytes": 10}}, "does not describe .*KeyError: 'sha256'"),
        ({"../x": {"bytes": 1, "sha256": ""}}, "does not describe .*Invalid name"),
        ({"x": {"bytes": 1, "sha256": ""}}, "x is missing"),
        ({"meta.json": {"bytes": 1, "sha256": ""}}, "bytes, but meta.json says 1:"),
    ],
)
def test_files_that_are_described_wrong_are_refused(tmp_path, files, match):
    directory = write(tmp_path / "corpus")
    set_field(directory / "meta.json", "files", files)
    with pytest.raises((ValueError, FileNotFoundError), match=match):
        identify(directory)
