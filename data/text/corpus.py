"""Writes texts as token files: files of texts, and rows of tables and of JSON.

A file is one document, or has one in each row (`FORMATS` of row_files.py). Every
document is followed by the tokenizer's end-of-document token, and preceded by the one
that begins texts, if it has that. Which documents are held out for validation depends
on what they say and on nothing else, so copies of one text never come to lie on both
sides; unless files say themselves what is held out.
"""

import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import batched
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tqdm import tqdm

from data.text.holdout import Holdout
from data.text.input_files import Inputs, files_in, list_inputs
from data.text.prefix_tree import Document
from data.text.row_files import InputFile, TextDocument, read_documents
from data.text.skipped import (
    BadRow,
    Skipped,
    check_markup,
    find_markup,
    printable,
    stop_at,
)
from data.text.token_file import SPLITS, TokenFile, TokenFileWriter
from data.text.tokenizer import ByteTokenizer, Tokenizer, begun

# Encoded together: enough for every core, and little enough to hold in memory.
ROWS_AT_A_TIME = 64
# Parts of Python's installation that are not its library, or only its tests.
NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests"}
LEAST_HELD_OUT = 1 << 14
"""Characters: a batch of configs/tiny.py, with 8 characters in a token."""


class Rows[R](Protocol):
    """Interface of what a corpus is made of.

    A row has `where` it is, its `text`, and its `split` (see `InputFile`).

    wanted: a row, for messages. counted: what many are called; "": documents.
    """

    wanted: str
    counted: str

    def read(self, files: Sequence[InputFile]) -> Iterator[R | BadRow]:
        """Yields every row of the files."""

    def note(self, row: R, summary: "Summary") -> None:
        """Counts what the summary reports of a row."""

    def encode(
        self, rows: Sequence[R], summary: "Summary"
    ) -> Sequence[Sequence[Document] | BadRow]:
        """Returns the documents of each row, or why it has none."""


@dataclass
class Summary:
    """Figures of a prepared corpus, and what did not come into it.

    writer: of the corpus.
    inputs: whose files were read, or left out; there may be none.
    counted: what its rows are called; "": documents, which are counted anyhow.
    rows: of which there are documents.
    skipped: rows and files without a document.
    cut: rows that are too long, of which a part is lost.
    lost: tokens of these parts.
    divided: rows that are several trees, as one would be too long.
    apart: tokens that trees would have as documents of their own; 0: not counted.
    markup: documents with markup that is learned as text.
    unwritten: conversations of which the chat template leaves out a part.
    """

    writer: TokenFileWriter
    inputs: Inputs = Inputs((), Skipped())
    counted: str = ""
    rows: int = 0
    skipped: Skipped = field(default_factory=Skipped)
    cut: Skipped = field(default_factory=Skipped)
    lost: int = 0
    divided: Skipped = field(default_factory=Skipped)
    apart: int = 0
    markup: Skipped = field(default_factory=Skipped)
    unwritten: Skipped = field(default_factory=Skipped)

    def left_out(self) -> list[str]:
        """Returns lines about the files, and about rows that were skipped."""
        return self.inputs.lines() + self.skipped.lines("skipped")

    def __str__(self) -> str:
        lines, writer = [], self.writer
        for split, counts in writer.counts.items():
            size = counts.tokens * writer.bytes_per_token / 1e6
            line = (
                f"{split:<10} {counts.documents:>11,} documents "
                f"{counts.tokens:>15,} tokens {size:>10,.1f} MB"
            )
            supervised = f" {writer.supervised[split]:>15,} supervised"
            lines.append(line + supervised * bool(writer.supervised))
        rows = self.rows + self.skipped.total()
        counted = f"{self.rows:,} {self.counted} of {rows:,} rows"
        lines += [counted] * bool(self.counted)
        lines += [str(writer.sources)] * bool(writer.sources)
        tokenizer = writer.tokenizer
        begins = ", ".join(map(str, tokenizer.begin_of_document))
        begin = f"begin with {begins} and " if begins else ""
        source = f" {tokenizer.path}" if tokenizer.path else ""
        lines.append(
            f"tokenizer: {tokenizer.name}{source}, {tokenizer.vocab_size:,} ids; "
            f"documents {begin}end with {tokenizer.end_of_document}"
        )
        lines += self.left_out()
        if (count := writer.intervals) > 1:
            written = sum(counts.tokens for counts in writer.counts.values())
            line = f"trees: {written:,} tokens in place of {self.apart:,}; a token sees"
            lines.append(f"{line} up to {count} intervals of keys")
        lines += self.divided.lines("several trees")
        lines += self.cut.lines(f"cut, {self.lost:,} tokens lost")
        lines += self.markup.lines("markup, learned as text")
        lines += self.unwritten.lines("WARNING: not in the chat template")
        lines.append(f"written to {writer.directory}")
        return "\n".join(map(printable, lines))


def write_corpus[R](
    writer: TokenFileWriter,
    rows: Rows[R],
    inputs: Sequence[Path],
    *,
    least_held_out: int,
    on_bad_row: Callable[[BadRow], None] = stop_at,
    validation_fraction: float | None = None,
    keep_markup: bool = False,
    **chosen: Any,
) -> Summary:
    """Writes a corpus from files and directories.

    Rows are read twice, one after the other and never all at once: all of them are
    checked, and counted, before the first is encoded.

    Args:
      writer: of the corpus.
      rows: reads and encodes rows.
      inputs: files and directories; hidden files in a directory are left out.
      least_held_out: characters to hold out of small corpora (see `Holdout`).
      on_bad_row: called with every row that has no document; if it returns, the row is
        skipped.
      validation_fraction: share of characters to hold out (see `Holdout`), if no files
        are held out. None: 2 %, and of small corpora up to 10 %.
      keep_markup: whether most rows may have markup, which is learned as text.
      chosen: `pattern` and `splits`, as of `list_inputs`.

    Raises:
      FileNotFoundError: an input does not exist.
      FileExistsError: the output exists and is not empty.
      ValueError: an input is not what it is called, a row is bad, the inputs have no
        good one or mostly markup, or the fraction is not between 0 and 1.
    """
    holdout = Holdout(validation_fraction, least_held_out)
    found = list_inputs(inputs, **chosen)
    summary = Summary(writer, found, rows.counted)

    def skip(row: BadRow) -> None:
        if row.is_error:
            on_bad_row(row)
        summary.skipped.add(row)

    with writer:
        good, characters = 0, 0
        for row in _good(rows.read(found.files), skip, "reading"):
            good, characters = good + 1, characters + len(row.text)
            if row.split is None:
                holdout.add(row.text)
            rows.note(row, summary)
        if not keep_markup:
            check_markup(summary.markup, good)
        writer.add_sources(file.path for file in found.files)
        _write(rows, summary, holdout, skip, characters)
        if not summary.rows:
            reasons = [f"{len(found.files)} files are read", *summary.left_out()]
            where, why = ", ".join(map(str, inputs)), "; ".join(reasons)
            raise ValueError(f"there is no {rows.wanted} in {where}: {why}")
    return summary


def _write(
    rows: Rows,
    summary: Summary,
    holdout: Holdout,
    skip: Callable[[BadRow], None],
    characters: int,
) -> None:
    """Encodes and writes the good rows; refuses other characters than before."""
    read, again = rows.read(summary.inputs.files), 0
    good = _good(read, lambda row: None, "encoding", characters)
    for some in batched(good, ROWS_AT_A_TIME):
        again += sum(len(row.text) for row in some)
        for row, documents in zip(some, rows.encode(some, summary), strict=True):
            if isinstance(documents, BadRow):
                skip(documents)
                continue
            summary.rows += 1
            for document in documents:
                split = row.split or holdout.split(row.text)
                summary.writer.write(split, *document)
    if again != characters:
        raise ValueError(
            f"the inputs changed while they were read: {characters} characters, "
            f"then {again}; prepare them again"
        )


def _good(
    rows: Iterator[Any], skip: Callable[[BadRow], None], what: str, size: int = 0
) -> Iterator[Any]:
    """Yields the rows that are not bad, beside a bar that counts their characters.

    skip: is called with bad ones. size: characters of all; 0: not known. The bar is
    silent where standard error is not a terminal.
    """
    unit = {"unit": " characters", "unit_scale": True, "disable": None}
    with tqdm(desc=what, total=size or None, **unit) as bar:
        for row in rows:
            if isinstance(row, BadRow):
                skip(row)
            else:
                yield row
                bar.update(len(row.text))


class _Texts:
    """Rows of text, each a document."""

    wanted, counted = "text", ""

    def __init__(self, tokenizer: Tokenizer, text_field: str):
        self._tokenizer, self._text_field = tokenizer, text_field

    def read(self, files: Sequence[InputFile]) -> Iterator[TextDocument | BadRow]:
        return read_documents(files, self._text_field)

    def note(self, row: TextDocument, summary: Summary) -> None:
        if kind := find_markup(row.text):
            summary.markup.add(BadRow(row.where, kind))

    def encode(
        self, rows: Sequence[TextDocument], summary: Summary
    ) -> list[list[Document]]:
        end = np.int32(self._tokenizer.end_of_document)
        encoded = self._tokenizer.encode_all([row.text for row in rows])
        texts = (np.append(begun(self._tokenizer, ids), end) for ids in encoded)
        return [[Document(tokens, None)] for tokens in texts]


def prepare(
    inputs: Sequence[Path],
    output: Path,
    tokenizer: Tokenizer,
    *,
    text_field: str = "text",
    **options: Any,
) -> Summary:
    """Writes the corpus `output` from files of texts and of rows (see `write_corpus`).

    Args:
      inputs: files and directories.
      output: a directory that does not exist yet, or is empty.
      tokenizer: makes the tokens.
      text_field: which field of a row is the document.
      options: of `write_corpus`, which lists the errors.
    """
    rows, writer = _Texts(tokenizer, text_field), TokenFileWriter(output, tokenizer)
    return write_corpus(writer, rows, inputs, least_held_out=LEAST_HELD_OUT, **options)


def prepare_standard_library(output: Path) -> Path:
    """Writes a corpus of the running Python's standard library, byte by byte.

    About 12 MB that every machine has. A corpus that is already there is kept.

    Returns:
      `output`.

    Raises:
      ValueError, FileNotFoundError: the corpus that is there already is damaged, or
        holds tokens that are not bytes.
      FileExistsError: `output` is something else than a corpus.
    """
    index = output / "meta.json"
    if not index.exists():
        try:
            prepare(standard_library_files(), output, ByteTokenizer())
        except FileExistsError:
            if not index.exists():  # by another process of the same run
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
