"""Token files: a corpus on disk, as one stream of token ids for each split.

A corpus is a directory:

    meta.json               format version, tokenizer, and the figures of each split
    tokenizer.json|.model   copy of the tokenizer's file, where it has one
    train.tokens.bin        little-endian uint16, or uint32 above 65536 ids
    train.documents.bin     little-endian uint64: where each document starts; first 0
    train.loss.bin          uint8, 1 for each token that is to be learnt; not there
                            where all are
    validation.…            the same for the held-out documents

A document runs to the start of the next one, its end-of-document token included.
Streams are memory-mapped: opening a corpus of any size reads no tokens.
"""

import json
import shutil
import uuid
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from data.tokenizer import Tokenizer
from data.versioned import read_versioned

VERSION = 1
SPLITS = ("train", "validation")
META = "meta.json"
REMEDY = "prepare the corpus again with tools/prepare_text.py"


@dataclass(frozen=True, eq=False)
class TokenFile:
    """One split of a corpus, memory-mapped.

    tokens: uint16 or uint32 (tokens,), the stream.
    starts: int64 (documents,), where in the stream each document starts.
    vocab_size: of the tokenizer; largest_token: the largest id that occurs.
    tokenizer: what `open_tokenizer` opens to encode and decode as the corpus was.
    loss_mask: uint8 (tokens,), 1 for each token that is to be learnt; None: all are.
    """

    directory: Path
    split: str
    tokens: np.ndarray
    starts: np.ndarray
    vocab_size: int
    largest_token: int
    tokenizer: str
    loss_mask: np.ndarray | None = None

    @classmethod
    def open(cls, directory: Path, split: str) -> "TokenFile":
        """Maps a split after checking that its files are what meta.json says.

        Raises:
          FileNotFoundError: the directory or one of its files is missing.
          ValueError: a file is empty, cut short, of another format or damaged.
        """
        directory = Path(directory)
        if not directory.is_dir():
            raise FileNotFoundError(
                f"there is no corpus {directory}: {REMEDY} --output {directory}"
            )
        meta = read_versioned(
            directory / META, VERSION, what="this is no corpus", remedy=REMEDY
        )
        try:
            counts = SplitCounts(**meta["splits"][split])
            vocab_size, dtype = meta["vocab_size"], np.dtype(meta["dtype"])
            tokenizer = meta["tokenizer"]
            spec = tokenizer["name"]
            if tokenizer["file"] is not None:
                spec = str(directory / tokenizer["file"])
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{directory / META} does not describe a split {split!r} "
                f"({type(error).__name__}: {error}): {REMEDY}"
            ) from error
        if counts.documents == 0:
            raise ValueError(
                f"split {split!r} of {directory} is empty: {REMEDY} from at least two "
                "different documents"
            )
        tokens = _map(_tokens_path(directory, split), dtype, counts.tokens)
        starts_path = _documents_path(directory, split)
        # Stored unsigned; read as signed, which is the same below 2^63 and can be
        # compared with other integers without a conversion of the whole file.
        starts = _map(starts_path, np.dtype(np.int64), counts.documents)
        _check_starts(starts_path, starts, counts.tokens)
        loss_mask = None
        if meta.get("has_loss_mask", False):
            path = _loss_path(directory, split)
            loss_mask = _map(path, np.dtype(np.uint8), counts.tokens)
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

    def is_learnt(self, places: np.ndarray) -> np.ndarray:
        """Whether each token at these places of the stream is to be learnt."""
        if self.loss_mask is None:
            return np.ones(places.shape, bool)
        return self.loss_mask[places] != 0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ValueError if a model with `vocab_size` ids cannot read the corpus."""
        if self.largest_token >= vocab_size:
            raise ValueError(
                f"split {self.split!r} of {self.directory} holds token "
                f"{self.largest_token}, but the model's {vocab_size=} allows ids up to "
                f"{vocab_size - 1}: give the model a vocabulary of at least "
                f"{self.vocab_size}, or {REMEDY} and the model's tokenizer"
            )


@dataclass
class SplitCounts:
    """Figures of one split, as meta.json has them."""

    tokens: int
    documents: int
    largest_token: int


class TokenFileWriter:
    """Streams documents to a new corpus, which appears whole or not at all.

    A context manager: files are written to a hidden sibling of `directory`, which
    takes its name when the block ends, and is removed when the block raises.

    has_loss_mask: whether documents come with what of them is to be learnt.

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
        self._tokenizer = tokenizer
        self._dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")

    @property
    def bytes_per_token(self) -> int:
        return self._dtype.itemsize

    def __enter__(self) -> "TokenFileWriter":
        _refuse_existing(self.directory)
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        name = f".{self.directory.name}.{uuid.uuid4().hex}.partial"
        self._partial = self.directory.with_name(name)
        self._partial.mkdir()
        self._files = ExitStack()
        self._tokens, self._documents, self._losses = {}, {}, {}
        kinds = [(self._tokens, _tokens_path), (self._documents, _documents_path)]
        if self._has_loss_mask:
            kinds.append((self._losses, _loss_path))
        for split in SPLITS:
            for files, path in kinds:
                file = path(self._partial, split).open("wb")
                files[split] = self._files.enter_context(file)
        return self

    def write(
        self, split: str, tokens: np.ndarray, loss_mask: np.ndarray | None = None
    ) -> None:
        """Appends one document, int (n,), its end-of-document token included.

        loss_mask: bool (n,), True for each token that is to be learnt.

        Raises:
          ValueError: there are no tokens, or ids that the vocabulary has not; a mask
            is missing, of another shape, or not asked for.
        """
        masked = None if loss_mask is None else loss_mask.shape
        if masked != (tokens.shape if self._has_loss_mask else None):
            raise ValueError(
                f"a document of {tokens.shape} tokens came with a loss mask of "
                f"{masked}, and has_loss_mask={self._has_loss_mask}"
            )
        vocab_size = self._tokenizer.vocab_size
        if tokens.ndim != 1 or tokens.size == 0:
            raise ValueError(f"a document must be (n,) with n > 0, got {tokens.shape=}")
        smallest, largest = int(tokens.min()), int(tokens.max())
        if smallest < 0 or largest >= vocab_size:
            raise ValueError(
                f"document {self.counts[split].documents} of {split} has ids from "
                f"{smallest} to {largest}, outside the tokenizer's {vocab_size=}"
            )
        counts = self.counts[split]
        self._documents[split].write(np.uint64(counts.tokens).astype("<u8").tobytes())
        self._tokens[split].write(tokens.astype(self._dtype).tobytes())
        if loss_mask is not None:
            self._losses[split].write(loss_mask.astype(np.uint8).tobytes())
        counts.tokens += tokens.size
        counts.documents += 1
        counts.largest_token = max(counts.largest_token, largest)

    def __exit__(self, kind: type | None, error: object, trace: object) -> None:
        try:
            self._files.close()
            if kind is None:
                self._finish()
        finally:
            shutil.rmtree(self._partial, ignore_errors=True)

    def _finish(self) -> None:
        if self.counts["train"].documents == 0:
            raise ValueError(f"no documents were written to {self.directory}")
        source, copy = self._tokenizer.path, None
        if source is not None:
            copy = f"tokenizer{source.suffix}"
            shutil.copyfile(source, self._partial / copy)
        meta = {
            "version": VERSION,
            "tokenizer": {"name": self._tokenizer.name, "file": copy},
            "vocab_size": self._tokenizer.vocab_size,
            "dtype": self._dtype.name,
            "has_loss_mask": self._has_loss_mask,
            "splits": {split: asdict(self.counts[split]) for split in SPLITS},
        }
        (self._partial / META).write_text(json.dumps(meta, indent=2) + "\n")
        try:
            self._partial.rename(self.directory)
        except OSError:
            # Another process may have made the same corpus since the block began.
            _refuse_existing(self.directory)
            raise


def _tokens_path(directory: Path, split: str) -> Path:
    return directory / f"{split}.tokens.bin"


def _documents_path(directory: Path, split: str) -> Path:
    return directory / f"{split}.documents.bin"


def _loss_path(directory: Path, split: str) -> Path:
    return directory / f"{split}.loss.bin"


def _map(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    """Maps `count` items, having checked that the file holds exactly these."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {REMEDY}")
    size, expected = path.stat().st_size, count * dtype.itemsize
    if size != expected or size == 0:
        raise ValueError(
            f"{path} has {size} bytes, but {META} says {count} items of "
            f"{dtype.itemsize} bytes, which is {expected}: the file was cut short or "
            f"replaced; copy it anew or {REMEDY}"
        )
    # A plain array over the map: indexing a np.memmap costs several times as much.
    return np.asarray(np.memmap(path, dtype.newbyteorder("<"), mode="r"))


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
        raise ValueError(f"{path} is damaged: {damaged}; copy it anew or {REMEDY}")


def _refuse_existing(directory: Path) -> None:
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    what = "already holds a corpus" if (directory / META).exists() else "already exists"
    raise FileExistsError(
        f"{directory} {what} and is left as it is: remove it or choose another output"
    )
