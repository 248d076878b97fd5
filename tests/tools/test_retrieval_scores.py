"""Scores are those of the published scripts, of RULER and of LongEval."""

import pytest

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

# What the published scripts (scripts/eval) give for these: text, answers, all, part.
CASES = [
    ("It is 1234567.", ["1234567"], 100.0, 100.0),
    ("It is 123456.", ["1234567"], 0.0, 0.0),
    ("", ["a"], 0.0, 0.0),
    ("VAR abcde, Fghij", ["ABCDE", "FGHIJ", "KLMNO"], 66.67, 100.0),
    ("  \n red  fox\t", ["red fox", "RED"], 50.0, 100.0),
    ("red\tfox", ["red\tfox", "red\nfox"], 50.0, 100.0),
    ("a\x00b\x1fc", ["a\nb\nc"], 100.0, 100.0),
    ("\x00end", ["end"], 100.0, 100.0),
    (" \x01a\x7fb\x1f\u00a0 ", ["a\x7fb"], 100.0, 100.0),
    ("STRASSE", ["straße", "strasse"], 50.0, 100.0),
    ("1. cat 2. dog", ["cat", "dog", "bird", "cow", "hen", "ox", "pig"], 28.57, 100.0),
]


@pytest.mark.parametrize(("text", "answers", "every", "some"), CASES)
def test_answers_count_as_published(text, answers, every, some):
    assert score(match_all, [text], [answers]) == every
    assert score(match_part, [text], [answers]) == some


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


# The text that follows the cue: the last integer of its first line counts.
LINES = [
    ("The <REGISTER_CONTENT> in line 7 is <24169>.", " <24169>\n", True),
    ("<24169> is in line 7", " <24169>\n", False),
    ("24169.5", "24169", False),
    ("024169", "24169", True),
    ("I do not know.", "24169", False),
    ("24169" + "0" * 9000, "24169", False),  # more digits than Python reads
    ("0" * 9000 + "24169", "24169", True),
    ("", "0", False),
    (" <47>\nLine <ab>: 99", " <47>\n", True),
    ("\n47\n9", "47\n", True),
    ("48\n47", "47\n", False),
]


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
