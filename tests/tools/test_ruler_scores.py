"""RULER's scores are those of the published scripts."""

import pytest

from tools.lib.ruler.scores import (
    cleaned,
    effective_length,
    match_all,
    match_part,
    score,
    weighted,
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
    ("STRASSE", ["straße", "strasse"], 50.0, 100.0),
    ("1. cat 2. dog", ["cat", "dog", "bird", "cow", "hen", "ox", "pig"], 28.57, 100.0),
]


@pytest.mark.parametrize(("text", "answers", "every", "some"), CASES)
def test_answers_count_as_published(text, answers, every, some):
    assert score(match_all, [text], [answers]) == every
    assert score(match_part, [text], [answers]) == some


def test_control_characters_are_lines():
    assert cleaned(" \x01a\x7fb\x1f\u00a0 ") == "a\x7fb"


# Rows of the published table: 4 to 128 Ki, average weighted to long and to short.
TABLE = {
    "Llama3.1 8B": ([95.5, 93.8, 91.6, 87.4, 84.7, 77.0], 85.4, 91.3, 32),
    "LWM 7B": ([82.3, 78.4, 73.7, 69.1, 68.1, 65.0], 69.9, 75.7, None),
    "Yi 34B": ([93.3, 92.2, 91.3, 87.5, 83.2, 77.3], 84.8, 90.1, 32),
}


@pytest.mark.parametrize("model", TABLE)
def test_averages_and_effective_length_are_those_of_the_published_table(model):
    scores, to_long, to_short, effective = TABLE[model]
    by_length = dict(zip([4, 8, 16, 32, 64, 128], scores, strict=True))
    assert round(weighted(by_length, towards_long=True), 1) == to_long
    assert round(weighted(by_length, towards_long=False), 1) == to_short
    assert effective_length(by_length) == effective
