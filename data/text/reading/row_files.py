"""Files of rows and of texts: a table of formats, each read a row at a time.

All but Parquet and Arrow's file format, whose ends are read first, may be compressed,
and so may texts: `.gz` or `.zst` behind the ending. Memory holds a row, a record batch
or pages of a row group, whatever the size of the file, but lists of JSON whole; and a
row, or list, beyond `MOST_OF_ONE`, as a small file may unpack to, is refused.
"""

import contextlib
import csv
import io
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import IO, Any, NamedTuple

from data.json_text import MOST_OF_ONE, check_size, is_unicode, parse_json, short
from data.remote import is_bucket, open_binary
from data.text.reading.skipped import BadRow

CODECS = {".gz": "gzip", ".zst": "zstd"}
TABLES = (".parquet", ".arrow", ".feather")
JSON_LINES = (".jsonl", ".ndjson")
AMBIGUOUS = (".json", ".csv", ".tsv")
"""Endings of files that may hold rows of texts, and else are texts themselves."""

# First bytes of files, whatever they are called.
ARROW_FILE = b"ARROW1"
BEGINNINGS = {
    b"PAR1": (".parquet",),
    ARROW_FILE: (".arrow", ".feather"),
    b"\x1f\x8b": (".gz",),
    b"\x28\xb5\x2f\xfd": (".zst",),
}
TABLE_IS_COMPRESSED = "tables are compressed inside and read from their ends: unpack it"
LFS_POINTER = b"version https://git-lfs.github.com/spec/"

MOST_SHOWN = 300  # letters of a library's error
# Of a column, read at a time.
BUFFER_BYTES = 1 << 20


class Span(NamedTuple):
    """Part of a file of rows: those of `begin` up to `end`, of `size` in all.

    They are bytes of lines, row groups or record batches. rows: rows before them.
    """

    begin: int
    end: int
    size: int
    rows: int


class InputFile(NamedTuple):
    """A file to read.

    split: "train" or "validation"; None: each document's words decide.
    is_named: whether it is an input itself, not found in a directory.
    span: what is read of it; None: all.
    """

    path: Path
    split: str | None
    is_named: bool
    span: Span | None = None


class TextDocument(NamedTuple):
    """A document that is not empty, where it is, and its split (see `InputFile`)."""

    where: str
    text: str
    split: str | None


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
    codec = path.suffix.lower()
    if codec in CODECS and ending(path) == ".parquet":
        raise ValueError(f"{path}: {TABLE_IS_COMPRESSED}")
    for beginning, endings in BEGINNINGS.items():
        wanted, *_ = endings
        own = codec if wanted in CODECS else ending(path)
        if head.startswith(beginning) and own not in endings:
            raise ValueError(
                f"{path} begins as a {wanted} file: give it the ending {wanted}"
            )


def open_bytes(path: Path) -> io.BufferedReader:
    """Opens a file, decompressed where its ending names a codec.

    Raises:
      OSError: it cannot be opened; later, where compressed bytes are damaged.
    """
    codec = CODECS.get(path.suffix.lower())
    if codec is None:
        return open_binary(path)
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(open_binary(path), compression=codec))


def read_rows(
    path: Path, columns: Collection[str], span: Span | None = None
) -> Iterator[tuple[str, Any]]:
    """Yields every row of a file: where it is, and its value, or a `BadRow`.

    columns: names of the columns to read; a table may lack some of them.
    span: of its rows, which alone are read; None: all.

    Raises:
      OSError, ValueError: the file is damaged, not what its ending says, or a table
        with none of the columns.
    """
    with naming(path):
        yield from FORMATS[ending(path)](path, columns, span)


def rows_of_groups(path: Path) -> list[int]:
    """Returns the rows of each row group or record batch; []: it is read whole."""
    if path.suffix.lower() == ".parquet":
        from pyarrow.parquet import read_metadata

        with open_binary(path) as file:
            facts = read_metadata(file)
        return [facts.row_group(i).num_rows for i in range(facts.num_row_groups)]
    if path.suffix.lower() in TABLES:
        from pyarrow import ipc

        with open_binary(path) as file:
            if file.peek(len(ARROW_FILE)).startswith(ARROW_FILE):
                opened = ipc.open_file(file)
                batches = range(opened.num_record_batches)
                return [opened.get_batch(i).num_rows for i in batches]
    return []


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
        reason = "".join(c if c.isprintable() else "?" for c in reason[:MOST_SHOWN])
        raise ValueError(
            f"{path} cannot be read as a {ending(path)} file ({reason}): mend it or "
            "copy it again"
        ) from error


def _json_lines(
    path: Path, _: Collection[str], span: Span | None
) -> Iterator[tuple[str, Any]]:
    with open_bytes(path) as file:
        for where, line in _lines(path, file, span):
            if line.strip():
                try:
                    yield where, parse_json(line)
                except ValueError as error:
                    yield where, BadRow(where, f"no JSON ({error})")


def _lines[T: (str, bytes)](
    path: Path, file: IO[T], span: Span | None = None
) -> Iterator[tuple[str, T]]:
    """Yields where each line is, and the line; refuses one beyond `MOST_OF_ONE`."""
    left = math.inf
    before = 0
    if span:
        left = span.end - file.seek(span.begin)
        before = span.rows
    for number in count(before + 1):
        where = f"{path}:{number}"
        line = file.readline(MOST_OF_ONE + 1)
        check_size(len(line), where)
        if not line or left <= 0:
            return
        yield where, line
        left -= len(line)


def _json(
    path: Path, columns: Collection[str], _: Span | None
) -> Iterator[tuple[str, Any]]:
    if _first_letter(path) != b"[":
        yield from _json_lines(path, columns, None)
        return
    for number, row in enumerate(parse_json(_all(path))):
        yield f"{path}[{number}]", row


def _all(path: Path) -> bytearray:
    """Reads a file whole, but refuses one beyond `MOST_OF_ONE`."""
    content = bytearray()
    with open_bytes(path) as file:
        while part := file.read(BUFFER_BYTES):
            content += part
            check_size(len(content), str(path))
    return content


def _first_letter(path: Path) -> bytes:
    """Returns the first byte that is neither a space nor a mark of the byte order."""
    with open_bytes(path) as file:
        while part := file.read(1 << 12):
            letters = part.removeprefix(b"\xef\xbb\xbf").lstrip()
            if letters:
                return letters[:1]
    return b""


def _separated(
    path: Path, columns: Collection[str], _: Span | None
) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(MOST_OF_ONE)  # of 128 KiB otherwise: documents are longer
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="") as file:
        lines = (line for _, line in _lines(path, file))
        separator = "\t" if ending(path) == ".tsv" else ","
        rows = csv.reader(lines, delimiter=separator, strict=True)
        header = next(rows, [])
        if len({*header}) < len(header):
            raise ValueError(f"{path} names a column twice: {short(header)}")
        _existing(path, header, columns)
        begin = rows.line_num + 1
        for row in rows:
            where = f"{path}:{begin}"
            begin = rows.line_num + 1
            if len(row) == len(header):
                yield where, dict(zip(header, row, strict=True))
            elif row:
                reason = f"{len(row)} fields under a header of {len(header)}"
                yield where, BadRow(where, reason)


def _table(
    path: Path, columns: Collection[str], span: Span | None
) -> Iterator[tuple[str, Any]]:
    batches = _parquet if ending(path) == ".parquet" else _arrow
    groups = range(span.begin, span.end) if span else None
    read = batches(path, columns, groups)
    rows = chain.from_iterable(batch.to_pylist() for batch in read)
    for number, row in enumerate(rows, span.rows if span else 0):
        yield f"{path}[{number}]", row


def _parquet(
    path: Path, columns: Collection[str], groups: range | None
) -> Iterator[Any]:
    """Yields batches of one row: a dictionary's value may be long, and be in many."""
    from pyarrow.parquet import ParquetFile

    # Without a buffer a whole column of a row group would be in memory.
    buffered = {"buffer_size": BUFFER_BYTES, "pre_buffer": False}
    # Arrow buffers less of a file that it opens itself.
    source = open_binary(path) if is_bucket(path) else contextlib.nullcontext(path)
    with source as opened, ParquetFile(opened, **buffered) as file:
        existing = _existing(path, file.schema_arrow.names, columns)
        # Without threads: one may still read when another has found damage.
        read = {"row_groups": groups, "columns": existing, "use_threads": False}
        yield from file.iter_batches(1, **read)


def _arrow(path: Path, columns: Collection[str], groups: range | None) -> Iterator[Any]:
    """Yields batches of one row, as `_parquet`."""
    from pyarrow import ipc

    with open_bytes(path) as file:
        is_file = file.peek(len(ARROW_FILE)).startswith(ARROW_FILE)
        if is_file and not file.seekable():
            raise ValueError(f"{path}: {TABLE_IS_COMPRESSED}")
        batches = ipc.open_file(file) if is_file else ipc.open_stream(file)
        existing = _existing(path, batches.schema.names, columns)
        if is_file:
            numbers = groups or range(batches.num_record_batches)
            batches = map(batches.get_batch, numbers)
        for batch in batches:
            wanted = batch.select(existing)
            wanted.validate(full=True)  # reading damaged lengths ends the process
            for row in range(len(batch)):
                yield wanted.slice(row, 1)


def _existing(path: Path, names: list[str], columns: Collection[str]) -> list[str]:
    """Returns the columns that there are; refuses a table that has none of them."""
    existing = [name for name in names if name in columns]
    if not existing:
        known = [name for name in columns if name != "id"][:3]  # of chats' twenty
        raise ValueError(
            f"{path} has no column {' or '.join(known)}, but {short(names)}: "
            "choose another column (--text-field, --fields) or file"
        )
    return existing


FORMATS: Mapping[str, Callable[..., Iterator[tuple[str, Any]]]] = {
    **dict.fromkeys(JSON_LINES, _json_lines),
    ".json": _json,
    **dict.fromkeys((".csv", ".tsv"), _separated),
    **dict.fromkeys(TABLES, _table),
}
"""Readers of files of rows, by their endings."""


def read_documents(
    files: Sequence[InputFile], text_field: str
) -> Iterator[TextDocument | BadRow]:
    """Yields the documents of the files, in their order, and bad rows.

    text_field: column or field of a row that is the document.

    Raises:
      OSError, ValueError: a file is damaged, or a named one holds no text.
    """
    for file in files:
        if _has_rows(file, text_field):
            rows = read_rows(file.path, [text_field], file.span)
        else:
            rows = [(str(file.path), _whole(file, text_field))]
        for where, row in rows:
            yield _document(where, row, text_field, file.split)


def _has_rows(file: InputFile, text_field: str) -> bool:
    """Returns whether a file is read row by row, and not as one document.

    What is found in a directory, with an ending that data of programs have too, is if
    its first row has a text.
    """
    if file.is_named or ending(file.path) not in AMBIGUOUS:
        return ending(file.path) in FORMATS
    try:
        where, row = next(read_rows(file.path, [text_field]), ("", None))
    except ValueError:
        return False
    document = _document(where, row, text_field, file.split)
    return not (isinstance(document, BadRow) and document.is_error)


def _whole(file: InputFile, text_field: str) -> dict[str, str] | BadRow:
    """Returns a row of the whole text of a file."""
    with naming(file.path):
        content = _all(file.path)
    with contextlib.suppress(UnicodeDecodeError):
        text = content.decode("utf-8")
        # No text has the zero byte, and many binary files that decode by chance do.
        if "\0" not in text:
            return {text_field: text}
    if file.is_named:
        raise ValueError(
            f"{file.path} is not UTF-8 text, nor of a known format: inputs are texts, "
            f"or {', '.join(FORMATS)} (and .gz, .zst): convert it"
        )
    return BadRow(str(file.path), "files that are not UTF-8 text", is_error=False)


def _document(
    where: str, row: Any, text_field: str, split: str | None
) -> TextDocument | BadRow:
    """Returns the document of a row, or the reason why it has no document."""
    if isinstance(row, BadRow):
        return row
    if not isinstance(row, dict):
        return BadRow(where, f"{type(row).__name__}, and no object with {text_field!r}")
    if text_field not in row:
        fields = short([*row])
        return BadRow(where, f"no field {text_field!r} (--text-field), but {fields}")
    text = row[text_field]
    if not isinstance(text, str):
        return BadRow(where, f"field {text_field!r} is {type(text).__name__}, no text")
    if not is_unicode(text):
        return BadRow(where, f"field {text_field!r} has half a surrogate pair")
    if not text:
        return BadRow(where, "empty documents", is_error=False)
    return TextDocument(where, text, split)
