"""Writes texts as token files: files of texts, and rows of tables and of JSON.

A file is one document, or has one in each row (`FORMATS` of row_files.py). Every
document is followed by the tokenizer's end-of-document token, and preceded by the one
that begins texts, if it has that. Which documents are held out for validation depends
on what they say and on nothing else, so copies of one text never come to lie on both
sides; unless files say themselves what is held out. Of one lone text, the end is.
"""

import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from data.text.reading.holdout import Holdout
from data.text.reading.input_files import Inputs, files_in, list_inputs
from data.text.reading.parts import (
    SPLIT_CODES,
    Counts,
    Encoded,
    PartMaker,
    Rows,
    parts_beside,
    read_encoded,
)
from data.text.reading.row_files import InputFile, TextDocument, read_documents
from data.text.reading.skipped import (
    BadRow,
    Skipped,
    find_markup,
    printable,
)
from data.text.reading.workers import make_parts
from data.text.tokens.prefix_tree import Document
from data.text.tokens.token_file import SPLITS, TokenFile, TokenFileWriter
from data.text.tokens.tokenizer import ByteTokenizer, Tokenizer

# Parts of Python's installation that are not its library, or only its tests.
NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests"}
LEAST_HELD_OUT = 1 << 14
"""Characters: a batch of configs/tiny.py, with 8 characters in a token."""


@dataclass(kw_only=True)
class Summary(Counts):
    """Figures of a prepared corpus, and what did not come into it.

    writer: of the corpus.
    inputs: whose files were read, or left out; there may be none.
    counted: what its rows are called; "": documents, which are counted anyhow.
    holdout: of the texts, with their tokens.
    """

    writer: TokenFileWriter
    inputs: Inputs = Inputs((), Skipped())
    counted: str = ""
    holdout: Holdout = field(default_factory=Holdout)

    def left_out(self) -> list[str]:
        """Returns lines about the files, and about rows that were skipped."""
        return self.inputs.lines() + self.skipped.lines("skipped")

    def __str__(self) -> str:
        writer = self.writer
        lines = []
        for split, counts in writer.counts.items():
            size = counts.tokens * writer.dtype.itemsize / 1e6
            line = (
                f"{split:<10} {counts.documents:>11,} documents "
                f"{counts.tokens:>15,} tokens {size:>10,.1f} MB"
            )
            if writer.supervised:
                line += f" {writer.supervised[split]:>15,} supervised"
            lines.append(line)
        rows = self.rows + self.skipped.total()
        turns = f", {self.turns:,} turns" if self.turns else ""
        counted = f"{self.rows:,} {self.counted} of {rows:,} rows{turns}"
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
        lines += self.remade.lines("made again")
        lines += self.unread.lines("not read")
        lines.append(f"written to {writer.directory}")
        return "\n".join(map(printable, lines))


def write_corpus(
    writer: TokenFileWriter,
    rows: Rows,
    inputs: Sequence[Path],
    *,
    least_held_out: int,
    on_bad_row: Callable[[BadRow], None] | None = None,
    validation_fraction: float | None = None,
    workers: int | str | None = None,
    **chosen: Any,
) -> Summary:
    """Writes a corpus from files and directories.

    Rows are encoded once, to parts beside the corpus (see data/text/reading/parts.py),
    whose documents are then copied to their splits.

    Args:
      writer: of the corpus. rows: reads and encodes rows.
      inputs: files and directories; hidden files in a directory are left out.
      least_held_out: characters to hold out of small corpora (see `Holdout`).
      on_bad_row: called with the first bad rows, which are skipped; None: one ends it.
      validation_fraction: share of characters to hold out (see `Holdout`), if no files
        are held out. None: 2 %, and of small corpora up to 10 %. One lone text without
        weights is divided, and its end held out.
      workers: where it is made (see `make_parts`), on which no byte of it depends.
      chosen: `pattern` and `splits`, as of `list_inputs`.

    Raises:
      FileNotFoundError, FileExistsError: an input is missing, the output is not empty.
      ValueError: an input is not what it is called, a row is bad, the inputs have no
        good one, or the fraction is not between 0 and 1.
    """
    holdout = Holdout(validation_fraction, least_held_out)
    listed = list_inputs(inputs, **chosen)
    summary = Summary(
        writer=writer, inputs=listed, counted=rows.counted, holdout=holdout
    )
    arrays = []
    sources = []
    with parts_beside(writer.directory) as folder:
        maker = PartMaker(folder, rows, writer.tokenizer, stops=on_bad_row is None)
        for part in make_parts(maker, listed.files, workers):
            arrays.append(part.arrays)
            sources += part.sources
            summary.add(part.counts)
            holdout.add(part.marks, part.characters)
            if on_bad_row is not None:
                for row in part.errors:
                    on_bad_row(row)
        if not summary.rows:
            _refuse_empty(summary, rows.wanted, inputs)
        with writer:
            writer.has_weights = summary.weighted > 0
            writer.add_sources(sources)
            cut = holdout.cut()
            is_lone = holdout.is_alone and summary.rows == 1
            for encoded in chain.from_iterable(map(read_encoded, arrays)):
                _write_held_out(writer, holdout, cut, encoded, is_lone)
    return summary


def _write_held_out(
    writer: TokenFileWriter,
    holdout: Holdout,
    cut: int,
    encoded: Encoded,
    is_lone: bool,
) -> None:
    """Writes documents to their splits, and counts those that the holdout assigns.

    cut: of the holdout. is_lone: whether the corpus is one text, whose end is held out.
    """
    is_free = encoded.codes < 0
    holdout.add_tokens(encoded.marks[is_free], encoded.lengths[is_free])
    if is_lone and is_free.any() and not encoded.weights.size:
        share = holdout.share_by_position()
        encoded = _divided(encoded, share, writer.tokenizer)
    _write(writer, cut, encoded)


def _refuse_empty(summary: Summary, wanted: str, inputs: Sequence[Path]) -> NoReturn:
    read = f"{len(summary.inputs.files)} files are read"
    where = ", ".join(map(str, inputs))
    why = "; ".join([read, *summary.left_out()])
    raise ValueError(f"there is no {wanted} in {where}: {why}")


def _divided(encoded: Encoded, share: float, tokenizer: Tokenizer) -> Encoded:
    """Returns one text as two documents: a share at its end is held out."""
    tokens = encoded.tokens
    begin = np.array(tokenizer.begin_of_document, tokens.dtype)
    end = tokens[-1:]
    held = round(share * (tokens.size - begin.size - 1))
    if held < 1:
        return encoded
    trained_on = np.concatenate([tokens[: -held - 1], end])
    held_out = np.concatenate([begin, tokens[-held - 1 :]])
    return encoded._replace(
        codes=np.array([SPLIT_CODES["train"], SPLIT_CODES["validation"]]),
        marks=np.repeat(encoded.marks, 2),
        lengths=np.array([trained_on.size, held_out.size]),
        tokens=np.concatenate([trained_on, held_out]),
    )


def _write(writer: TokenFileWriter, cut: int, encoded: Encoded) -> None:
    """Writes documents to their splits."""
    is_held = np.where(encoded.codes < 0, encoded.marks < np.uint64(cut), encoded.codes)
    for number, split in enumerate(SPLITS):
        is_chosen = is_held == number
        if not is_chosen.any():
            continue
        lengths = encoded.lengths[is_chosen]
        of_tokens = np.repeat(is_chosen, encoded.lengths)
        tokens = encoded.tokens[of_tokens]
        if not encoded.weights.size:
            writer.write(split, tokens, lengths=lengths)
            continue
        weights = encoded.weights[of_tokens]
        count, intervals = encoded.trees[is_chosen].T
        segments = encoded.segments[np.repeat(is_chosen, encoded.trees[:, 0])]
        # They begin at 0 in their own document: from here on, in those that are chosen.
        segments[:, 0] += np.repeat(np.cumsum(lengths) - lengths, count)
        most = int(intervals.max())
        writer.write(split, tokens, weights, segments, most, lengths)


class _Texts:
    """Rows of text, each a document."""

    wanted = "text"
    counted = ""

    def __init__(self, tokenizer: Tokenizer, text_field: str):
        self._tokenizer = tokenizer
        self._text_field = text_field

    def read(self, files: Sequence[InputFile]) -> Iterator[TextDocument | BadRow]:
        return read_documents(files, self._text_field)

    def encode(
        self, rows: Sequence[TextDocument], counts: Counts
    ) -> list[list[Document]]:
        for row in rows:
            markup = find_markup(row.text)
            if markup:
                counts.markup.add(BadRow(row.where, markup))
        begin = np.array(self._tokenizer.begin_of_document, np.int32)
        end = np.array([self._tokenizer.end_of_document], np.int32)
        encoded = self._tokenizer.encode_all([row.text for row in rows])
        return [[Document(np.concatenate([begin, ids, end]), None)] for ids in encoded]


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
    rows = _Texts(tokenizer, text_field)
    writer = TokenFileWriter(output, tokenizer)
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
