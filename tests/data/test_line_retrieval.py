"""Cases of line retrieval: drawn, written, read and scored."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from data.line_forms import FORMS, Compact, NamedLines, NumberedLines
from data.line_retrieval import (
    Case,
    base_form,
    case_tokens,
    check_form,
    draw_case,
    draw_record,
    is_answered,
    is_correct,
    read_cases,
    write_cases,
)
from data.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
PUBLISHED = Path(__file__).parents[1] / "fixtures" / "line_retrieval.jsonl"
"""Made by hand, in the fields and words of the published files."""

each_form = pytest.mark.parametrize("name", FORMS)

# Tokens of a usual case, of forms that have too few names for 1200.
USUAL = {"letters": 150}


def draw_usual(name, **options) -> Case:
    return draw(FORMS[name](), tokens=USUAL.get(name, 1200), **options)


def draw(form, tokens=1200, depth=0.5, seed=0, tokenizer=BYTES) -> Case:
    rng = np.random.default_rng(seed)
    return draw_case(form, tokenizer, rng, tokens=tokens, depth=depth)


@each_form
def test_a_case_depends_on_its_seed_alone(name):
    first, again, other = (draw_usual(name, seed=seed) for seed in (5, 5, 6))
    assert first == again != other


@each_form
def test_the_prompt_holds_every_line_once_and_asks_for_the_right_one(name):
    form = FORMS[name]()
    case = draw_usual(name)
    body = case.prompt.removeprefix(form.header)
    lines = body[: body.index("\n\n") + 1].splitlines(keepends=True)
    assert len(lines) == case.num_lines == len(set(lines))
    assert lines[case.random_idx[1]] == case.correct_line
    assert case.correct_line == form.line(case.name, case.expected_number)
    assert case.prompt.endswith(form.end + form.question(case.name))


@each_form
@pytest.mark.parametrize("fewer", [0, 1, 27])
def test_length_is_within_a_line_of_what_is_asked_for(name, fewer):
    form, tokens = FORMS[name](), USUAL.get(name, 1200) - fewer
    for seed in range(3):
        size = case_tokens(form, BYTES, draw(form, tokens=tokens, seed=seed))
        longest = len("line 12345678901234-12345678: REGISTER_CONTENT is <50000>\n")
        # Another line is asked for when there is one more, and its name is shown twice.
        assert tokens - longest - 2 * 23 < size <= tokens


@each_form
@pytest.mark.parametrize("depth", [0, 0.25, 0.5, 1])
def test_the_line_is_at_the_depth_asked_for(name, depth):
    case = draw_usual(name, depth=depth)
    assert abs(case.depth - depth) <= 0.5001 / (case.num_lines - 1)
    assert case.random_idx[1] == round(depth * (case.num_lines - 1))


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match=r"depth=1.5 must be from 0"):
        draw(Compact(), depth=1.5)
    with pytest.raises(ValueError, match=r"500 tokens are too few .* which take 5"):
        draw(NamedLines(), tokens=500)
    with pytest.raises(ValueError, match=r"5000 tokens hold all of the 256 lines"):
        draw(Compact(), tokens=5000)
    with pytest.raises(ValueError, match=r"lines=257 must have at least 1 and at most"):
        draw_record(Compact(), 257, np.random.default_rng(0))
    with pytest.raises(ValueError, match=r"lines=0 must have at least 1$"):
        draw_record(NumberedLines(), 0, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("output", "expected", "right"),
    [
        ("The <REGISTER_CONTENT> in line 7 is <24169>.", 24169, True),
        ("<24169> is in line 7", 24169, False),  # the last integer counts
        ("24169.5", 24169, False),
        ("024169", 24169, True),
        ("I do not know.", 24169, False),
        ("24169" + "0" * 9000, 24169, False),  # more digits than Python reads
        ("0" * 9000 + "24169", 24169, True),
        ("", 0, False),
    ],
)
def test_the_last_integer_of_an_output_counts(output, expected, right):
    case = replace(draw(Compact()), expected_number=expected)
    assert is_correct(output, case) is right


def test_after_the_cue_the_answer_ends_with_its_line():
    case = replace(draw(Compact()), expected_number=47)
    assert is_answered(" <47>\nLine <ab>: 99", case) and is_answered("\n47\n9", case)
    assert not is_correct(" <47>\nLine <ab>: 99", case)
    assert not is_answered("48\n47", case)


def test_a_file_in_the_published_format_is_read():
    first, second = read_cases(PUBLISHED)
    assert first.random_idx == ("torpid-kid", 1) and first.expected_number == 24169
    assert (first.num_lines, first.depth) == (3, 0.5)
    assert second.random_idx == (2, 1) and second.depth == 1
    check_form(NamedLines(), first, "row 1")
    prompt, answer = base_form(NamedLines(), first)
    assert prompt.endswith("number.Line <torpid-kid>: <REGISTER_CONTENT> is")
    assert answer == " <24169>\n"
    with pytest.raises(ValueError, match=r"row 1: 'line torpid-kid: .* choose the for"):
        check_form(Compact(), first, "row 1")
    # Their prompts are what is drawn for the same lines.
    for case, form in ((first, NamedLines()), (second, NumberedLines())):
        body = case.prompt.removeprefix(form.header)
        assert body != case.prompt
        assert body.endswith(form.end + form.question(case.name))
        assert form.line(case.name, case.expected_number) == case.correct_line


@each_form
def test_written_cases_are_read_again(name, tmp_path):
    cases = [draw_usual(name, seed=seed) for seed in range(3)]
    write_cases(tmp_path / "cases.jsonl", cases)
    assert read_cases(tmp_path / "cases.jsonl") == cases
    row = json.loads((tmp_path / "cases.jsonl").read_text().splitlines()[0])
    fields = "random_idx", "expected_number", "num_lines", "correct_line", "prompt"
    assert tuple(row) == fields
    with pytest.raises(FileExistsError, match="cases.jsonl exists"):
        write_cases(tmp_path / "cases.jsonl", cases)
    assert [path.name for path in tmp_path.iterdir()] == ["cases.jsonl"]


A_PAIR = "random_idx must be a name and a place, got "


@pytest.mark.parametrize(
    "change, reason",
    [
        ("{", "Expecting property name"),
        ("[]", "must be an object, got list"),
        ({"prompt": None}, "it has no prompt"),
        ({"expected_number": "7"}, "expected_number must be int, got '7'"),
        ({"num_lines": True}, "num_lines must be int, got True"),
        ({"random_idx": [1]}, rf"{A_PAIR}\[1\]"),
        ({"random_idx": ["a", "b"]}, A_PAIR),
        ({"num_lines": 1, "random_idx": ["aa", 1]}, "must be below num_lines=1, got 1"),
        ({"expected_number": 5}, "does not say 5"),
        ({"random_idx": ["??", 0]}, r"is not called '\?\?'"),
        ({"prompt": "nothing"}, "is not in the prompt"),
        ({"random_idx": ["aa", True]}, A_PAIR),
        ({"random_idx": [True, 0]}, A_PAIR),
        ({"prompt": draw(Compact()).prompt + "\ud83d"}, "surrogates not allowed"),
        ("[" * 100_000, "lie too deep in each other"),
        ('{"num_lines": ' + "9" * 5000 + "}", "an integer of thousands of"),
        ('{"prompt": "", "prompt": ""}', "'prompt' stands twice"),
        ({"random_idx": [1] * 10**5}, rf"{A_PAIR}.*1, \.\.\.\]"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_bad_row_is_named_with_its_reason(tmp_path, change, reason):
    good = asdict(draw(Compact()))
    if isinstance(change, dict):
        fields = {k: v for k, v in (good | change).items() if v is not None}
        change = json.dumps(fields)
    path = tmp_path / "cases.jsonl"
    path.write_text(f"{json.dumps(good)}\n\n{change}\n")
    with pytest.raises(ValueError, match=reason) as error:
        read_cases(path)
    assert str(error.value).startswith(f"{path}:3 must be a case: ")
    assert str(error.value).isprintable() and len(str(error.value)) < 500


def test_a_file_without_cases_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_cases(tmp_path / "nowhere.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="has no cases"):
        read_cases(tmp_path / "empty.jsonl")
