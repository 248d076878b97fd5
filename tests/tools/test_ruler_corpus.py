"""A corpus of RULER's tasks holds prompts with their answers."""

import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from data.tokenizer import ByteTokenizer
from tools.lib.ruler.corpus import TEACHABLE, TaskDocuments
from tools.lib.ruler.tasks import SEED

BYTES = ByteTokenizer()


def documents(task: str, *options: Any) -> list[tuple[str, str]]:
    """Returns text, and its supervised part, of 20 documents."""
    drawn = TaskDocuments(BYTES, [task], 3000, 1, *options)
    rng = np.random.default_rng(0)
    found = [drawn.draw(rng) for _ in range(20)]
    for document in found:
        assert document.tokens.size <= 3000
        assert document.tokens[-1] == BYTES.end_of_document
        assert document.is_supervised[-1]
    return [
        (BYTES.decode(d.tokens), BYTES.decode(d.tokens[d.is_supervised])) for d in found
    ]


@pytest.mark.parametrize("task", TEACHABLE[:3])
def test_needles_are_asked_for_and_answered(task):
    found = documents(task)
    for text, answer in found:
        key, value = re.fullmatch(r".* for (.+) mentioned .* is (\S+)", answer).groups()
        assert f"for {key} is: {value}." in text and text.endswith(answer)
    assert len({text.count("\n") for text, _ in found}) > 5  # of many lengths


def names_of_a_chain(text: str, answer: str) -> int:
    """Counts the names of an answer, which must be those of the text's last chain."""
    value, names = re.fullmatch(r"(?:.* value )?(\d{5}),.*? {2}(.*)", answer).groups()
    chain = f"VAR {names.split()[0]} = {value}.*" + ".*".join(
        rf"VAR {new} = VAR {old} " for old, new in pairwise(names.split())
    )
    assert re.search(chain, text, re.DOTALL)
    return names.count(" ") + 1


def test_chains_are_answered_in_their_order():
    found = documents("vt")
    assert {2, 5, 9} <= {names_of_a_chain(*both) for both in found} <= {*range(2, 10)}
    examples = [text.count("they are") == 2 for text, _ in found]
    assert any(examples) and not all(examples)
    # Lines of noise have all their sentences, some, or none.
    last = [text.rpartition("Memorize")[2] for text, _ in found]
    whole = [text.count("back again.") == text.count("The grass") for text in last]
    assert any(whole) and not all(whole)


def test_bare_chains_have_nothing_around_them():
    for text, answer in documents("vt", "answers", True):
        lines = text.splitlines()
        assert names_of_a_chain(text, answer) == len(lines) - 1
        assert lines[-1] == answer


# Tasks, context and seed: what is said of them.
BAD = {
    ("cwe", 3000, 1): "task cwe must be one of niah_single_1, ",
    ("vt", 3000, SEED): "seed 42 is that of RULER's prompts",
    ("vt", 5, 1): "5 tokens are too few for documents of vt",
    ("niah_single_1", 3000, 1, "all", True): "only vt can be bare, not niah_single_1",
}


@pytest.mark.parametrize("wrong", BAD)
def test_what_cannot_be_taught_is_refused(wrong):
    task, *rest = wrong
    with pytest.raises(ValueError, match=BAD[wrong]):
        TaskDocuments(BYTES, [task], *rest).draw(np.random.default_rng(0))
