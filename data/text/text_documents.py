"""Documents of text: of files that are one each, and of files of rows."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from data.json_text import check_size, is_unicode, short
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
    """A document that is not empty, where it is, and its split (see `InputFile`)."""

    where: str
    text: str
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
                yield _document(where, row, text_field, file.split)
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
    found = _document(where, row, text_field, file.split)
    return not (isinstance(found, BadRow) and found.is_error)


def _whole(file: InputFile) -> TextDocument | BadRow:
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
    if text is None:
        return BadRow(where, "files that are not UTF-8 text", is_error=False)
    return _document(where, {"": text}, "", file.split)


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
