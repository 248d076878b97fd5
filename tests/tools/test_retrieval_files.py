"""Scores and forms of lines as the published scripts'; corpora of lines."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.retrieval.lines import FORMS
from data.rows import WholeRows
from data.text.tokens.token_file import TokenFile
from data.text.tokens.tokenizer import ByteTokenizer
from tests.cases import pairs, table
from tools.lib.retrieval.scores import (
    match_all,
    match_line,
    match_part,
    score,
    summary,
    task_row,
)
from tools.prepare_lines import LineDocuments, write_corpus

BYTES = ByteTokenizer()

CASES = [pair for pair in pairs("retrieval_scores.txt") if pair[0][0] == "["]


@pytest.mark.parametrize(("case", "scores"), CASES)
def test_answers_count_as_published(case, scores):
    text, answers = json.loads(case)
    found = (score(match, [text], [answers]) for match in (match_all, match_part))
    assert [*found] == [float(wanted) for wanted in scores.split()]


@pytest.mark.parametrize("scores, means, effective", table("data.txt", "ruler"))
def test_averages_and_effective_length_are_those_of_the_published_table(
    scores, means, effective
):
    lengths = 4, 8, 16, 32, 64, 128
    rows = [
        {"task": task, "length": length, "score": mean + more}
        for length, mean in zip(lengths, scores, strict=True)
        for task, more in (("vt", -1), ("fwe", 1))
    ]
    found = summary(rows)
    weighted = found["weighted_to_long"], found["weighted_to_short"]
    assert tuple(round(mean, 1) for mean in weighted) == means
    assert (found["effective_length"], found["tasks"]) == (effective, 2)


MANY = "0" * 9000
"""More digits than Python reads."""
LINES = [
    (*json.loads(c), r == "true") for c, r in pairs("retrieval_scores.txt", "line")
]
LINES += [("24169" + MANY, "24169", False), (MANY + "24169", "24169", True)]


@pytest.mark.parametrize(("text", "answer", "right"), LINES)
def test_the_last_integer_of_a_line_counts(text, answer, right):
    assert match_line(text, [answer]) == right


def test_needles_are_by_tenths_of_the_prompt_and_lines_by_their_depths():
    def row(depth, text):
        return {"pred": text, "outputs": ["7"], "others": {"depth": depth}}

    rows = [row(0.0, "7"), row(0.05, "8"), row(1.0, "7")]
    found = task_row("niah_single_1", 64, match_all, rows)
    assert found["score"] == 66.67
    assert found["by_depth"] == [[0.05, 50], [0.95, 100]]
    assert task_row("lines", 64, match_line, rows)["by_depth"] == [
        [0.0, 100],
        [0.05, 0],
        [1.0, 100],
    ]
    assert "by_depth" not in task_row("vt", 64, match_all, rows)


@pytest.mark.parametrize("name", FORMS)
def test_no_two_lines_have_one_name(name):
    form = FORMS[name]
    count = len(form.names or range(5000))
    assert len(set(form.draw_names(count, np.random.default_rng(3)))) == count
    assert {"compact": 256, "letters": 52, "LRT": 5000}.get(name, 90_000) == count


def test_lines_are_written_as_published():
    form, line = FORMS["LRT-NL"], {"name": "torpid-kid", "number": 24169}
    assert "able-acorn" in form.names and form.numbers == (1, 50_001)
    assert form.line.format(**line) == "line torpid-kid: REGISTER_CONTENT is <24169>\n"
    assert (form.end + form.question).format(**line) == (
        "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line "
        "torpid-kid? I need the number."
    )
    assert form.cue.format(**line) == "Line <torpid-kid>: <REGISTER_CONTENT> is"
    letters, line = FORMS["letters"], {"name": "d", "number": 47}
    assert letters.line.format(**line) == "d47\n"
    assert (letters.cue + letters.answer).format(**line) == "d47\n"


# Documents that teach retrieval: whole, answered rightly, with the right mask.

CONTEXTS = {"compact": 256, "letters": 160, "LRT": 2000, "LRT-NL": 2000}
SIZES = {"train": 4000, "validation": 1000}


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
    source, rng = LineDocuments(form, BYTES, context), np.random.default_rng(1)
    counts, documents = [], [source.draw(rng) for _ in range(40)]
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
            known = re.findall(line, record)
            found += [name for name in known if asked.endswith(asks.format(name=name))]
        # No line is asked for again before all others are.
        size = len(record.removeprefix(form.header).partition("\n\n")[0].splitlines())
        for first in range(0, len(found), size):
            names = found[first : first + size]
            assert len(set(names)) == len(names)
        assert len(found) == len(pieces) // 2
        counts.append(len(found) / size)
    assert min(counts) < 0.5 and 1 < max(counts) <= 3


def write(directory: Path, *options: Any) -> tuple[TokenFile, TokenFile, Any]:
    """Returns both splits of a corpus, and its summary."""
    source = LineDocuments(FORMS["compact"], BYTES, CONTEXTS["compact"])
    summary = write_corpus(source, directory, SIZES, *options)
    return *(TokenFile.open(directory, name) for name in SIZES), summary


def test_a_corpus_is_a_matter_of_its_seed(tmp_path):
    seeds = {"a": 3, "b": 3, "c": 4}
    first, same, other = (write(tmp_path / n, s)[0] for n, s in seeds.items())
    np.testing.assert_array_equal(first.tokens[:], same.tokens[:])
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
    assert summary.writer.supervised["train"] == train.loss_mask[:].sum()
