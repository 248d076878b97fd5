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
    train.loss.bin          uint8, 1 for each token with a loss, or float32, the weight
                            of each; not there where all have
    train.segments.bin      little-endian uint64 pairs: where each part of a tree
                            starts, and how many before it is the one that it
                            continues, 0 for none; not there without trees
    validation.…            the same for the held-out documents

A document runs to the start of the next one, its end-of-document token included.
meta.json has size and SHA-256 of each file. Streams are read as they are asked for:
opening a corpus of any size reads no tokens.
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from data.files import describe_file
from data.json_text import short
from data.packed import PackedFormat, PackedWriter, StoredArray, truth, whole_number
from data.remote import as_path
from data.text.tokens.document_starts import DocumentStarts
from data.text.tokens.prefix_tree import are_parts
from data.text.tokens.tokenizer import Tokenizer
from data.text.tokens.tokenizer_files import write_tokenizer

SPLITS = ("train", "validation")
SOURCES = "sources.jsonl"
MOST_NAMED = 4
"""Sources that are named where a corpus is described; all are in `sources.jsonl`."""
FORMAT = PackedFormat(
    "corpus",
    "meta.json",
    version=1,
    remedy="prepare the corpus again with tools/prepare_text.py",
    make="python -m tools.prepare_text TEXTS --output CORPUS",
    origin=("sources", SOURCES, "end_of_document"),
)
identify = FORMAT.identify


@dataclass(frozen=True, eq=False)
class TokenFile:
    """One split of a corpus.

    tokens: uint16 or uint32 (tokens,), the stream, on disk.
    documents: where in the stream each document starts, on disk.
    vocab_size: of the tokenizer; largest_token: the largest id that occurs.
    tokenizer: what `open_tokenizer` opens to encode and decode as the corpus was.
    loss_mask: uint8 or float32 (tokens,), the weight of each token's loss, on disk;
      None: 1.
    segments: int64 (segments, 2), where in the stream each part of a tree starts, and
      how many before it is the one that it continues; None: without trees.
    intervals: of keys that a token of any split sees, at most.
    """

    directory: Path
    split: str
    tokens: StoredArray
    documents: DocumentStarts
    vocab_size: int
    largest_token: int
    tokenizer: str
    loss_mask: StoredArray | None = None
    segments: np.ndarray | None = None
    intervals: int = 1

    @classmethod
    def open(cls, directory: Path | str, split: str) -> "TokenFile":
        """Opens a split after checking that its files are what meta.json says.

        Raises:
          FileNotFoundError: the directory or one of its files is missing.
          ValueError: a file is empty, cut short, of another format or damaged.
        """
        directory = as_path(directory)
        meta = FORMAT.read_index(directory)
        with FORMAT.parsing(directory, f"a split {split!r}"):
            counts = SplitCounts(**meta["splits"][split])
            least = counts.largest_token + 1
            vocab_size = whole_number("vocab_size", meta["vocab_size"], least)
            dtype = meta["dtype"]
            if dtype not in ("uint16", "uint32"):
                raise ValueError(f"dtype={short(dtype)} must be uint16 or uint32")
            spec = _tokenizer(directory, meta["tokenizer"])
            has_loss_mask = truth(meta, "has_loss_mask")
            loss_dtype = "float32" if truth(meta, "has_weights") else "uint8"
            most = whole_number("intervals", meta.get("intervals", 1), 1)
            parts = whole_number("segments", meta["segments"][split] if most > 1 else 0)
        if counts.documents == 0:
            raise ValueError(
                f"split {split!r} of {directory} is empty: {FORMAT.remedy} from at "
                "least two different documents"
            )

        def stored(kind: str, dtype: str, *shape: int) -> StoredArray:
            return FORMAT.open_array(_path(directory, split, kind), dtype, shape)

        tokens = stored("tokens", dtype, counts.tokens)
        # Stored unsigned; read as signed, which is the same below 2^63.
        starts = stored("documents", "int64", counts.documents)
        segments = None
        if most > 1:
            read = stored("segments", "int64", parts, 2)
            segments = read[:]
            if not are_parts(segments, np.append(starts[:], counts.tokens)):
                raise ValueError(
                    f"{read.path} is damaged: its parts are not of the documents; copy "
                    f"it again or {FORMAT.remedy}"
                )
        return cls(
            directory,
            split,
            tokens,
            DocumentStarts(starts, counts.tokens, FORMAT.remedy),
            vocab_size,
            counts.largest_token,
            spec,
            stored("loss", loss_dtype, counts.tokens) if has_loss_mask else None,
            segments,
            most,
        )

    @property
    def starts(self) -> np.ndarray:
        """Where in the stream each document starts, int64 (documents,), read."""
        return self.documents.between(-1, self.tokens.size)

    def ids(self, offsets: np.ndarray) -> np.ndarray:
        """Reads the tokens at these offsets of the stream, int32 of their shape.

        Raises:
          ValueError: one is larger than meta.json says.
          OSError: they cannot be read.
        """
        ids = self._take("token", self.tokens, offsets, self.largest_token)
        return ids.astype(np.int32)

    def weights(self, offsets: np.ndarray) -> np.ndarray:
        """Reads the losses' weights at these offsets of the stream, float32 likewise.

        Raises:
          ValueError, OSError: as `ids`.
        """
        if self.loss_mask is None:
            return np.ones(offsets.shape, np.float32)
        most = 1 if self.loss_mask.dtype == np.uint8 else np.finfo(np.float32).max
        return self._take("weight", self.loss_mask, offsets, most).astype(np.float32)

    def _take(
        self, what: str, array: StoredArray, offsets: np.ndarray, most: int | np.number
    ) -> np.ndarray:
        """Reads numbers, and refuses larger ones: they would be trained on as text."""
        numbers = array.take(offsets)
        is_known = (numbers >= 0) & (numbers <= most)
        if not is_known.all():
            worst = int(np.argmin(is_known))
            raise ValueError(
                f"{array.path} has {what} {numbers.flat[worst]} at place "
                f"{offsets.flat[worst]}, and {most} is the largest (vocab_size="
                f"{self.vocab_size}): it was damaged or replaced; copy it again or "
                f"{FORMAT.remedy}"
            )
        return numbers

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ValueError if a model with `vocab_size` ids cannot read the corpus."""
        if self.largest_token >= vocab_size:
            raise ValueError(
                f"split {self.split!r} of {self.directory} holds token "
                f"{self.largest_token}, so the model's {vocab_size=} must be at least "
                f"{self.vocab_size}, as its tokenizer {self.tokenizer} has: set "
                f"vocab_size=0 to take the corpus's, or {FORMAT.remedy} and the "
                "model's tokenizer"
            )


def vocab_size(directory: Path) -> int:
    """Returns how many ids the tokenizer of a corpus has.

    Raises:
      FileNotFoundError, ValueError: the corpus is missing or damaged.
    """
    return _read_number(directory, "vocab_size", None)


def intervals(directory: Path) -> int:
    """Returns how many intervals of keys a corpus' tokens see, as `vocab_size` does."""
    return _read_number(directory, "intervals", 1)


def _read_number(directory: Path, name: str, default: int | None) -> int:
    meta = FORMAT.read_index(as_path(directory))
    with FORMAT.parsing(as_path(directory), name):
        return whole_number(name, meta.get(name, default), 1)


@dataclass
class SplitCounts:
    """Figures of one split, as meta.json has them."""

    tokens: int
    documents: int
    largest_token: int

    def __post_init__(self):
        for name, number in vars(self).items():
            whole_number(name, number)


@dataclass
class Sources:
    """How many files a corpus was made of, their size, and the first of them.

    sha256: of `sources.jsonl`, which has path, size and SHA-256 of each in a line.
    """

    files: int = 0
    bytes: int = 0
    sha256: str = ""
    first: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        rest = f"; all in {SOURCES}" if self.files > len(self.first) else ""
        size = f"{self.bytes / 1e6:,.1f} MB"
        return f"files: {self.files:,}, {size}: {', '.join(self.first)}{rest}"


class TokenFileWriter(PackedWriter):
    """Streams documents to a new corpus (see `PackedWriter`).

    dtype: of the tokens on disk. has_loss_mask: whether documents come with weights.
    has_weights: whether some of these are weights other than 0 and 1, to be set.
    supervised: tokens with a loss, by split; empty where all have.
    intervals: of keys that a token sees, at most. chat_template: of chats, to be set.

    Raises:
      FileExistsError: `directory` exists and is not empty; nothing in it is touched.
      ValueError: the block ends without a document in the train split.
    """

    format = FORMAT

    def __init__(
        self, directory: Path, tokenizer: Tokenizer, *, has_loss_mask: bool = False
    ):
        super().__init__(directory)
        self._has_loss_mask = has_loss_mask
        self.has_weights = False
        self.segments = dict.fromkeys(SPLITS, 0)
        self.intervals = 1
        self.counts = {split: SplitCounts(0, 0, 0) for split in SPLITS}
        self.supervised: Counter[str] = Counter()
        self.tokenizer = tokenizer
        self.sources: Sources | None = None
        self.chat_template: str | None = None
        self.dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")

    def __enter__(self) -> Self:
        super().__enter__()
        contents = ["tokens", "documents"]
        if self._has_loss_mask:
            contents += ["loss", "segments"]
        self._streams: dict[tuple[str, str], BinaryIO] = {}
        for content, split in product(contents, SPLITS):
            name = _path(Path(), split, content).name
            self._streams[content, split] = self._open(name)
        return self

    def add_sources(self, sources: Iterable[dict[str, Any]]) -> None:
        """Records the files that the documents are from: path, bytes and sha256."""
        self.sources = written = Sources()
        path = self._partial / SOURCES
        with path.open("w") as file:
            for facts in sources:
                file.write(json.dumps(facts) + "\n")
                written.files += 1
                written.bytes += facts["bytes"]
                if written.files <= MOST_NAMED:
                    sha256 = facts["sha256"][:12]
                    written.first.append(f"{facts['path']} (sha256 {sha256})")
        written.sha256 = describe_file(path)["sha256"]

    def write(
        self,
        split: str,
        tokens: np.ndarray,
        weights: np.ndarray | None = None,
        segments: np.ndarray | None = None,
        intervals: int = 1,
        lengths: np.ndarray | None = None,
    ) -> None:
        """Appends documents (see `Document`), their end-of-document tokens included.

        lengths: of documents that follow each other, int (documents,); None: of one.

        Raises:
          ValueError: the tokens are empty, or ids that the vocabulary has not; weights
            are missing, not asked for, or of another shape; or arrays of another type.
        """
        tokens = np.asarray(tokens)
        largest = self._check(split, tokens, weights)
        counts = self.counts[split]
        lengths = np.array([tokens.size] if lengths is None else lengths)
        starts = counts.tokens + np.cumsum(lengths) - lengths
        self._streams["documents", split].write(starts.astype("<u8").tobytes())
        self._streams["tokens", split].write(tokens.astype(self.dtype).tobytes())
        if weights is not None:
            dtype = np.dtype("<f4" if self.has_weights else np.uint8)
            self._streams["loss", split].write(weights.astype(dtype).tobytes())
            self.supervised[split] += int(np.count_nonzero(weights))
            if segments is None:
                segments = np.stack([starts - counts.tokens, 0 * starts], axis=1)
            in_stream = (segments + (counts.tokens, 0)).astype("<u8")
            self._streams["segments", split].write(in_stream.tobytes())
            self.segments[split] += len(segments)
            self.intervals = max(self.intervals, intervals)
        counts.tokens += tokens.size
        counts.documents += lengths.size
        counts.largest_token = max(counts.largest_token, largest)

    def _check(self, split: str, tokens: np.ndarray, weights: np.ndarray | None) -> int:
        """Checks the arrays of `write`; returns the largest id."""
        is_whole = np.issubdtype(tokens.dtype, np.integer) and tokens.ndim == 1
        ids = tokens if is_whole and tokens.size else np.zeros(1, np.int64)
        least = int(ids.min())
        largest = int(ids.max())
        given = None if weights is None else (weights.shape, weights.dtype)
        wanted: list[Any] = [None]
        if self._has_loss_mask:
            dtypes = [bool, np.float32] if self.has_weights else [bool]
            wanted = [(tokens.shape, np.dtype(dtype)) for dtype in dtypes]
        size = self.tokenizer.vocab_size
        is_known = is_whole and tokens.size and 0 <= least <= largest < size
        if not is_known or given not in wanted:
            raise ValueError(
                f"document {self.counts[split].documents} of {split} must be (n,) "
                f"whole numbers, n > 0, below {size}, with a loss mask {wanted[-1]}; "
                f"got {tokens.dtype} of {tokens.shape}, {least} to {largest}, and "
                f"{given}"
            )
        return largest

    def _finish(self) -> dict[str, Any]:
        if self.counts["train"].documents == 0:
            raise ValueError(f"no documents were written to {self.directory}")
        copy = write_tokenizer(self._partial, self.tokenizer, self.chat_template)
        index: dict[str, Any] = {
            "tokenizer": {"name": self.tokenizer.name, "file": copy},
            "vocab_size": self.tokenizer.vocab_size,
            "end_of_document": self.tokenizer.end_of_document,
            "dtype": self.dtype.name,
            "has_loss_mask": self._has_loss_mask,
            "splits": {split: asdict(self.counts[split]) for split in SPLITS},
        }
        if self.has_weights:
            index["has_weights"] = True
        if self.intervals > 1:
            index["intervals"] = self.intervals
            index["segments"] = self.segments
        elif self._has_loss_mask:
            for split in SPLITS:
                _path(self._partial, split, "segments").unlink()
        if self.sources:
            index["sources"] = asdict(self.sources)
        return index


def _tokenizer(directory: Path, facts: dict[str, Any]) -> str:
    """Returns what `open_tokenizer` opens as the corpus' tokenizer."""
    name = facts["name"]
    file = facts["file"]
    if not isinstance(name, str) or file is not None and Path(file).name != file:
        raise ValueError(
            f"tokenizer={short(facts)} must have a name, and a file beside"
        )
    return name if file is None else str(directory / file)


def _path(directory: Path, split: str, kind: str) -> Path:
    return directory / f"{split}.{kind}.bin"
