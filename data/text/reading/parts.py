"""Parts of a corpus: what each unit of the inputs becomes, by whichever process.

A part is two files in a folder beside the corpus, named after all that decides on it:
`….arrays` has the documents, a batch after the other, and `….part`, which appears last,
a line of JSON with what was counted, and the marks that decide what is held out; before
them stands their digest, and among them that of the arrays. Parts that a killed
preparation has finished are taken as they are, and made again where they are damaged.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import os
import pickle
import shutil
import socket
import stat
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np

from data.files import beside, describe_file, naming_failed, refuse_existing
from data.packed import digest
from data.text.reading import units
from data.text.reading.holdout import mark
from data.text.reading.row_files import InputFile
from data.text.reading.skipped import MOST_REPORTED, BadRow, Skipped
from data.text.reading.units import Unit
from data.text.tokens.prefix_tree import Document, as_mask
from data.text.tokens.tokenizer import Tokenizer

# Encoded together: enough for every core, and little enough to hold in memory.
CHARACTERS_AT_A_TIME = 1 << 20
ROWS_AT_A_TIME = 1 << 10
PART_VERSION = 4
SPLIT_CODES = {None: -1, "train": 0, "validation": 1}
"""Splits of documents in a part; -1: the mark decides."""


class Rows[R](Protocol):
    """Interface of what a corpus is made of; it can be pickled.

    A row has `where` it is, its `text`, and its `split` (see `InputFile`).

    wanted: a row, for messages. counted: what many are called; "": documents.
    """

    wanted: str
    counted: str

    def read(self, files: Sequence[InputFile]) -> Iterator[R | BadRow]:
        """Yields every row of the files."""

    def encode(
        self, rows: Sequence[R], counts: "Counts"
    ) -> Sequence[Sequence[Document] | BadRow]:
        """Returns the documents of each row, or why it has none, and counts."""


@dataclass(kw_only=True)
class Counts:
    """What was read, and what did not come into a corpus.

    good: rows that could be read. rows: of these, those of which there are documents.
    skipped: rows and files without a document.
    cut: rows that are too long, of which a part is lost.
    lost: tokens of these parts.
    divided: rows that are several trees, as one would be too long.
    turns: of conversations.
    apart: tokens that trees would have as documents of their own; 0: not counted.
    weighted: rows whose tokens may have weights other than 0 and 1.
    markup: documents with markup that is learned as text.
    unwritten: conversations of which the chat template leaves out a part.
    remade: finished parts that were damaged, and are made again.
    unread: turns of conversations with a field that is not read.
    """

    good: int = 0
    rows: int = 0
    skipped: Skipped = field(default_factory=Skipped)
    cut: Skipped = field(default_factory=Skipped)
    lost: int = 0
    divided: Skipped = field(default_factory=Skipped)
    turns: int = 0
    apart: int = 0
    weighted: int = 0
    markup: Skipped = field(default_factory=Skipped)
    unwritten: Skipped = field(default_factory=Skipped)
    remade: Skipped = field(default_factory=Skipped)
    unread: Skipped = field(default_factory=Skipped)

    def add(self, other: "Counts") -> None:
        """Adds what was counted behind it."""
        for name in Counts.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Encoded(NamedTuple):
    """Documents of a part, one after the other (see `Document`).

    codes, marks, lengths: (documents,), of `SPLIT_CODES` and `mark`, and in tokens.
    tokens: (n,). weights: (n,), or (0,) without any.
    trees: (documents, 2), numbers of segments and of intervals, with weights.
    segments: (segments, 2), of all documents, with weights.
    """

    codes: np.ndarray
    marks: np.ndarray
    lengths: np.ndarray
    tokens: np.ndarray
    weights: np.ndarray
    trees: np.ndarray
    segments: np.ndarray


@dataclass
class Part:
    """What was made of a unit.

    arrays, stored: the file of its documents, and its size and SHA-256.
    marks, characters: uint64 and int64 (n,), of the rows that could be read and whose
      split no file says, for `Holdout`; lists as long as it is made.
    tokens: of all documents. errors: the first bad rows.
    sources: files that begin in it, with their digests.
    """

    arrays: Path
    stored: dict[str, Any] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    marks: Any = field(default_factory=list)
    characters: Any = field(default_factory=list)
    tokens: int = 0
    errors: list[BadRow] = field(default_factory=list)
    sources: list[dict[str, Any]] = field(default_factory=list)

    def skip(self, row: BadRow, *, stops: bool) -> None:
        """Counts a row without documents; if it stops, a bad one raises ValueError."""
        if row.is_error and stops:
            raise ValueError(
                f"{row}: mend or remove it, or leave out all such (--bad-rows skip)"
            )
        if row.is_error and len(self.errors) < MOST_REPORTED:
            self.errors.append(row)
        self.counts.skipped.add(row)


def open_part(path: Path) -> Part:
    """Opens a finished part.

    Raises:
      OSError, ValueError: it cannot be read, or is damaged.
    """
    sha256, _, content = path.read_bytes().partition(b"\n")
    if hashlib.sha256(content).hexdigest().encode() != sha256:
        raise ValueError(f"{path} is not what was written, by its digest")
    file = io.BytesIO(content)
    figures = json.loads(file.readline())
    counts = Counts()
    for name, value in figures.pop("counts").items():
        setattr(counts, name, Skipped(**value) if isinstance(value, dict) else value)
    errors = [BadRow(**row) for row in figures.pop("errors")]
    return Part(
        arrays=path.with_suffix(".arrays"),
        counts=counts,
        marks=np.load(file),
        characters=np.load(file),
        errors=errors,
        **figures,
    )


def _packed(part: Part) -> bytes:
    """Returns what `open_part` reads."""
    figures = {
        "stored": part.stored,
        "counts": asdict(part.counts),
        "tokens": part.tokens,
        "errors": [asdict(row) for row in part.errors],
        "sources": part.sources,
    }
    file = io.BytesIO()
    file.write(json.dumps(figures).encode() + b"\n")
    np.save(file, np.array(part.marks, np.uint64))
    np.save(file, np.array(part.characters, np.int64))
    content = file.getvalue()
    return hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def _is_whole(path: Path) -> bool:
    """Returns whether a finished part is what was written."""
    with contextlib.suppress(OSError, ValueError):
        part = open_part(path)
        return describe_file(part.arrays) == part.stored
    return False


def read_encoded(arrays: Path) -> Iterator[Encoded]:
    """Yields the documents of a part, some at a time."""
    with arrays.open("rb") as file:
        while file.peek(1):
            yield Encoded._make([np.load(file) for _ in Encoded._fields])


@dataclass(frozen=True)
class PartMaker:
    """Reads and encodes units, each to a part of its own.

    folder: of the parts. rows: reads and encodes rows.
    tokenizer: that the rows have.
    stops: whether a bad row ends it.
    """

    folder: Path
    rows: Rows
    tokenizer: Tokenizer
    stops: bool

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """What decides on a part, besides its unit."""
        tokenizer = self.tokenizer
        path = tokenizer.path
        return {
            "version": [PART_VERSION, *map(version, ("tokenizers", "sentencepiece"))],
            "rows": pickle.dumps(self.rows).hex(),
            "tokenizer": path and describe_file(path)["sha256"],
            "ends": [*tokenizer.begin_of_document, *tokenizer.stop_tokens],
            "names": {**tokenizer.names},
        }

    def path(self, unit: Unit) -> Path:
        """Returns where the part of a unit is, or will be."""
        files = [(str(f.path), *f[1:]) for f in unit.files]
        key = digest(self._identity | {"files": files, "states": [*unit.states]})
        return self.folder / f"{key}.part"

    def make(self, unit: Unit) -> Path:
        """Makes the part of a unit, if it is not finished; returns where it is.

        Raises:
          OSError, ValueError: a file is damaged or changes, or a row stops it.
        """
        path = self.path(unit)
        made = Part(path.with_suffix(".arrays"))
        if path.exists():
            if _is_whole(path):
                return path
            made.counts.remade.add(BadRow(str(path), "damaged part of a preparation"))
        new = path.with_suffix(f".{uuid.uuid4().hex}.new")
        try:
            with naming_failed(made.arrays), new.open("wb") as arrays:
                for some in _batches(self.rows.read(unit.files)):
                    documents = self._documents(some, made)
                    if documents:
                        made.tokens += _save(arrays, documents)
            begun = [f.path for f in unit.files if not (f.span and f.span.begin)]
            made.sources = [{"path": str(f)} | describe_file(f) for f in begun]
            unit.check_unchanged()
            made.stored = describe_file(new)
            new.rename(made.arrays)
            with naming_failed(path):
                new.write_bytes(_packed(made))
            new.rename(path)
        finally:
            new.unlink(missing_ok=True)
        return path

    def _documents(self, some: Sequence[Any], made: Part) -> list[tuple]:
        """Encodes rows; returns split code, mark and document of each document."""
        good = [*filter(_is_good, some)]
        encoded = iter(self.rows.encode(good, made.counts))
        documents = []
        for row in some:
            if not _is_good(row):
                made.skip(row, stops=self.stops)
                continue
            own = mark(row.text)
            made.counts.good += 1
            if row.split is None:
                made.marks.append(own)
                made.characters.append(len(row.text))
            of_row = next(encoded)
            if isinstance(of_row, BadRow):
                made.skip(of_row, stops=self.stops)
                continue
            made.counts.rows += 1
            code = SPLIT_CODES[row.split]
            documents += [(code, own, document) for document in of_row]
        return documents


def _is_good(row: Any) -> bool:
    return not isinstance(row, BadRow)


def _batches(rows: Iterator[Any]) -> Iterator[list[Any]]:
    """Yields rows in lists that are little enough to be held with their tokens."""
    some = []
    characters = 0
    for row in rows:
        some.append(row)
        characters += len(row.text) if _is_good(row) else 0
        if characters >= CHARACTERS_AT_A_TIME or len(some) == ROWS_AT_A_TIME:
            yield some
            some = []
            characters = 0
    yield some


def _save(file: BinaryIO, documents: Sequence[tuple[int, int, Document]]) -> int:
    """Writes what `read_encoded` reads; returns the number of tokens."""
    codes, marks, texts = zip(*documents, strict=True)
    tokens = np.concatenate([text.tokens for text in texts])
    whole = np.zeros((1, 2), np.int64)  # of a document that is no tree
    # Each begins with an empty array: documents may be without weights.
    weights = [np.zeros(0, np.float32)]
    segments = [whole[:0]]
    trees = []
    for text in texts:
        if text.weights is not None:
            weights.append(text.weights)
            segments.append(whole if text.segments is None else text.segments)
            trees.append((len(segments[-1]), text.intervals))
    is_narrow = 0 <= tokens.min(initial=0) <= tokens.max(initial=0) < 1 << 16
    encoded = Encoded(
        codes=np.array(codes, np.int8),
        marks=np.array(marks, np.uint64),
        lengths=np.array([text.tokens.size for text in texts]),
        tokens=tokens.astype(np.uint16) if is_narrow else tokens,
        weights=as_mask(np.concatenate(weights).astype(np.float32)),
        trees=np.array(trees),
        segments=np.concatenate(segments),
    )
    # Of a file of its own, NumPy does not say why it cannot be written.
    content = io.BytesIO()
    for array in encoded:
        np.save(content, array)
    file.write(content.getbuffer())
    return tokens.size


@contextlib.contextmanager
def parts_beside(directory: Path) -> Iterator[Path]:
    """Gives the folder for the parts of a new corpus, locked as long as it is used.

    It is removed at the end; where the block raises, if its parts are less than a unit.

    Raises:
      FileExistsError: `directory` exists and is not empty.
      ValueError: the folder is there, and others own it or may write in it.
    """
    refuse_existing(directory)
    name = f".{directory.name}.{socket.gethostname()}.parts"
    folder = beside(directory).with_name(name)
    _make_private(folder)
    lock = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        refuse_existing(directory)
        _make_private(folder)  # another process may have removed it
        for left in folder.glob("*.new"):
            left.unlink()
        try:
            yield folder
        except BaseException:
            made = sum(part.stat().st_size for part in folder.glob("*.arrays"))
            if made < units.UNIT_BYTES:
                shutil.rmtree(folder)
            raise
        shutil.rmtree(folder)
    finally:
        os.close(lock)


def _make_private(folder: Path) -> None:
    """Makes a folder that nobody else may write in, or checks one that is there."""
    try:
        folder.mkdir(0o700, parents=True)
    except FileExistsError:
        facts = folder.lstat()
        is_own = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()
        if not is_own or facts.st_mode & 0o022:
            raise ValueError(
                f"{folder} must be a folder of this user in which no other may write, "
                f"got owner {facts.st_uid} and mode {stat.filemode(facts.st_mode)}: "
                "parts of a preparation that others left there would be trained on; "
                "remove it or choose another output"
            ) from None
