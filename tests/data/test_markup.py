"""Markup is found in texts, and words that look like it are left alone."""

import pytest

from data.text.markup import SPECIAL, TAGS, check_markup, find_markup
from data.text.skipped import BadRow, Skipped
from tests.cases import table

NAMES = "<|im_start|> <|eot_id|> [INST] [/INST] <<SYS>> <</SYS>> <start_of_turn>"


@pytest.mark.parametrize("name", [*NAMES.split(), "<end_of_turn>", "<|endoftext|>"])
def test_names_of_special_tokens_are_found_anywhere(name):
    assert find_markup(f"some words\n{name}user") == SPECIAL


@pytest.mark.parametrize("text, kind", table("data.txt", "markup"))
def test_whole_documents_of_markup_are_found(text, kind):
    assert find_markup(text) == kind


def test_words_are_no_markup():
    for text in (*(text for (text,) in table("data.txt", "words")), "[" * 100_000):
        assert find_markup(text) is None, text[:12]


def test_more_than_half_is_refused_by_kind():
    found = Skipped()
    for number in range(5):
        found.add(BadRow(f"f[{number}]", TAGS if number < 4 else SPECIAL))
    check_markup(found, 8)
    with pytest.raises(
        ValueError, match=r"^4 of 7 documents .*HTML.* as f\[0\], .*--k"
    ):
        check_markup(found, 7)
