"""Units of the inputs: what one process reads at a time.

A unit is some files, or a part of a large one: lines of JSON, row groups of Parquet or
record batches of Arrow's file format. A large file of another kind, or a compressed
one, is a unit whatever its size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from data.json_text import MOST_OF_ONE
from data.remote import open_binary
from data.text.reading.row_files import (
    JSON_LINES,
    InputFile,
    Span,
    naming,
    rows_of_groups,
)

UNIT_BYTES = 1 << 26
"""Of a unit, as it lies on the disk: half a minute of tokenizing."""


@dataclass(frozen=True)
class Unit:
    """Files to read one after the other.

    states: size of each file, and when it was changed last, in nanoseconds.
    bytes: to read, about.
    """

    files: Sequence[InputFile]
    states: Sequence[tuple[int, int]]
    bytes: int

    def check_unchanged(self) -> None:
        """Raises ValueError if a file is not as it was when the unit was made."""
        for file, before in zip(self.files, self.states, strict=True):
            now = _state(file.path)
            if now != before:
                raise ValueError(
                    f"{file.path} changed while it was read, from {before[0]} bytes to "
                    f"{now[0]}: prepare it again"
                )


def units_of(files: Sequence[InputFile]) -> Iterator[Unit]:
    """Yields the units of the files, in their order, whoever is to read them.

    Raises:
      OSError, ValueError: a file is damaged.
    """
    some: list[InputFile] = []
    states: list[tuple[int, int]] = []
    size = 0
    for file in files:
        state = _state(file.path)
        own, _ = state
        if some and size + own > UNIT_BYTES:
            yield Unit(some, states, size)
            some = []
            states = []
            size = 0
        is_split = False
        for span in _spans(file.path) if own > UNIT_BYTES else ():
            is_split = True
            share = own * (span.end - span.begin) // span.size
            yield Unit([file._replace(span=span)], [state], share)
        if not is_split:
            some.append(file)
            states.append(state)
            size += own
    if some:
        yield Unit(some, states, size)


def _state(path: Path) -> tuple[int, int]:
    facts = path.stat()
    return facts.st_size, facts.st_mtime_ns


def _spans(path: Path) -> Iterator[Span]:
    """Yields parts of a file, each of about `UNIT_BYTES` or one group."""
    with naming(path):
        if path.suffix.lower() in JSON_LINES:
            yield from _spans_of_lines(path)
            return
        rows = rows_of_groups(path)
        before = [0, *accumulate(rows)]
        count = len(rows)
        groups = max(count * UNIT_BYTES // path.stat().st_size, 1)
        for begin in range(0, count, groups):
            yield Span(begin, min(begin + groups, count), count, before[begin])


def _spans_of_lines(path: Path) -> Iterator[Span]:
    begin = 0
    rows = 0
    size = path.stat().st_size
    with open_binary(path) as file:
        while part := file.read(UNIT_BYTES):
            rest = file.readline(MOST_OF_ONE + 1)
            yield Span(begin, file.tell(), size, rows)
            begin = file.tell()
            rows += part.count(b"\n") + rest.count(b"\n")
