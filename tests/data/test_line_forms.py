"""How records are written: LongEval's words, and names that no two lines share."""

import re

import numpy as np
import pytest

from data.line_forms import FORMS, WORDS, Letters, NamedLines

each_form = pytest.mark.parametrize("name", FORMS)


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
