"""Documents that teach retrieval: whole, answered rightly, with the right mask."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.retrieval.lines import FORMS
from data.rows import WholeRows
from data.text.token_file import TokenFile
from data.text.tokenizer import ByteTokenizer
from tools.lib.retrieval.corpus import LineDocuments, write_corpus

BYTES = ByteTokenizer()
CONTEXTS = {"compact": 256, "letters": 160, "LRT": 2000, "LRT-NL": 2000}
SIZES = {"train": 4000, "validation": 1000}


def draws(source: LineDocuments, count: int = 40) -> list:
    rng = np.random.default_rng(1)
    return [source.draw(rng) for _ in range(count)]


def parts(document) -> list[tuple[str, bool]]:
    """Texts that are answers, and those that are not, in turn, without the end."""
    assert document.tokens[-1] == BYTES.end_of_document
    changes = np.flatnonzero(np.diff(document.is_answer[:-1])) + 1
    texts = np.split(document.tokens[:-1], changes)
    answers = np.split(document.is_answer[:-1], changes)
    return [(BYTES.decode(t), bool(k[0])) for t, k in zip(texts, answers, strict=True)]


@pytest.mark.parametrize("name", FORMS)
def test_documents_have_all_lengths_and_each_answer_is_what_its_line_says(name):
    form, context = FORMS[name], CONTEXTS[name]
    source = LineDocuments(form, BYTES, context)
    counts, documents = [], draws(source)
    sizes = [document.tokens.size for document in documents]
    assert 0.7 * context < max(sizes) <= context and len(set(sizes)) > 15
    assert min(sizes) >= source.least_tokens - 20 * len(form.line)
    for document in documents:
        pieces = parts(document)
        assert [answer for _, answer in pieces] == [False, True] * (len(pieces) // 2)
        record, found = pieces[0][0], []
        for (asked, _), (answer, _) in zip(pieces[::2], pieces[1::2], strict=True):
            number = int(re.findall(r"\d+", answer)[-1])
            assert answer == form.answer.format(number=number)
            line = form.line.format(name="(.+)", number=rf"{number}(?=\D)")
            asks = form.question + form.cue
            (name,) = (
                n
                for n in re.findall(line, record)
                if asked.endswith(asks.format(name=n))
            )
            found.append(name)
        # No line is asked for again before all others are.
        size = len(record.removeprefix(form.header).partition("\n\n")[0].splitlines())
        for first in range(0, len(found), size):
            names = found[first : first + size]
            assert len(set(names)) == len(names)
        counts.append(len(found) / size)
    assert min(counts) < 0.5 and 1 < max(counts) <= 3


def write(directory: Path, *options: Any) -> tuple[TokenFile, TokenFile, Any]:
    """Returns both splits of a corpus, and its summary."""
    source = LineDocuments(FORMS["compact"], BYTES, CONTEXTS["compact"])
    summary = write_corpus(source, directory, SIZES, *options)
    return *(TokenFile.open(directory, name) for name in SIZES), summary


def test_a_corpus_is_a_matter_of_its_seed_and_all_of_it_is_supervised_on_demand(
    tmp_path,
):
    options = {"a": (3,), "b": (3, True), "c": (4,)}
    first, same, other = (write(tmp_path / n, *o)[0] for n, o in options.items())
    np.testing.assert_array_equal(first.tokens[:], same.tokens[:])
    assert same.loss_mask[:].all() and not first.loss_mask[:].all()
    assert not np.array_equal(first.tokens[:100], other.tokens[:100])


def test_rows_of_the_corpus_have_weights_on_answers_alone_as_the_summary_says(tmp_path):
    train, held_out, summary = write(tmp_path / "corpus", 0)
    for corpus, wanted in ((train, 4000), (held_out, 1000)):
        assert wanted <= corpus.tokens.size < wanted + CONTEXTS["compact"]
        batch = WholeRows(corpus, 256).read(0, np.arange(256))
        weighed = batch.targets[batch.loss_weights > 0]
        assert set(BYTES.decode(weighed)) <= set("0123456789\n")
        # Two digits and the line's end, for every answer.
        assert (weighed == ord("\n")).sum() * 3 == weighed.size > 0
    assert not np.array_equal(train.tokens[:100], held_out.tokens[:100])
    supervised = train.loss_mask[:].sum()
    assert summary.writer.supervised["train"] == supervised
    assert f"{supervised:,} supervised" in str(summary)


def test_what_cannot_be_drawn_is_refused_and_nothing_is_written(tmp_path):
    source = LineDocuments(FORMS["LRT-NL"], BYTES, 200)
    with pytest.raises(ValueError, match="tokens are too few .* which take"):
        write_corpus(source, tmp_path / "out", SIZES, 0)
    assert list(tmp_path.iterdir()) == []
