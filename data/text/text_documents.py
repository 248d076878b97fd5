"""Documents of text: of files that are one each, and of files of rows."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from data.json_text import check_size, short
from data.text.input_files import InputFile
from data.text.row_files import (
    BUFFER_BYTES,
    FORMATS,
    SEPARATORS,
    ending,
    naming,
    open_bytes,
    read_rows,
)
from data.text.skipped import BadRow

AMBIGUOUS = (".json", *SEPARATORS)
"""Endings of files that may hold rows of texts, and else are texts themselves."""


class TextDocument(NamedTuple):
    """A document, and where it is.

    text: None: a file that is not UTF-8 text.
    split: as of `InputFile`.
    """

    where: str
    text: str | None
    split: str | None


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
            for where, row in read_rows(file.path, [text_field]):
                wrong = (
                    row if isinstance(row, BadRow) else _fault(where, row, text_field)
                )
                yield wrong or TextDocument(where, row[text_field], file.split)
        else:
            yield _whole(file)


def _has_rows(file: InputFile, text_field: str) -> bool:
    """Returns whether a file is read row by row, and not as one document.

    What is found in a directory, with an ending that data of programs have too, is if
    its first row has a text.
    """
    kind = ending(file.path)
    if file.is_named or kind not in AMBIGUOUS:
        return kind in FORMATS
    try:
        where, row = next(read_rows(file.path, [text_field]), ("", None))
    except ValueError:
        return False
    return not isinstance(row, BadRow) and _fault(where, row, text_field) is None


def _whole(file: InputFile) -> TextDocument:
    where = str(file.path)
    found = bytearray()
    with naming(file.path), open_bytes(file.path) as content:
        while part := content.read(BUFFER_BYTES):
            found += part
            check_size(len(found), where)
    try:
        text = found.decode("utf-8")
    except UnicodeDecodeError:
        text = None
    # No text has the zero byte, and many binary files that decode by chance do.
    text = None if text and "\0" in text else text
    if text is None and file.is_named:
        raise ValueError(
            f"{where} is not UTF-8 text, nor of a known format: inputs are texts, or "
            f"{', '.join(FORMATS)} (and .gz, .zst): convert it"
        )
    return TextDocument(where, text, file.split)


def _fault(where: str, row: Any, text_field: str) -> BadRow | None:
    """Returns what is wrong with a row; None: nothing."""
    if not isinstance(row, dict):
        return BadRow(where, f"{type(row).__name__}, and no object with {text_field!r}")
    if text_field not in row:
        fields = short([*row])
        return BadRow(where, f"no field {text_field!r} (--text-field), but {fields}")
    text = row[text_field]
    if not isinstance(text, str):
        return BadRow(where, f"field {text_field!r} is {type(text).__name__}, no text")
    try:
        text.encode("utf-8")  # JSON can spell half a surrogate pair
    except UnicodeEncodeError:
        return BadRow(where, f"field {text_field!r} has half a surrogate pair")
    return None
