"""Forms of lines, and records of them: of the right words and names."""

import numpy as np
import pytest

from data.retrieval.lines import FORMS


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
