"""JSON that others wrote: its value, or one line that says what is wrong with it."""

import json
import reprlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 26
"""Limit of a file that describes others; those of the largest models have a few MB."""


def parse_json(text: str | bytes) -> Any:
    """Parses a JSON text; NaN and Infinity are numbers, as Python writes them.

    Raises:
      ValueError: it is not JSON, or has not one meaning and within reason: a name that
        stands twice in an object, thousands of brackets or digits.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError("its lists and objects lie too deep in each other") from error
    except ValueError as error:
        if "set_int_max_str_digits" in str(error):
            raise ValueError("it has an integer of thousands of digits") from error
        raise


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads the object that a file holds.

    Raises:
      OSError: the file cannot be read.
      ValueError: it holds no JSON object, or more than `MOST_BYTES`.
    """
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise ValueError(
            f"{path} has {size} bytes, and what it should hold takes {MOST_BYTES} at "
            "most: copy it again"
        )
    try:
        found = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): copy it again") from error
    if not isinstance(found, dict):
        raise ValueError(
            f"{path} must be a JSON object, got {type(found).__name__}: copy it again"
        )
    return found


def is_number(value: Any) -> bool:
    """Returns whether it is a finite number: not a text, not a truth value."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


short = reprlib.Repr(maxstring=200).repr
"""Formats a value in a line of some hundred letters, whatever its size."""


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice[:80]!r} stands twice in an object")
    return found
