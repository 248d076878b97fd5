"""Names of special tokens in texts: found, and broken up in the words of people."""

import re
from collections.abc import Iterable
from typing import Any

from data.text.tokens.tokenizer import Tokenizer

MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Unicode noncharacters. One of them breaks up special-token names in user text."""


def broken(value: Any, names: re.Pattern, mark: str) -> Any:
    """Returns a value of JSON in whose texts no name stands: a mark breaks them up."""
    if isinstance(value, str):
        # To break one up may make another one.
        while names.search(value):
            value = names.sub(lambda name: mark.join(name[0]), value)
    elif isinstance(value, dict):
        return {
            broken(n, names, mark): broken(v, names, mark) for n, v in value.items()
        }
    elif isinstance(value, list):
        return [broken(item, names, mark) for item in value]
    return value


def patterns(
    tokenizer: Tokenizer, special: Iterable[str]
) -> tuple[re.Pattern, re.Pattern]:
    """Returns what finds names of special tokens, and with the blanks that they take.

    The second is a group, for `split`.
    """
    longest_first = sorted(special, key=len, reverse=True)
    # One letter could not be broken up by a mark.
    names = [name for name in longest_first if len(name) > 1]
    with_blanks = []
    for name in names:
        left, right = tokenizer.strips.get(name, (False, False))
        # Only from their first one on: else each of many is a start of its own.
        before = r"(?:(?<!\s)\s++)?" * left
        with_blanks.append(before + re.escape(name) + r"\s*" * right)
    never = "(?!)"
    alone = "|".join(map(re.escape, names)) or never
    return re.compile(alone), re.compile(f"({'|'.join(with_blanks) or never})")
