"""Forms of lines, and cases of them: of the right words, length, line and depth."""

import re

import numpy as np
import pytest

from data.retrieval.line_forms import (
    FORMS,
    WORDS,
    Compact,
    Letters,
    NamedLines,
    NumberedLines,
)
from data.retrieval.line_retrieval import Case, case_tokens, draw_case, draw_record
from data.text.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
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


def test_words_make_more_than_45_thousand_names():
    for file in ("line_adjectives.txt", "line_nouns.txt"):
        words = (WORDS / file).read_text().split()
        assert len(set(words)) == len(words) >= 300
        assert all(re.fullmatch("[a-z]+", word) for word in words)
    assert NamedLines().names >= 45_000


@each_form
def test_no_two_lines_have_one_name(name):
    form = FORMS[name]()
    count = form.names or 5000
    order = form.order(count, np.random.default_rng(3))
    names = {form.name(which) for which in order.tolist()}
    assert len(names) == order.size == count


def test_lines_are_written_as_published():
    form = NamedLines()
    assert form.line("torpid-kid", 24169) == (
        "line torpid-kid: REGISTER_CONTENT is <24169>\n"
    )
    assert (form.end + form.question("torpid-kid")) == (
        "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line "
        "torpid-kid? I need the number."
    )
    assert form.cue("torpid-kid") == "Line <torpid-kid>: <REGISTER_CONTENT> is"
    assert form.numbers == (1, 50_001)


def test_a_line_of_letters_is_four_bytes_and_no_two_names_are_alike():
    form = Letters()
    names = [form.name(which) for which in range(form.names)]
    assert len(set(names)) == 52 and all(name.isalpha() for name in names)
    assert {len(form.line(name, 10)) for name in names} == {4}
    assert form.line(names[3], 47) == form.cue(names[3]) + form.answer(47) == "d47\n"
