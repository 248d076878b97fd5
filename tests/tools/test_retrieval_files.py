"""Files of prompts and cases, wrong rows named; scores as the published scripts'."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from data.retrieval.lines import FORMS
from data.text.tokenizer import ByteTokenizer
from tests.cases import pairs
from tools.lib.retrieval.cells import line_cells
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
    table,
    task_row,
)

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
    (cell,) = line_cells(form, Encoder(ByteTokenizer()), Namespace(cases=path))
    (prompt,), (case,) = cell.prompts, read_cases(path, form)
    # The prompt is what is drawn for the same lines.
    assert prompt.input == case.prompt and case.prompt.startswith(form.header)
    assert case.prompt.endswith((form.end + form.question).format(name=case.name))
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


def test_a_file_without_cases_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="has no cases"):
        read_cases(tmp_path / "empty.jsonl", FORMS["LRT"])


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
    found = summary(
        [
            {"task": task, "length": length, "score": mean + more}
            for length, mean in zip(lengths, scores, strict=True)
            for task, more in (("vt", -1), ("fwe", 1))
        ]
    )
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
    assert [(r["depth"], r["generated"]) for r in heat_rows([found])] == [
        (0.05, 0.5),
        (0.95, 1.0),
    ]
    assert "niah_single_1" in table([found])
    assert "by_depth" not in task_row("vt", 64, match_all, [row(0, "")])


def test_lines_are_averaged_by_their_samples():
    first = {"length": 120, "lines": 20, "samples": 1, "generated": 1}
    second = first | {"samples": 3, "generated": 0}
    assert line_table([r | {"teacher_forced": 0.5} for r in (first, second)]) == (
        "tokens                   120\n"
        "lines                     20\n"
        "generated               25.0%\n"
        "teacher-forced          50.0%"
    )
