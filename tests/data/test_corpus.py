"""Texts to corpora: what is read, in which split, and what is found to be no text."""

import json
import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from data.text import corpus
from data.text.corpus import prepare, prepare_standard_library
from data.text.reading.holdout import Holdout, mark
from data.text.reading.row_files import read_documents
from data.text.reading.skipped import SPECIAL, find_markup
from data.text.tokens.published import open_tokenizer
from data.text.tokens.token_file import TokenFile
from data.text.tokens.tokenizer import ByteTokenizer
from tests.cases import table
from tests.data.test_tokenizer import make_hugging_face


def fill(directory, texts):
    for name, text in texts.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return directory


def read(corpus, split):
    """Texts of a split, in order; each must have the tokens of its begin and end."""
    tokenizer = open_tokenizer(TokenFile.open(corpus, split).tokenizer)
    found = TokenFile.open(corpus, split)
    texts = []
    for document in np.split(found.tokens[:], found.starts[1:]):
        assert document[-1] == tokenizer.end_of_document
        assert tokenizer.end_of_document not in document[:-1]
        begin = len(tokenizer.begin_of_document)
        assert tuple(document[:begin]) == tokenizer.begin_of_document
        texts.append(tokenizer.decode(document[begin:-1]))
    return texts


def read_both(corpus):
    """Texts of the train split, and of the held-out one."""
    return [read(corpus, split) for split in ("train", "validation")]


def test_documents_come_in_the_order_of_their_names(tmp_path):
    texts = {"b.txt": "second", "a/z.txt": "first", "c.txt": "third", "d.txt": "fourth"}
    fill(tmp_path / "in", texts)
    inputs = [tmp_path / "in" / "d.txt", tmp_path / "in"]
    prepare(inputs, tmp_path / "out", ByteTokenizer())
    train, held = read_both(tmp_path / "out")
    expected = ["fourth", "first", "second", "third", "fourth"]
    assert train == [text for text in expected if text not in held]


def test_every_document_is_in_one_split_by_its_text_alone(tmp_path):
    texts = [f"text {i} " * (i + 1) for i in range(60)]
    fill(tmp_path / "a", {f"{i}.txt": text for i, text in enumerate(texts)})
    fill(tmp_path / "b", {f"x/{90 - i}.md": text for i, text in enumerate(texts)})
    lines = [json.dumps({"body": text}) for text in reversed(texts)]
    fill(tmp_path / "c", {"all.jsonl": "\n".join(lines)})
    held = []
    for name in "abc":
        output, options = tmp_path / f"out_{name}", {"text_field": "body"}
        options["validation_fraction"] = 0.3
        summary = prepare([tmp_path / name], output, ByteTokenizer(), **options)
        train, validation = read_both(output)
        assert sorted(train + validation) == sorted(texts)
        counts = summary.writer.counts
        assert counts["train"].documents == len(train)
        assert counts["train"].tokens == sum(len(text) + 1 for text in train)
        held.append(sorted(validation))
    assert held[0] == held[1] == held[2]
    assert 8 <= len(held[0]) <= 30


def test_inputs_are_files_that_can_be_read_twice(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe must be a file or a directory: inputs"):
        prepare([tmp_path / "pipe"], tmp_path / "out", ByteTokenizer())
    assert not (tmp_path / "out").exists()


def test_inputs_that_change_while_they_are_read_are_refused(tmp_path, monkeypatch):
    source = fill(tmp_path / "in", {"a.txt": "a", "b.txt": "b"})

    def growing(*arguments):
        yield from read_documents(*arguments)
        (source / "a.txt").write_text("aaa")

    monkeypatch.setattr(corpus, "read_documents", growing)
    match = r"a\.txt changed while it was read, from 1 bytes to 3: prepare it again"
    with pytest.raises(ValueError, match=match):
        prepare([source], tmp_path / "out", ByteTokenizer())
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_standard_library_is_prepared_once_and_takes_no_other_place(tmp_path):
    output = prepare_standard_library(tmp_path / "library")
    train, validation = (TokenFile.open(output, s) for s in ("train", "validation"))
    assert train.tokens.size > 3_000_000 and validation.tokens.size > 10_000
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = set(sum(read_both(output), []))
    assert (library / "textwrap.py").read_bytes().decode() in texts
    before = (output / "meta.json").stat().st_mtime_ns
    assert prepare_standard_library(output) == output
    assert (output / "meta.json").stat().st_mtime_ns == before
    os.truncate(output / "train.tokens.bin", 100)
    with pytest.raises(ValueError, match=r"train\.tokens\.bin has 100 bytes"):
        prepare_standard_library(output)
    occupied = fill(tmp_path / "occupied", {"thesis.tex": "years"})
    with pytest.raises(FileExistsError, match="occupied already exists and is left"):
        prepare_standard_library(occupied)
    assert (occupied / "thesis.tex").read_text() == "years"


def splits(texts, fraction=None, least=0):
    marks = np.array([mark(text) for text in texts], np.uint64)
    holdout = Holdout(fraction, least)
    holdout.add(marks, np.array([*map(len, texts)]))
    held = marks < np.uint64(holdout.cut())
    return np.where(held, "validation", "train").tolist()


def test_the_share_is_that_of_the_characters(rng):
    """Few texts are most of many corpora."""
    sizes = (rng.lognormal(6, 1.5, 225)).astype(int) + 1
    texts = [f"{i:3} ".ljust(size, "x") for i, size in enumerate(sizes)]
    held = [
        len(t) for t, s in zip(texts, splits(texts, 0.1), strict=True) if s != "train"
    ]
    assert abs(sum(held) - 0.1 * sum(map(len, texts))) <= sizes.max() / 2 + 4


def test_both_splits_get_a_text_where_two_differ():
    for fraction in 1e-9, 1 - 1e-9:
        assert set(splits(["one", "other"], fraction)) == {"train", "validation"}
        assert splits(["same", "same"], fraction) == ["train", "train"]
    for fraction in 0, 1, -0.5, float("nan"):
        with pytest.raises(ValueError, match=f"validation_fraction={fraction} must be"):
            Holdout(fraction)


@pytest.mark.parametrize("fraction, share", [(None, 0.1), (0.3, 0.3)])
def test_of_one_text_the_end_is_held_out(tmp_path, fraction, share):
    text = "".join(f"{number:05} " for number in range(5000))
    fill(tmp_path / "in", {"a.txt": text})
    options = {"validation_fraction": fraction}
    prepare([tmp_path / "in"], tmp_path / "out", ByteTokenizer(), **options)
    train, validation = read_both(tmp_path / "out")
    assert train[0] + validation[0] == text
    assert [len(train), len(validation[0])] == [1, share * len(text)]
    # But a copy never comes to lie on both sides.
    fill(tmp_path / "in", {"b.txt": text})
    prepare([tmp_path / "in"], tmp_path / "two", ByteTokenizer(), **options)
    assert TokenFile.open(tmp_path / "two", "train").starts.size == 2


def test_a_text_beside_rows_of_splits_or_of_few_letters_is_not_divided(tmp_path):
    rows = {f"{name}.jsonl": '{"text": "row"}' for name in ("train", "val")}
    fill(tmp_path / "in", rows | {"notes.md": "word " * 99})
    prepare([tmp_path / "in"], tmp_path / "out", ByteTokenizer())
    assert read_both(tmp_path / "out") == [["word " * 99, "row"], ["row"]]
    fill(tmp_path, {"few.md": "few"})
    summary = prepare([tmp_path / "few.md"], tmp_path / "few", ByteTokenizer())
    assert summary.writer.counts["validation"].documents == 0


def test_one_text_divided_begins_and_ends_in_both_splits(tmp_path):
    path = make_hugging_face(tmp_path / "tokenizer.json", ("<s>", "</s>"))
    tokenizer = open_tokenizer(str(path))
    tokenizer.begin_of_document = (0,)
    fill(tmp_path, {"a.txt": "the cat sat on the mat " * 20})
    prepare([tmp_path / "a.txt"], tmp_path / "out", tokenizer)
    for split in "train", "validation":
        tokens = TokenFile.open(tmp_path / "out", split).tokens[:].tolist()
        assert (tokens[0], tokens[-1], tokens.count(0), tokens.count(1)) == (0, 1, 1, 1)


def held_out(texts, least):
    found = zip(texts, splits(texts, None, least), strict=True)
    return sum(len(text) for text, split in found if split != "train")


def test_few_texts_are_held_out_for_a_batch_where_no_share_is_asked_for():
    texts = [f"{i} " * (i % 50 + 1) for i in range(300)]
    sizes = {}
    for least in 0, 1000, 10**9:
        sizes[least] = held_out(texts, least)
    total = sum(map(len, texts))
    assert sizes[0] < 0.04 * total
    assert 1000 <= sizes[1000] < 1200 < 0.07 * total <= sizes[10**9] < 0.1 * total + 200
    # Whatever their order, and beside a share that is asked for.
    assert held_out(sorted(texts), 1000) == sizes[1000]


def test_markup_is_found_and_words_that_look_like_it_are_left_alone():
    names = "<|im_start|> <|eot_id|> [INST] [/INST] <<SYS>> <</SYS>> <start_of_turn>"
    for name in (*names.split(), "<end_of_turn>", "<|endoftext|>"):
        assert find_markup(f"some words\n{name}user") == SPECIAL, name
    for text, kind in table("data.txt", "markup"):
        assert find_markup(text) == kind, text
    for text in (*(text for (text,) in table("data.txt", "words")), "[" * 100_000):
        assert find_markup(text) is None, text[:12]
