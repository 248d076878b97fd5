"""Forms of lines, and cases of them: of the right words, length, line and depth."""

from collections.abc import Callable

import numpy as np
import pytest

from data.retrieval.lines import FORMS, Case, LineForm, draw_case

each_form = pytest.mark.parametrize("name", FORMS)

# Tokens of a usual case, of forms that have too few names for 1200.
USUAL = {"letters": 150}


def draw(form: LineForm, tokens: int, depth: float = 0.5, seed: int = 0) -> Case:
    rng = np.random.default_rng(seed)
    return draw_case(form, rng, size_in(form), tokens=tokens, depth=depth)


def size_in(form: LineForm) -> Callable[[Case], int]:
    """Counts the letters of prompt, cue and answer together."""
    return lambda case: len(
        case.prompt
        + form.cue.format(name=case.name)
        + form.answer.format(number=case.number)
    )


@each_form
@pytest.mark.parametrize("depth", [0, 0.25, 1])
def test_a_case_is_a_matter_of_its_seed_and_asks_for_the_line_at_its_depth(name, depth):
    form, tokens = FORMS[name], USUAL.get(name, 1200)
    case, again, other = (draw(form, tokens, depth, seed) for seed in (5, 5, 6))
    assert case == again != other
    body = case.prompt.removeprefix(form.header)
    lines = body[: body.index("\n\n") + 1].splitlines(keepends=True)
    assert len(lines) == case.lines == len(set(lines))
    assert lines[case.place] == form.line.format(name=case.name, number=case.number)
    assert case.prompt.endswith(form.end + form.question.format(name=case.name))
    assert case.place == round(depth * (case.lines - 1))


@each_form
def test_length_is_within_a_line_of_what_is_asked_for(name):
    form, usual = FORMS[name], USUAL.get(name, 1200)
    longest = len("line 12345678901234-12345678: REGISTER_CONTENT is <50000>\n")
    for tokens in (usual, usual - 1, usual - 27):
        size = size_in(form)(draw(form, tokens, seed=tokens))
        # Another line is asked for when there is one more, and its name is shown twice.
        assert tokens - longest - 2 * 23 < size <= tokens


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match=r"500 tokens are too few .* which take 5"):
        draw(FORMS["LRT-NL"], 500)
    with pytest.raises(ValueError, match=r"5000 tokens hold all of the 256 lines"):
        draw(FORMS["compact"], 5000)


@each_form
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
