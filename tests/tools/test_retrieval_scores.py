"""Scores are those of the published scripts, of RULER and of LongEval."""

import json

import pytest

from tests.cases import pairs
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
