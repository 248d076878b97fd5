"""Writes texts as token files: files of texts, and rows of tables and of JSON.

A file is one document, or has one in each row (`FORMATS` of row_files.py). Every
document is followed by the tokenizer's end-of-document token, and preceded by the one
that begins texts, if it has that. Which documents are held out for validation depends
on what they say and on nothing else, so copies of one text never come to lie on both
sides; unless files say themselves what is held out.
"""

import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import batched
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data.text.holdout import Holdout
from data.text.input_files import Inputs, files_in, list_inputs
from data.text.markup import check_markup, find_markup
from data.text.skipped import BadRow, Skipped, stop_at
from data.text.summary import Summary
from data.text.text_documents import TextDocument, read_documents
from data.text.token_file import SPLITS, TokenFile, TokenFileWriter
from data.text.tokenizer import ByteTokenizer, Tokenizer, begun

# Encoded together: enough for every core, and little enough to hold in memory.
DOCUMENTS_AT_A_TIME = 64
# Parts of Python's installation that are not its library, or only its tests.
NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests"}
LEAST_HELD_OUT = 1 << 14
"""Characters: a batch of configs/tiny.py, with 8 characters in a token."""


@dataclass
class _Survey:
    """What a first reading of all documents finds."""

    holdout: Holdout
    documents: int = 0
    characters: int = 0
    skipped: Skipped = field(default_factory=Skipped)
    markup: Skipped = field(default_factory=Skipped)


def prepare(
    inputs: Sequence[Path],
    output: Path,
    tokenizer: Tokenizer,
    *,
    validation_fraction: float | None = None,
    text_field: str = "text",
    on_bad_row: Callable[[BadRow], None] = stop_at,
    keep_markup: bool = False,
    **chosen: Any,
) -> Summary:
    """Writes the corpus `output` from files and directories.

    Documents are read twice, one after the other and never all at once: all of them are
    checked, and counted, before the first is encoded.

    Args:
      inputs: files and directories; hidden files in a directory are left out.
      output: a directory that does not exist yet, or is empty.
      tokenizer: makes the tokens.
      validation_fraction: about this share of characters is held out, and at least
        one (and never all) where two documents differ; if no files are held out. None:
        2 %, and of small corpora up to 10 %, for `LEAST_HELD_OUT`.
      text_field: which field of a row is the document.
      on_bad_row: called with every row that has no text; if it returns, the row is
        skipped.
      keep_markup: whether most documents may have markup, which is learned as text.
      chosen: `pattern` and `splits`, as of `list_inputs`.

    Raises:
      FileNotFoundError: an input does not exist.
      FileExistsError: `output` exists and is not empty.
      ValueError: an input is not what it is called, a row is bad, there is no text in
        the inputs or mostly markup, or the fraction is not between 0 and 1.
    """
    found = list_inputs(inputs, **chosen)
    with TokenFileWriter(output, tokenizer) as writer:
        survey = _Survey(Holdout(validation_fraction, LEAST_HELD_OUT))
        _read(_progress(found, text_field), survey, on_bad_row)
        _check(inputs, found, survey, keep_markup)
        writer.add_sources(file.path for file in found.files)
        documents = _texts(_progress(found, text_field, survey.characters))
        characters = _encode(documents, writer, survey.holdout)
        if characters != survey.characters:
            raise ValueError(
                f"the inputs changed while they were read: {survey.characters} "
                f"characters, then {characters}; prepare them again"
            )
    return Summary(writer, found, skipped=survey.skipped, markup=survey.markup)


def prepare_standard_library(output: Path) -> Path:
    """Writes a corpus of the running Python's standard library, byte by byte.

    About 12 MB that every machine has. A corpus that is already there is kept.

    Returns:
      `output`.

    Raises:
      ValueError, FileNotFoundError: what is there already is damaged, or holds tokens
        that are not bytes.
      FileExistsError: `output` is something else than a corpus.
    """
    if not (output / "meta.json").exists():
        try:
            prepare(standard_library_files(), output, ByteTokenizer())
        except FileExistsError:
            # Another process of the same run may have been faster.
            if not (output / "meta.json").exists():
                raise
    for split in SPLITS:
        corpus = TokenFile.open(output, split)
        if corpus.tokenizer != ByteTokenizer.name:
            raise ValueError(
                f"{output} was made with tokenizer {corpus.tokenizer}, not from bytes: "
                "choose another directory for the standard library"
            )
    return output


def standard_library_files() -> list[Path]:
    """Returns the sources of the running Python's standard library, sorted."""
    library = Path(sysconfig.get_paths()["stdlib"])
    return [
        path
        for path in files_in(library, "*.py")
        if NOT_LIBRARY.isdisjoint(path.relative_to(library).parts)
    ]


def _progress(
    inputs: Inputs, text_field: str, characters: int | None = None
) -> Iterator[TextDocument | BadRow]:
    """Yields the documents, beside a bar that counts their characters.

    characters: of all of them; None: not known. It is silent where standard error is
    not a terminal.
    """
    what = "reading" if characters is None else "encoding"
    unit = {"unit": " characters", "unit_scale": True, "disable": None}
    with tqdm(desc=what, total=characters, **unit) as bar:
        for document in read_documents(inputs.files, text_field):
            yield document
            if isinstance(document, TextDocument):
                bar.update(len(document.text or ""))


def _read(
    documents: Iterable[TextDocument | BadRow],
    survey: _Survey,
    on_bad_row: Callable[[BadRow], None],
) -> None:
    for document in documents:
        if isinstance(document, BadRow):
            on_bad_row(document)
            survey.skipped.add(document)
        elif not document.text:
            is_text = document.text is not None
            reason = "empty documents" if is_text else "files that are not UTF-8 text"
            survey.skipped.add(BadRow(document.where, reason))
        else:
            survey.documents += 1
            survey.characters += len(document.text)
            if document.split is None:
                survey.holdout.add(document.text)
            if kind := find_markup(document.text):
                survey.markup.add(BadRow(document.where, kind))


def _check(
    inputs: Sequence[Path], found: Inputs, survey: _Survey, keep_markup: bool
) -> None:
    if not survey.characters:
        reasons = [*found.left_out.lines("left out"), *survey.skipped.lines("skipped")]
        raise ValueError(
            f"there is no text in {', '.join(map(str, inputs))}: "
            + "; ".join([f"{len(found.files)} files are read", *reasons])
        )
    if not keep_markup:
        check_markup(survey.markup, survey.documents)


def _texts(documents: Iterable[TextDocument | BadRow]) -> Iterator[TextDocument]:
    for document in documents:
        if isinstance(document, TextDocument) and document.text:
            yield document


def _encode(
    documents: Iterable[TextDocument], writer: TokenFileWriter, holdout: Holdout
) -> int:
    """Writes the documents; returns their characters."""
    tokenizer, characters = writer.tokenizer, 0
    for some in batched(documents, DOCUMENTS_AT_A_TIME):
        encoded = tokenizer.encode_all([document.text for document in some])
        for document, ids in zip(some, encoded, strict=True):
            split = document.split or holdout.split(document.text)
            end = np.int32(tokenizer.end_of_document)
            writer.write(split, np.append(begun(tokenizer, ids), end))
            characters += len(document.text)
    return characters
