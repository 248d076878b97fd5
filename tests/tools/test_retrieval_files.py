"""Files of prompts and cases; scores as the published scripts'; corpora of lines."""

import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.retrieval.lines import FORMS
from data.rows import WholeRows
from data.text.token_file import TokenFile
from data.text.tokenizer import ByteTokenizer
from tests.cases import pairs
from tools.lib.retrieval.cells import line_cells
from tools.lib.retrieval.corpus import LineDocuments, write_corpus
from tools.lib.retrieval.files import read_cases, read_prompts
from tools.lib.retrieval.prompts import Encoder
from tools.lib.retrieval.scores import (
    heat_rows,
    line_table,
    match_all,
    match_line,
    match_part,
    score,
    summary,
    task_row,
)

BYTES = ByteTokenizer()

PUBLISHED = Path(__file__).parents[1] / "fixtures" / "line_retrieval.jsonl"
"""Made by hand, in the fields and words of the published files."""
GOOD = {"random_idx": ["qx", 1], "expected_number": 47, "num_lines": 2}
GOOD |= {"correct_line": "qx47\n", "prompt": "bb11\nqx47\n\n"}


@pytest.mark.parametrize(
    ("row", "name", "depth", "cue", "answer"),
    [
        (0, "LRT-NL", 0.5, "Line <torpid-kid>: <REGISTER_CONTENT> is", " <24169>\n"),
        (1, "LRT", 1.0, "Line <2>: <REGISTER_CONTENT> is", " <31415>\n"),
    ],
)
def test_published_cases_are_asked_in_the_base_form(
    row, name, depth, cue, answer, tmp_path
):
    form, path = FORMS[name], tmp_path / "cases.jsonl"
    path.write_text(PUBLISHED.read_text().splitlines()[row])
    (cell,) = line_cells(form, Encoder(BYTES), Namespace(cases=path))
    (prompt,), (case,) = cell.prompts, read_cases(path, form)
    # The prompt is what is drawn for the same lines.
    assert prompt.input == case.prompt and case.prompt.startswith(form.header)
    assert (prompt.answer_prefix, prompt.outputs) == (cue, (answer,))
    whole = prompt.input + cue + answer
    assert cell.length == prompt.length == cell.cache_tokens == len(whole)
    assert (cell.depth, cell.lines) == (depth, case.lines)


LONG = [
    ("case " + "[" * 100_000, "lie too deep in each other"),
    ("case " + json.dumps({"random_idx": [1] * 10**5}), "a name and a place, got [1"),
]


@pytest.mark.parametrize(
    ("row", "reason"),
    [*pairs("retrieval_rows.txt"), *LONG],
    ids=lambda value: value[:50],
)
def test_a_bad_row_is_named_with_its_reason(tmp_path, row, reason):
    kind, _, change = row.partition(" ")
    good = GOOD if kind == "case" else {"input": "a", "outputs": ["b"]}
    if kind == "case" and change.startswith('{"'):
        fields = GOOD | json.loads(change)
        change = json.dumps({k: v for k, v in fields.items() if v is not None})
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(good)}\n\n{change}")
    with pytest.raises(ValueError) as error:
        read_cases(path, FORMS["compact"]) if kind == "case" else [*read_prompts(path)]
    message = str(error.value)
    assert message.startswith(f"{path}:3 must be a {kind}: ") and reason in message
    assert message.isprintable() and len(message) < 500


CASES = [pair for pair in pairs("retrieval_scores.txt") if pair[0][0] == "["]


@pytest.mark.parametrize(("case", "scores"), CASES)
def test_answers_count_as_published(case, scores):
    text, answers = json.loads(case)
    found = (score(match, [text], [answers]) for match in (match_all, match_part))
    assert [*found] == [float(wanted) for wanted in scores.split()]


# Rows of the published table: 4 to 128 Ki, average weighted to long and to short.
TABLE = {
    "Llama3.1 8B": ([95.5, 93.8, 91.6, 87.4, 84.7, 77.0], 85.4, 91.3, 32),
    "LWM 7B": ([82.3, 78.4, 73.7, 69.1, 68.1, 65.0], 69.9, 75.7, None),
    "Yi 34B": ([93.3, 92.2, 91.3, 87.5, 83.2, 77.3], 84.8, 90.1, 32),
}


@pytest.mark.parametrize("model", TABLE)
def test_averages_and_effective_length_are_those_of_the_published_table(model):
    scores, to_long, to_short, effective = TABLE[model]
    lengths = 4, 8, 16, 32, 64, 128
    rows = [
        {"task": task, "length": length, "score": mean + more}
        for length, mean in zip(lengths, scores, strict=True)
        for task, more in (("vt", -1), ("fwe", 1))
    ]
    found = summary(rows)
    assert round(found["weighted_to_long"], 1) == to_long
    assert round(found["weighted_to_short"], 1) == to_short
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


def test_cells_of_needles_are_by_depth():
    def row(depth, text):
        return {"pred": text, "outputs": ["7"], "others": {"depth": depth}}

    rows = [row(0.0, "7"), row(0.05, "8"), row(1.0, "7")]
    found = task_row("niah_single_1", 64, match_all, rows)
    assert found["score"] == 66.67
    shares = [(r["depth"], r["generated"]) for r in heat_rows([found])]
    assert shares == [(0.05, 0.5), (0.95, 1.0)]


def test_lines_are_averaged_by_their_samples():
    first = {"length": 120, "lines": 20, "samples": 1, "generated": 1}
    second = first | {"samples": 3, "generated": 0}
    rows = [row | {"teacher_forced": 0.5} for row in (first, second)]
    assert re.findall(r"[\d.]+%", line_table(rows)) == ["25.0%", "50.0%"]


# Documents that teach retrieval: whole, answered rightly, with the right mask.

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


def test_a_corpus_is_a_matter_of_its_seed_and_may_be_supervised_whole(tmp_path):
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
    assert summary.writer.supervised["train"] == train.loss_mask[:].sum()
