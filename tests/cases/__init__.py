"""Tables of cases in text files: a case a line, beside comments."""

import math
from pathlib import Path
from typing import Any

import pytest

NUMBERS = {"inf": math.inf, "nan": math.nan, "__builtins__": {}}
"""Names that values may have."""


def lines(name: str) -> list[str]:
    """Returns the lines of a file that are not comments."""
    text = (Path(__file__).parent / name).read_text()
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def pairs(name: str, kind: str = "") -> list[tuple[str, str]]:
    """Returns a kind's cases: what is wrong, and behind an arrow what is said of it."""
    before = kind and f"{kind} "
    chosen = (line for line in lines(name) if line.startswith(before))
    return [tuple(line.removeprefix(before).split(" => ", 1)) for line in chosen]


def table(name: str, kind: str, **names: Any) -> list[tuple]:
    """Returns a kind's cases: values as in Python, and behind an arrow what is said.

    names: that the values may have.
    """
    found = (line.split(" ", 1) for line in lines(name))
    rows = [rest.split(" => ", 1) for before, rest in found if before == kind]
    assert rows or kind.startswith("slow-"), f"{name} has no case of {kind}"
    known = NUMBERS | names
    return [(*eval(f"({values},)", known), *said) for values, *said in rows]


def in_tiers(name: str, kind: str, **names: Any) -> list:
    """Returns the cases of a kind, and those of `slow-KIND`, marked as slow."""
    return [
        pytest.param(*case, marks=marks)
        for which, marks in ((kind, ()), (f"slow-{kind}", pytest.mark.slow))
        for case in table(name, which, **names)
    ]
