"""Tables of cases in text files: a case a line, beside comments."""

import math
from pathlib import Path

import pytest

NUMBERS = {"inf": math.inf, "nan": math.nan, "__builtins__": {}}


def lines(name: str) -> list[str]:
    text = (Path(__file__).parent / name).read_text()
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def pairs(name: str, kind: str = "") -> list[tuple[str, str]]:
    """What is wrong, and what is said of it, around an arrow; of the kind before it."""
    before = kind and f"{kind} "
    chosen = (line for line in lines(name) if line.startswith(before))
    return [tuple(line.removeprefix(before).split(" => ", 1)) for line in chosen]


def table(name: str, kind: str) -> list[tuple]:
    """Cases of a kind: values as in Python, and behind an arrow what is said."""
    found = (line.split(" ", 1) for line in lines(name))
    rows = [rest.split(" => ", 1) for before, rest in found if before == kind]
    return [(*eval(f"({values},)", NUMBERS), *said) for values, *said in rows]


def in_tiers(name: str, kind: str) -> list:
    """Cases of a kind, and those of `slow-KIND`, which are marked so."""
    slow = (
        pytest.param(*c, marks=pytest.mark.slow) for c in table(name, f"slow-{kind}")
    )
    return [*table(name, kind), *slow]
