"""JSON that others wrote: its value, or one line that says what is wrong with it."""

import json
import reprlib
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MOST_OF_ONE = 1 << 30
"""Bytes of a text, a line or a list, each of which is held whole."""


def parse_json(text: str | bytes | bytearray) -> Any:
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


def check_size(size: int, what: str) -> None:
    """Raises ValueError if a text, a line or a value has more than `MOST_OF_ONE`."""
    if size > MOST_OF_ONE:
        raise ValueError(
            f"{what} has more than {MOST_OF_ONE:,} bytes, and is held whole: split it "
            "into several rows or files"
        )


def read_json_object(path: Path, remedy: str = "copy it again") -> dict[str, Any]:
    """Reads the object that a file holds.

    remedy: what to do about a bad one.

    Raises:
      OSError: the file cannot be read.
      ValueError: it holds no JSON object.
    """
    check_size(path.stat().st_size, str(path))
    try:
        value = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): {remedy}") from error
    if not isinstance(value, dict):
        raise ValueError(
            f"{path} must be a JSON object, got {type(value).__name__}: {remedy}"
        )
    return value


def is_number(value: Any) -> bool:
    """Returns whether it is a finite number: not a text, not a truth value."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def is_unicode(text: str) -> bool:
    """Returns whether it can be encoded: JSON can spell half a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


_REPR = reprlib.Repr()
_REPR.maxstring = 200
short = _REPR.repr
"""Formats a value in a line of some hundred letters, whatever its size."""


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"{twice[:80]!r} stands twice in an object")
    return values
