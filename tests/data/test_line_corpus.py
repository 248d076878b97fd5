"""Documents that teach line retrieval: whole, answered rightly, with the right mask."""

import re
from pathlib import Path

import numpy as np
import pytest

from data.line_corpus import LineDocuments, prepare_lines, shortest_document
from data.line_forms import FORMS, Compact, NamedLines
from data.text import WholeRows
from data.token_file import TokenFile
from data.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
CONTEXTS = {"compact": 256, "letters": 160, "LRT": 2000, "LRT-NL": 2000}
SIZES = {"train_tokens": 4000, "validation_tokens": 1000}

each_form = pytest.mark.parametrize("name", FORMS)


def documents(name: str, **options) -> LineDocuments:
    form = FORMS[name]()
    least = shortest_document(form, BYTES)
    return LineDocuments(form, BYTES, CONTEXTS[name], least, **options)


def draws(source: LineDocuments, count: int = 40) -> list:
    rng = np.random.default_rng(1)
    return [source.draw(rng) for _ in range(count)]


@each_form
def test_documents_have_all_lengths_and_none_is_longer_than_the_context(name):
    source = documents(name)
    sizes = [document.tokens.size for document in draws(source)]
    line = len(source.form.line(source.form.name(0), 10))
    assert max(sizes) <= CONTEXTS[name] and max(sizes) > 0.7 * CONTEXTS[name]
    assert min(sizes) >= source.least_tokens - 20 * line
    assert len(set(sizes)) > 15


def parts(document) -> list[tuple[str, bool]]:
    """Texts that are supervised, and those that are not, in turn, without the end."""
    assert document.tokens[-1] == BYTES.end_of_document
    changes = np.flatnonzero(np.diff(document.is_supervised[:-1])) + 1
    texts = np.split(document.tokens[:-1], changes)
    supervised = np.split(document.is_supervised[:-1], changes)
    return [
        (BYTES.decode(t), bool(k[0])) for t, k in zip(texts, supervised, strict=True)
    ]


@each_form
def test_only_answers_are_supervised_and_each_is_what_its_line_says(name):
    source = documents(name)
    form = source.form
    counts = []
    for document in draws(source):
        pieces = parts(document)
        supervised = [supervised for _, supervised in pieces]
        assert supervised == [False, True] * (len(pieces) // 2)
        record, found = pieces[0][0], []
        for (asked, _), (answer, _) in zip(pieces[::2], pieces[1::2], strict=True):
            number = int(re.findall(r"\d+", answer)[-1])
            assert answer == form.answer(number)
            pattern = re.escape(form.line("NAME", 77)).replace("NAME", "(.+)")
            lines = re.findall(pattern.replace("77", rf"{number}(?=\D)"), record)
            (name,) = (
                n for n in lines if asked.endswith(form.question(n) + form.cue(n))
            )
            found.append(name)
        # No line is asked for again before all others are.
        lines = record.removeprefix(form.header).partition("\n\n")[0].splitlines()
        for first in range(0, len(found), len(lines)):
            names = found[first : first + len(lines)]
            assert len(set(names)) == len(names)
        counts.append(len(found) / len(lines))
    assert min(counts) < 0.5 and 1 < max(counts) <= 3


def test_all_tokens_are_supervised_where_that_is_asked_for():
    answers, everything = (
        draws(documents("compact", supervised=supervised), 5)
        for supervised in ("answers", "all")
    )
    for one, other in zip(answers, everything, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        assert other.is_supervised.all() and not one.is_supervised.all()


def prepare(directory: Path, seed: int = 0) -> Path:
    prepare_lines(documents("compact"), directory, seed=seed, **SIZES)
    return directory


def test_a_corpus_is_a_matter_of_its_seed(tmp_path):
    first, same, other = (
        TokenFile.open(prepare(tmp_path / name, seed), "train")
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    np.testing.assert_array_equal(first.tokens[:], same.tokens[:])
    np.testing.assert_array_equal(first.loss_mask[:], same.loss_mask[:])
    assert not np.array_equal(first.tokens[:100], other.tokens[:100])


def test_rows_of_the_corpus_have_weights_on_answers_alone_as_the_summary_says(tmp_path):
    directory = tmp_path / "corpus"
    summary = prepare_lines(documents("compact"), directory, seed=0, **SIZES)
    for split, wanted in (("train", 4000), ("validation", 1000)):
        corpus = TokenFile.open(directory, split)
        assert wanted <= corpus.tokens.size < wanted + CONTEXTS["compact"]
        batch = WholeRows(corpus, 256).read(0, np.arange(256))
        weighed = batch.targets[batch.loss_weights > 0]
        assert set(BYTES.decode(weighed)) <= set("0123456789\n")
        # Two digits and the line's end, for every answer.
        assert (weighed == ord("\n")).sum() * 3 == weighed.size > 0
    train, held_out = (TokenFile.open(directory, s) for s in ("train", "validation"))
    assert not np.array_equal(train.tokens[:100], held_out.tokens[:100])
    supervised = train.loss_mask[:].sum()
    assert summary.supervised["train"] == supervised
    assert f"{supervised:,} supervised" in str(summary)


def test_what_is_wrong_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(ValueError, match="least_tokens=9 must be from 1 to context_to"):
        LineDocuments(Compact(), BYTES, 8, 9)
    with pytest.raises(ValueError, match="supervised='some' must be one of"):
        LineDocuments(Compact(), BYTES, 64, 32, "some")
    with pytest.raises(ValueError, match="train_tokens=0"):
        none = SIZES | {"train_tokens": 0}
        prepare_lines(documents("compact"), tmp_path / "out", seed=0, **none)
    with pytest.raises(ValueError, match="too few for a record of one line"):
        source = LineDocuments(NamedLines(), BYTES, 300, 300)
        prepare_lines(source, tmp_path / "out", seed=0, **SIZES)
    assert list(tmp_path.iterdir()) == []
