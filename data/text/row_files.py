"""Files of rows: Parquet, Arrow, JSON lines, JSON lists and CSV, a row at a time.

All but Parquet and Arrow's file format, whose ends are read first, may be compressed,
and so may texts: `.gz` or `.zst` behind the ending. Memory holds a row, a record batch
or pages of a row group, whatever the size of the file; and a row that is longer than
`MOST_OF_ONE`, as a small file may unpack to, is refused.
"""

import contextlib
import csv
import io
from collections.abc import Collection, Iterator
from itertools import count
from pathlib import Path
from typing import IO, Any, BinaryIO

from data.json_text import MOST_OF_ONE, check_size, iterate_list, parse_json, short
from data.text.skipped import BadRow

CODECS = {".gz": "gzip", ".zst": "zstd"}
TABLES = (".parquet", ".arrow", ".feather")
SEPARATORS = {".csv": ",", ".tsv": "\t"}
FORMATS = (".jsonl", ".ndjson", ".json", *SEPARATORS, *TABLES)
"""Endings of files of rows."""

# First bytes of files, whatever they are called.
ARROW_FILE = b"ARROW1"
BEGINNINGS = {
    b"PAR1": ".parquet",
    ARROW_FILE: ".arrow",
    b"\x1f\x8b": ".gz",
    b"\x28\xb5\x2f\xfd": ".zst",
}
TABLE_IS_COMPRESSED = "tables are compressed inside and read from their ends: unpack it"
LFS_POINTER = b"version https://git-lfs.github.com/spec/"

# Letters of a library's error that are said.
MOST_SAID = 300
# Rows of a table that are Python's at a time, and bytes of a column read at a time.
ROWS_AT_A_TIME = 64
BUFFER_BYTES = 1 << 20


def ending(path: Path) -> str:
    """Returns the ending that says what a file holds, without a codec's."""
    name = path.with_suffix("") if path.suffix.lower() in CODECS else path
    return name.suffix.lower()


def check_beginning(path: Path) -> None:
    """Refuses a file whose first bytes say that it is not what it is called.

    Raises:
      ValueError: it is a pointer of Git LFS, a table or a compressed file without the
        ending, or a compressed table.
    """
    with path.open("rb") as file:
        head = file.read(len(LFS_POINTER))
    if head == LFS_POINTER:
        raise ValueError(
            f"{path} is a pointer of Git LFS, not the file: fetch it (git lfs pull)"
        )
    is_compressed = path.suffix.lower() in CODECS
    if is_compressed and ending(path) == ".parquet":
        raise ValueError(f"{path}: {TABLE_IS_COMPRESSED}")
    for beginning, wanted in BEGINNINGS.items():
        own = path.suffix.lower() if wanted in CODECS else ending(path)
        own = ".arrow" if own == ".feather" else own
        if head.startswith(beginning) and own != wanted:
            raise ValueError(
                f"{path} begins as a {wanted} file: give it the ending {wanted}"
            )


def open_bytes(path: Path) -> BinaryIO:
    """Opens a file, decompressed where its ending names a codec.

    Raises:
      OSError: it cannot be opened; later, where compressed bytes are damaged.
    """
    codec = CODECS.get(path.suffix.lower())
    if codec is None:
        return path.open("rb")
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path), compression=codec))


def read_rows(path: Path, columns: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yields every row of a file: where it is, and its value, or a `BadRow`.

    columns: names of the columns to read; a table may lack some of them.

    Raises:
      OSError, ValueError: the file is damaged, not what its ending says, or a table
        with none of the columns.
    """
    kind = ending(path)
    with naming(path):
        if kind == ".parquet":
            yield from _parquet(path, columns)
        elif kind in TABLES:
            yield from _arrow(path, columns)
        elif kind in SEPARATORS:
            yield from _separated(path, columns, SEPARATORS[kind])
        elif kind == ".json" and _first_letter(path) == b"[":
            yield from _json_list(path)
        else:
            yield from _json_lines(path)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Makes what libraries raise where a file is damaged one line that names it."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:  # also MemoryError: damaged lengths are believed
        if isinstance(error, ValueError) and str(error).startswith(str(path)):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        reason = "".join(c if c.isprintable() else "?" for c in reason[:MOST_SAID])
        raise ValueError(
            f"{path} cannot be read as a {ending(path)} file ({reason}): mend it or "
            "copy it again"
        ) from error


def _first_letter(path: Path) -> bytes:
    """Returns the first byte that is neither a space nor a mark of the byte order."""
    with open_bytes(path) as file:
        while part := file.read(1 << 12):
            found = part.removeprefix(b"\xef\xbb\xbf").lstrip()
            if found:
                return found[:1]
    return b""


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    with open_bytes(path) as file:
        for where, line in _lines(path, file):
            if line.strip():
                yield where, _parsed(where, line)


def _lines[T: (str, bytes)](path: Path, file: IO[T]) -> Iterator[tuple[str, T]]:
    """Yields where each line is, and the line; refuses one beyond `MOST_OF_ONE`."""
    for number in count(1):
        where, line = f"{path}:{number}", file.readline(MOST_OF_ONE + 1)
        check_size(len(line), where)
        if not line:
            return
        yield where, line


def _parsed(where: str, line: bytes) -> Any:
    try:
        return parse_json(line)
    except ValueError as error:
        return BadRow(where, f"no JSON ({error})")


def _json_list(path: Path) -> Iterator[tuple[str, Any]]:
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig") as text:
        for number, row in enumerate(iterate_list(text.read)):
            yield f"{path}[{number}]", row


def _separated(
    path: Path, columns: Collection[str], separator: str
) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(MOST_OF_ONE)  # of 128 KiB otherwise: documents are longer
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="") as file:
        lines = (line for _, line in _lines(path, file))
        rows = csv.reader(lines, delimiter=separator, strict=True)
        header = next(rows, [])
        if len({*header}) < len(header):
            raise ValueError(f"{path} names a column twice: {short(header)}")
        _existing(path, header, columns)
        begin = rows.line_num + 1
        for row in rows:
            where, begin = f"{path}:{begin}", rows.line_num + 1
            if len(row) == len(header):
                yield where, dict(zip(header, row, strict=True))
            elif row:
                reason = f"{len(row)} fields under a header of {len(header)}"
                yield where, BadRow(where, reason)


def _parquet(path: Path, columns: Collection[str]) -> Iterator[tuple[str, Any]]:
    from pyarrow.parquet import ParquetFile

    # Without a buffer a whole column of a row group would be in memory.
    with ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
        existing = _existing(path, file.schema_arrow.names, columns)
        number = 0
        # Without threads: one may still read when another has found damage.
        read = {"columns": existing, "use_threads": False}
        for batch in file.iter_batches(ROWS_AT_A_TIME, **read):
            for row in batch.to_pylist():
                yield f"{path}[{number}]", row
                number += 1


def _arrow(path: Path, columns: Collection[str]) -> Iterator[tuple[str, Any]]:
    from pyarrow import ipc

    number = 0
    with open_bytes(path) as file:
        is_file = file.peek(len(ARROW_FILE)).startswith(ARROW_FILE)
        if is_file and not file.seekable():
            raise ValueError(f"{path}: {TABLE_IS_COMPRESSED}")
        batches = ipc.open_file(file) if is_file else ipc.open_stream(file)
        existing = _existing(path, batches.schema.names, columns)
        if is_file:
            batches = map(batches.get_batch, range(batches.num_record_batches))
        for batch in batches:
            wanted = batch.select(existing)
            wanted.validate(full=True)  # reading damaged lengths ends the process
            for begin in range(0, len(batch), ROWS_AT_A_TIME):
                for row in wanted.slice(begin, ROWS_AT_A_TIME).to_pylist():
                    yield f"{path}[{number}]", row
                    number += 1


def _existing(path: Path, names: list[str], columns: Collection[str]) -> list[str]:
    """Returns the columns that there are; refuses a table that has none of them."""
    found = [name for name in names if name in columns]
    if not found:
        raise ValueError(
            f"{path} has no column {' or '.join(columns)}, but {short(names)}: choose "
            "another column (--text-field of texts) or file"
        )
    return found
