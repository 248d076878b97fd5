import json
from types import SimpleNamespace

import numpy as np
import pytest

from data.token_file import TokenFile, TokenFileWriter, identify
from data.tokenizer import ByteTokenizer, open_tokenizer
from tests.fuzzing import altered, fuzz

DOCUMENTS = {
    "train": [[5, 6, 256], [7, 256], [8]],
    "validation": [[1, 2, 3, 256]],
}


def write(directory, documents=DOCUMENTS, tokenizer=None):
    with TokenFileWriter(directory, tokenizer or ByteTokenizer()) as writer:
        for split, contents in documents.items():
            for tokens in contents:
                writer.write(split, np.array(tokens))
    return directory


def change_meta(directory, change):
    path = directory / "meta.json"
    meta = json.loads(path.read_text())
    change(meta)
    path.write_text(json.dumps(meta))


def test_documents_come_back(tmp_path):
    directory = write(tmp_path / "deep" / "corpus")
    train = TokenFile.open(directory, "train")
    assert train.tokens[:].tolist() == [5, 6, 256, 7, 256, 8]
    assert train.tokens.dtype == np.uint16
    assert train.starts.tolist() == [0, 3, 5]
    assert (train.vocab_size, train.largest_token) == (257, 256)
    validation = TokenFile.open(directory, "validation")
    assert validation.tokens[:].tolist() == [1, 2, 3, 256]
    assert validation.starts.tolist() == [0]
    assert (tmp_path / "deep").stat().st_mode == directory.stat().st_mode


def test_a_loss_mask_comes_back_with_its_documents(tmp_path):
    directory = tmp_path / "corpus"
    with TokenFileWriter(directory, ByteTokenizer(), has_loss_mask=True) as writer:
        writer.write("train", np.array([5, 6, 256]), np.array([False, True, True]))
        writer.write("validation", np.array([7, 8]), np.array([True, False]))
        writer.write("train", np.array([9]), np.array([False]))
    train = TokenFile.open(directory, "train")
    assert train.is_supervised(np.arange(4)).tolist() == [False, True, True, False]
    assert train.is_supervised(np.array([1, 2])).tolist() == [True, True]
    assert TokenFile.open(directory, "validation").is_supervised(
        np.arange(2)
    ).tolist() == [
        True,
        0,
    ]
    path = directory / "train.loss.bin"
    path.write_bytes(path.read_bytes()[:3])
    with pytest.raises(ValueError, match="train.loss.bin has 3 bytes, but meta.json"):
        TokenFile.open(directory, "train")
    path.unlink()
    with pytest.raises(FileNotFoundError, match="train.loss.bin is missing"):
        TokenFile.open(directory, "train")


def test_without_a_loss_mask_everything_is_supervised(tmp_path):
    directory = write(tmp_path / "corpus")
    assert (
        TokenFile.open(directory, "train").is_supervised(np.arange(1, 5)).tolist()
        == [True] * 4
    )
    assert not (directory / "train.loss.bin").exists()
    # As it was before there were masks.
    change_meta(directory, lambda meta: meta.pop("has_loss_mask"))
    assert TokenFile.open(directory, "train").loss_mask is None


@pytest.mark.parametrize(
    "has_loss_mask, mask", [(True, None), (True, [1]), (False, [1, 1])]
)
def test_a_loss_mask_is_there_for_every_token_or_for_none(
    tmp_path, has_loss_mask, mask
):
    with pytest.raises(ValueError, match=rf"\(2,\) tokens .*{has_loss_mask=}"):
        with TokenFileWriter(
            tmp_path / "corpus", ByteTokenizer(), has_loss_mask=has_loss_mask
        ) as writer:
            mask = mask if mask is None else np.array(mask, bool)
            writer.write("train", np.array([5, 6]), mask)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mask", [[0.5, 1.0], [2, 1]])
def test_a_loss_mask_of_other_numbers_is_refused(tmp_path, mask):
    with pytest.raises(ValueError, match=r"True and False, got .*loss_mask.dtype="):
        with TokenFileWriter(
            tmp_path / "corpus", ByteTokenizer(), has_loss_mask=True
        ) as writer:
            writer.write("train", np.array([5, 6]), np.array(mask))
    with pytest.raises(ValueError, match="split='test' must be one of train, valid"):
        write(tmp_path / "corpus", {"test": [[5]]})
    assert list(tmp_path.iterdir()) == []


def test_files_are_little_endian_as_documented(tmp_path):
    directory = write(tmp_path / "corpus")
    tokens = (directory / "train.tokens.bin").read_bytes()
    starts = (directory / "train.documents.bin").read_bytes()
    assert tokens[:6] == b"\x05\0\x06\0\0\x01"
    assert starts[8:16] == b"\x03\0\0\0\0\0\0\0"


@pytest.mark.parametrize("vocab_size, dtype", [(65536, "uint16"), (65537, "uint32")])
def test_wide_vocabularies_are_stored_wide(tmp_path, vocab_size, dtype):
    tokenizer = SimpleNamespace(name="wide", path=None, vocab_size=vocab_size)
    largest = vocab_size - 1
    directory = write(tmp_path / "corpus", {"train": [[0, largest]]}, tokenizer)
    corpus = TokenFile.open(directory, "train")
    assert corpus.tokens.dtype == dtype
    assert corpus.tokens[:].tolist() == [0, largest] and corpus.largest_token == largest


def test_corpus_keeps_its_tokenizer(tmp_path):
    source = tmp_path / "some.json"
    source.write_text('{"any": "content"}')
    tokenizer = SimpleNamespace(name="huggingface", path=source, vocab_size=300)
    corpus = TokenFile.open(write(tmp_path / "a", tokenizer=tokenizer), "train")
    source.unlink()
    assert corpus.tokenizer == str(tmp_path / "a" / "tokenizer.json")
    assert (tmp_path / "a" / "tokenizer.json").read_text() == '{"any": "content"}'
    plain = TokenFile.open(write(tmp_path / "b"), "train")
    assert open_tokenizer(plain.tokenizer).decode([104, 105]) == "hi"


@pytest.mark.parametrize(
    "tokens, match",
    [
        ([], r"tokens\.shape=\(0,\)"),
        ([[1]], r"tokens\.shape=\(1, 1\)"),
        ([3, 257], r"document 0 of train has ids from 3 to 257.*vocab_size=257"),
        ([-1, 3], "from -1 to 3"),
        ([1.5, 2.7], r"must have whole numbers .* got tokens.dtype=dtype..float64"),
        ([True, False], r"must have whole numbers .* got tokens.dtype=dtype..bool"),
        ([1, None], r"must have whole numbers .* got tokens.dtype=dtype..O"),
    ],
)
def test_writer_refuses_bad_documents(tmp_path, tokens, match):
    with pytest.raises(ValueError, match=match):
        write(tmp_path / "corpus", {"train": [tokens]})
    assert list(tmp_path.iterdir()) == []


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no corpus .*prepare_text"):
        TokenFile.open(tmp_path / "nowhere", "train")
    with pytest.raises(FileNotFoundError, match=r"meta\.json is missing"):
        TokenFile.open(tmp_path, "train")
    for name in ("train.documents.bin", "train.tokens.bin"):
        directory = write(tmp_path / name)
        (directory / name).unlink()
        with pytest.raises(FileNotFoundError, match=rf"{name} is missing.*prepare"):
            TokenFile.open(directory, "train")
        assert TokenFile.open(directory, "validation").tokens.size == 4


@pytest.mark.parametrize(
    "name, size, match",
    [
        ("train.tokens.bin", 0, "has 0 bytes, .* 6 items of 2 bytes, which is 12"),
        ("train.tokens.bin", 10, "has 10 bytes, .* which is 12"),
        ("train.tokens.bin", 14, "has 14 bytes, .* which is 12"),
        ("train.documents.bin", 0, "has 0 bytes"),
        ("train.documents.bin", 23, "has 23 bytes, .* 3 items of 8 bytes"),
    ],
)
def test_cut_files_are_refused(tmp_path, name, size, match):
    directory = write(tmp_path / "corpus")
    with (directory / name).open("r+b") as file:
        file.truncate(size)
    with pytest.raises(ValueError, match=f"{name} {match}.*(cut short).*prepare"):
        TokenFile.open(directory, "train")


@pytest.mark.parametrize(
    "starts, match",
    [
        ([1, 3, 5], "starts at 1, not at 0"),
        ([0, 3, 3], "document 2 starts at 3, not after document 1 at 3"),
        ([0, 5, 3], "document 2 starts at 3"),
        ([0, 3, 6], "last document starts at 6 of 6 tokens"),
        ([0, 3, 1 << 63], "document 2 starts at -9223372036854775808"),
    ],
)
def test_damaged_bounds_are_refused(tmp_path, starts, match):
    directory = write(tmp_path / "corpus")
    np.array(starts, "<u8").tofile(directory / "train.documents.bin")
    with pytest.raises(
        ValueError, match=rf"train\.documents\.bin is damaged: .*{match}"
    ):
        TokenFile.open(directory, "train")


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda meta: meta.update(version=2), "format version 2, .* reads version 1"),
        (lambda meta: meta.pop("version"), "cannot be read .*version"),
        (lambda meta: meta.pop("dtype"), "does not describe .*dtype"),
        (
            lambda meta: meta["splits"]["train"].pop("tokens"),
            "does not describe .*tokens",
        ),
        (lambda meta: meta["splits"].pop("train"), "split 'train' .*KeyError"),
        (lambda meta: meta.update(version=True), "format version True, .* reads"),
        (lambda meta: meta.update(dtype="float16"), "dtype='float16' must be uint16"),
        (lambda meta: meta.update(dtype="int16"), "dtype='int16' must be uint16 or"),
        (lambda meta: meta.update(vocab_size="257"), "vocab_size='257' must be a who"),
        (lambda meta: meta.update(vocab_size=256), "vocab_size=256 must .* least 257"),
        (lambda meta: meta.update(has_loss_mask="no"), "has_loss_mask='no' must be"),
        (
            lambda meta: meta["splits"]["train"].update(tokens=6.0),
            "tokens=6.0 must be a whole number",
        ),
        (
            lambda meta: meta["splits"]["train"].update(largest_token="256"),
            "largest_token='256' must be a whole number",
        ),
        (
            lambda meta: meta["tokenizer"].update(file="../tokenizer.json"),
            "tokenizer=.* must have a name, and a file beside",
        ),
    ],
)
def test_meta_of_another_form_is_refused(tmp_path, change, match):
    directory = write(tmp_path / "corpus")
    change_meta(directory, change)
    with pytest.raises(ValueError, match=match):
        TokenFile.open(directory, "train")


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "9" * 5000, '{"a": 1, "a": 2}'])
def test_meta_that_is_no_json_is_refused(tmp_path, text):
    directory = write(tmp_path / "corpus")
    (directory / "meta.json").write_text(text)
    with pytest.raises(ValueError, match=r"meta\.json cannot be read .*prepare"):
        TokenFile.open(directory, "train")


def test_empty_split_is_refused(tmp_path):
    directory = write(tmp_path / "corpus", {"train": [[1, 2]]})
    with pytest.raises(ValueError, match="split 'validation' of .*corpus is empty"):
        TokenFile.open(directory, "validation")


def test_vocabulary_must_hold_the_largest_token(tmp_path):
    directory = write(tmp_path / "corpus")
    corpus = TokenFile.open(directory, "train")
    corpus.check_vocabulary(257)
    with pytest.raises(ValueError, match=r"token 256, .*vocab_size=256 .*least 257"):
        corpus.check_vocabulary(256)
    small = write(tmp_path / "small", {"train": [[9]]})
    TokenFile.open(small, "train").check_vocabulary(10)


@pytest.mark.parametrize("attempts", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_altered_meta_is_what_it_says_or_refused(tmp_path, attempts):
    directory = write(tmp_path / "corpus")
    path = directory / "meta.json"
    meta = json.loads(path.read_text())

    def attempt(rng):
        path.write_bytes(altered(meta, rng).encode("utf-8", "surrogatepass"))
        identify(directory)
        train = TokenFile.open(directory, "train")
        return train, train.tokens[:]

    def check(found):
        train, tokens = found
        said = json.loads(path.read_text())
        assert tokens.tolist() == [5, 6, 256, 7, 256, 8]
        assert train.starts.tolist() == [0, 3, 5]
        for name in ("vocab_size", "largest_token"):
            value = (said | said["splits"]["train"])[name]
            assert type(value) is int and value == getattr(train, name) >= 0
        assert isinstance(train.tokenizer, str) and train.loss_mask is None

    fuzz(attempts, attempt, check, most_bytes=20 << 20)
