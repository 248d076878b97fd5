"""Token files: a corpus on disk, as one stream of token ids for each split.

A corpus is a directory:

    meta.json               format version, tokenizer, and the figures of each split
    sources.jsonl           path, size and SHA-256 of each file it was made of
    tokenizer.json|.model   copy of the tokenizer's file, where it has one
    generation_config.json  its stop tokens, that of a document's end first
    tokenizer_config.json   names of its tokens, and whether one begins every document
    chat_template.jinja     how chats are written, where the corpus is of chats
    train.tokens.bin        little-endian uint16, or uint32 above 65536 ids
    train.documents.bin     little-endian uint64: where each document starts; first 0
    train.loss.bin          uint8, 1 for each token with a loss; not there
                            where all have
    validation.…            the same for the held-out documents

A document runs to the start of the next one, its end-of-document token included.
meta.json has size and SHA-256 of each file. Streams are read as they are asked for:
opening a corpus of any size reads no tokens.
"""

import json
from collections.abc import Iterable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.json_text import short
from data.new_directory import NewDirectory, refuse_missing
from data.stored_array import StoredArray
from data.text.sources import Sources, write_sources
from data.text.tokenizer import Tokenizer
from data.text.tokenizer_files import write_tokenizer
from data.versioned import (
    FILES,
    HashedFile,
    check_files,
    describe_file,
    digest,
    read_versioned,
    whole_number,
)

VERSION = 1
SPLITS = ("train", "validation")
META = "meta.json"
ORIGIN = ("sources", "end_of_document")
"""Keys of meta.json that say where tokens are from: not what a corpus is known by."""
REMEDY = "prepare the corpus again with tools/prepare_text.py"


@dataclass(frozen=True, eq=False)
class TokenFile:
    """One split of a corpus.

    tokens: uint16 or uint32 (tokens,), the stream, on disk.
    starts: int64 (documents,), where in the stream each document starts.
    vocab_size: of the tokenizer; largest_token: the largest id that occurs.
    tokenizer: what `open_tokenizer` opens to encode and decode as the corpus was.
    loss_mask: uint8 (tokens,), 1 for each token with a loss, on disk; None: all have.
    """

    directory: Path
    split: str
    tokens: StoredArray
    starts: np.ndarray
    vocab_size: int
    largest_token: int
    tokenizer: str
    loss_mask: StoredArray | None = None

    @classmethod
    def open(cls, directory: Path, split: str) -> "TokenFile":
        """Opens a split after checking that its files are what meta.json says.

        Raises:
          FileNotFoundError: the directory or one of its files is missing.
          ValueError: a file is empty, cut short, of another format or damaged.
        """
        directory = Path(directory)
        meta = _read_meta(directory)
        try:
            counts = SplitCounts(**meta["splits"][split])
            vocab_size, dtype = _vocabulary(meta, counts)
            spec = _tokenizer(directory, meta["tokenizer"])
            has_loss_mask = meta.get("has_loss_mask", False)
            if not isinstance(has_loss_mask, bool):
                given = f"has_loss_mask={short(has_loss_mask)}"
                raise ValueError(f"{given} must be true or false")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{directory / META} does not describe a split {split!r} "
                f"({type(error).__name__}: {error}): {REMEDY}"
            ) from error
        if counts.documents == 0:
            raise ValueError(
                f"split {split!r} of {directory} is empty: {REMEDY} from at least two "
                "different documents"
            )
        tokens = _stored(_path(directory, split, "tokens"), dtype, counts.tokens)
        path = _path(directory, split, "documents")
        # Stored unsigned; read as signed, which is the same below 2^63.
        starts = _stored(path, np.dtype(np.int64), counts.documents)[:]
        _check_starts(path, starts, counts.tokens)
        loss_mask = None
        if has_loss_mask:
            path = _path(directory, split, "loss")
            loss_mask = _stored(path, np.dtype(np.uint8), counts.tokens)
        return cls(
            directory,
            split,
            tokens,
            starts,
            vocab_size,
            counts.largest_token,
            spec,
            loss_mask,
        )

    def ids(self, places: np.ndarray) -> np.ndarray:
        """Reads the tokens at these places of the stream, int32 of their shape.

        Raises:
          ValueError: one is larger than meta.json says.
          OSError: they cannot be read.
        """
        ids = self.tokens.take(places)
        self._check_largest("token", self.tokens, places, ids, self.largest_token)
        return ids.astype(np.int32)

    def is_supervised(self, places: np.ndarray) -> np.ndarray:
        """Reads the loss mask at these places of the stream, bool of their shape.

        Raises:
          ValueError, OSError: as `ids`.
        """
        if self.loss_mask is None:
            return np.ones(places.shape, bool)
        marks = self.loss_mask.take(places)
        self._check_largest("mark", self.loss_mask, places, marks, 1)
        return marks != 0

    def _check_largest(
        self,
        what: str,
        array: StoredArray,
        places: np.ndarray,
        found: np.ndarray,
        largest: int,
    ) -> None:
        """Refuses what a damaged file holds: it would be trained on as text."""
        if found.max(initial=0) > largest:
            worst = int(np.argmax(found))
            raise ValueError(
                f"{array.path} has {what} {found.flat[worst]} at place "
                f"{places.flat[worst]}, and {largest} is the largest (vocab_size="
                f"{self.vocab_size}): it was damaged or replaced; copy it again or "
                f"{REMEDY}"
            )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ValueError if a model with `vocab_size` ids cannot read the corpus."""
        if self.largest_token >= vocab_size:
            raise ValueError(
                f"split {self.split!r} of {self.directory} holds token "
                f"{self.largest_token}, so the model's {vocab_size=} must be at least "
                f"{self.vocab_size}, as its tokenizer {self.tokenizer} has: set "
                f"vocab_size=0 to take the corpus's, or {REMEDY} and the model's "
                "tokenizer"
            )


def vocab_size(directory: Path) -> int:
    """Returns how many ids the tokenizer of a corpus has.

    Raises:
      FileNotFoundError, ValueError: the corpus is missing or damaged.
    """
    meta = _read_meta(Path(directory))
    try:
        return whole_number("vocab_size", meta["vocab_size"], 1)
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"{Path(directory) / META} does not describe a vocabulary "
            f"({type(error).__name__}: {error}): {REMEDY}"
        ) from error


def identify(directory: Path, *, compare: bool = False) -> tuple[str, str]:
    """Returns a corpus's digest, and a note of what was not compared with it.

    compare: files of any size with their digests (see `versioned.check_files`).

    Raises:
      FileNotFoundError, ValueError: it is missing or damaged.
    """
    path, meta = Path(directory) / META, _read_meta(Path(directory))
    contents = {name: meta[name] for name in meta if name not in ORIGIN}
    return digest(contents), check_files(path, meta, whole=compare, remedy=REMEDY)


@dataclass
class SplitCounts:
    """Figures of one split, as meta.json has them."""

    tokens: int
    documents: int
    largest_token: int

    def __post_init__(self):
        for name, number in vars(self).items():
            whole_number(name, number)


class TokenFileWriter:
    """Streams documents to a new corpus, which appears whole or not at all.

    A context manager: files are written to a hidden sibling of `directory`, which
    takes its name when the block ends, and is removed when the block raises.

    has_loss_mask: whether documents come with a loss mask.
    chat_template: that chats are written in, to be set.

    Raises:
      FileExistsError: `directory` exists and is not empty; nothing in it is touched.
      ValueError: the block ends without a document in the train split.
    """

    def __init__(
        self, directory: Path, tokenizer: Tokenizer, *, has_loss_mask: bool = False
    ):
        self.directory = Path(directory)
        self._has_loss_mask = has_loss_mask
        self.counts = {split: SplitCounts(0, 0, 0) for split in SPLITS}
        self.tokenizer = tokenizer
        self.sources: Sources | None = None
        self.chat_template: str | None = None
        self._dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")

    @property
    def bytes_per_token(self) -> int:
        return self._dtype.itemsize

    def __enter__(self) -> "TokenFileWriter":
        self._new = NewDirectory(self.directory, META)
        self._files = ExitStack()
        self._streams: dict[tuple[str, str], HashedFile] = {}
        for kind in ("tokens", "documents", "loss")[: 2 + self._has_loss_mask]:
            for split in SPLITS:
                file = HashedFile(_path(self._new.partial, split, kind))
                self._streams[kind, split] = self._files.enter_context(closing(file))
        return self

    def add_sources(self, paths: Iterable[Path]) -> None:
        """Records the files that the documents are from, with their digests."""
        self.sources = write_sources(self._new.partial, paths)

    def write(
        self, split: str, tokens: np.ndarray, loss_mask: np.ndarray | None = None
    ) -> None:
        """Appends one document, int (n,), its end-of-document token included.

        loss_mask: bool (n,), True for each token with a loss.

        Raises:
          ValueError: the split is unknown, the tokens are empty, or ids that the
            vocabulary has not; a mask is missing, of another shape, or not asked for;
            an array is of another type.
        """
        if split not in SPLITS:
            raise ValueError(f"{split=} must be one of {', '.join(SPLITS)}")
        tokens = np.asarray(tokens)
        masked = None if loss_mask is None else loss_mask.shape
        if masked != (tokens.shape if self._has_loss_mask else None):
            raise ValueError(
                f"a document of {tokens.shape} tokens came with a loss mask of "
                f"{masked}, and has_loss_mask={self._has_loss_mask}"
            )
        vocab_size = self.tokenizer.vocab_size
        if tokens.ndim != 1 or tokens.size == 0:
            raise ValueError(f"a document must be (n,) with n > 0, got {tokens.shape=}")
        is_mask = loss_mask is None or loss_mask.dtype == bool
        if not np.issubdtype(tokens.dtype, np.integer) or not is_mask:
            raise ValueError(
                f"a document must have whole numbers and its loss mask True and False, "
                f"got {tokens.dtype=}"
                + ("" if loss_mask is None else f" and {loss_mask.dtype=}")
            )
        smallest, largest = int(tokens.min()), int(tokens.max())
        if smallest < 0 or largest >= vocab_size:
            raise ValueError(
                f"document {self.counts[split].documents} of {split} has ids from "
                f"{smallest} to {largest}, outside the tokenizer's {vocab_size=}"
            )
        counts = self.counts[split]
        start = np.uint64(counts.tokens).astype("<u8")
        self._streams["documents", split].write(start.tobytes())
        self._streams["tokens", split].write(tokens.astype(self._dtype).tobytes())
        if loss_mask is not None:
            self._streams["loss", split].write(loss_mask.astype(np.uint8).tobytes())
        counts.tokens += tokens.size
        counts.documents += 1
        counts.largest_token = max(counts.largest_token, largest)

    def __exit__(self, kind: type | None, error: object, trace: object) -> None:
        try:
            self._files.close()
            if kind is None:
                self._finish()
        finally:
            self._new.remove()

    def _finish(self) -> None:
        if self.counts["train"].documents == 0:
            raise ValueError(f"no documents were written to {self.directory}")
        partial = self._new.partial
        copy, names = write_tokenizer(partial, self.tokenizer, self.chat_template)
        files = {f.path.name: f.described() for f in self._streams.values()}
        files |= {name: describe_file(partial / name) for name in names}
        meta = {
            "version": VERSION,
            "tokenizer": {"name": self.tokenizer.name, "file": copy},
            "vocab_size": self.tokenizer.vocab_size,
            "end_of_document": self.tokenizer.end_of_document,
            "dtype": self._dtype.name,
            "has_loss_mask": self._has_loss_mask,
            "splits": {split: asdict(self.counts[split]) for split in SPLITS},
            FILES: files,
        }
        if self.sources:
            meta["sources"] = asdict(self.sources)
        (partial / META).write_text(json.dumps(meta, indent=2) + "\n")
        self._new.appear()


def _read_meta(directory: Path) -> dict[str, Any]:
    refuse_missing(directory, META)
    return read_versioned(
        directory / META, VERSION, what="this is not a corpus", remedy=REMEDY
    )


def _vocabulary(meta: dict[str, Any], counts: SplitCounts) -> tuple[int, np.dtype]:
    """Returns the size of the vocabulary, and the type that ids are stored in."""
    dtype = meta["dtype"]
    if dtype not in ("uint16", "uint32"):
        raise ValueError(f"dtype={short(dtype)} must be uint16 or uint32")
    least = counts.largest_token + 1
    return whole_number("vocab_size", meta["vocab_size"], least), np.dtype(dtype)


def _tokenizer(directory: Path, facts: dict[str, Any]) -> str:
    """Returns what `open_tokenizer` opens as the corpus' tokenizer."""
    name, file = facts["name"], facts["file"]
    if not isinstance(name, str) or file is not None and Path(file).name != file:
        raise ValueError(
            f"tokenizer={short(facts)} must have a name, and a file beside"
        )
    return name if file is None else str(directory / file)


def _path(directory: Path, split: str, kind: str) -> Path:
    return directory / f"{split}.{kind}.bin"


def _stored(path: Path, dtype: np.dtype, count: int) -> StoredArray:
    """Opens `count` items, having checked that the file holds exactly these."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {REMEDY}")
    size, expected = path.stat().st_size, count * dtype.itemsize
    if size != expected or size == 0:
        raise ValueError(
            f"{path} has {size} bytes, but {META} says {count} items of "
            f"{dtype.itemsize} bytes, which is {expected}: the file was cut short or "
            f"replaced; copy it again or {REMEDY}"
        )
    return StoredArray(path, dtype, (count,))


def _check_starts(path: Path, starts: np.ndarray, tokens: int) -> None:
    damaged = None
    if starts[0] != 0:
        damaged = f"the first document starts at {starts[0]}, not at 0"
    elif not (starts[1:] > starts[:-1]).all():
        place = int(np.argmin(starts[1:] > starts[:-1]))
        damaged = (
            f"document {place + 1} starts at {starts[place + 1]}, not after document "
            f"{place} at {starts[place]}"
        )
    elif starts[-1] >= tokens:
        damaged = f"the last document starts at {starts[-1]} of {tokens} tokens"
    if damaged:
        raise ValueError(f"{path} is damaged: {damaged}; copy it again or {REMEDY}")
