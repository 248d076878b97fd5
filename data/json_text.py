"""JSON that others wrote: its value, or one line that says what is wrong with it."""

import contextlib
import json
import re
import reprlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

MOST_READ = 1 << 16
"""Letters of a list that are read at a time, where its values are not longer."""
MOST_OF_ONE = 1 << 30
"""Bytes of a text, a line or a value of a list, each of which is held whole."""
SPACES = re.compile(r"[ \t\n\r]*")
MOST_BYTES = 1 << 26
"""Limit of a file that describes others; the largest models' have a few MB."""


def parse_json(text: str | bytes) -> Any:
    """Parses a JSON text; NaN and Infinity are numbers, as Python writes them.

    Raises:
      ValueError: it is not JSON, or has not one meaning and within reason: a name that
        stands twice in an object, thousands of brackets or digits.
    """
    with _within_reason():
        return json.loads(text, object_pairs_hook=_object)


def iterate_list(read: Callable[[int], str]) -> Iterator[Any]:
    """Yields the values of a JSON list one by one, as `parse_json` would parse them.

    read: returns up to a number of letters more of the list's text, "" at its end.
      Memory holds about as many letters as the largest value has.

    Raises:
      ValueError: it is not a list, or as `parse_json`.
    """
    decoder = json.JSONDecoder(object_pairs_hook=_object)
    text, number = read(MOST_READ), 0

    def rest(begin: int) -> str:
        """Returns the text from the next letter on that is no space; "" at its end."""
        found = text[SPACES.match(text, begin).end() :]
        while not found and (more := read(MOST_READ)):
            found = more[SPACES.match(more).end() :]
        return found

    text = rest(0)
    if not text.startswith("["):
        raise ValueError("it is not a list")
    text = rest(1)
    is_going_on = not text.startswith("]")
    while is_going_on:
        more = text
        while True:
            # A number may go on behind what has been read, and only then is it whole.
            with contextlib.suppress(json.JSONDecodeError), _within_reason():
                value, end = decoder.raw_decode(text)
                if end < len(text) or not more:
                    break
            if not more:
                raise ValueError(f"its value {number} is not JSON, or cut short")
            check_size(len(text), f"its value {number}")
            room = MOST_OF_ONE + 1 - len(text)
            more = read(min(max(MOST_READ, len(text)), room))
            text += more
        yield value
        text, number = rest(end), number + 1
        is_going_on = text.startswith(",")
        if is_going_on:
            text = rest(1)
    if not text.startswith("]") or rest(1):
        raise ValueError(f"it does not end behind its {number} values")


def check_size(size: int, what: str) -> None:
    """Raises ValueError if a text, a line or a value has more than `MOST_OF_ONE`."""
    if size > MOST_OF_ONE:
        raise ValueError(
            f"{what} has more than {MOST_OF_ONE:,} bytes, and is held whole: split it "
            "into several rows or files"
        )


@contextlib.contextmanager
def _within_reason() -> Iterator[None]:
    try:
        yield
    except RecursionError as error:
        raise ValueError("its lists and objects lie too deep in each other") from error
    except ValueError as error:
        if "set_int_max_str_digits" in str(error):
            raise ValueError("it has an integer of thousands of digits") from error
        raise


def read_json_object(
    path: Path, remedy: str = "copy it again", most: int = MOST_BYTES
) -> dict[str, Any]:
    """Reads the object that a file holds.

    remedy: what to do about a bad one. most: bytes of it.

    Raises:
      OSError: the file cannot be read.
      ValueError: it holds no JSON object, or more bytes.
    """
    size = path.stat().st_size
    if size > most:
        raise ValueError(
            f"{path} has {size} bytes, and what it should hold takes {most} at "
            f"most: {remedy}"
        )
    try:
        found = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): {remedy}") from error
    if not isinstance(found, dict):
        raise ValueError(
            f"{path} must be a JSON object, got {type(found).__name__}: {remedy}"
        )
    return found


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
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice[:80]!r} stands twice in an object")
    return found
