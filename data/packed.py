"""Packed data on disk: a directory of long arrays, and a JSON index of what they are.

Token files and trajectory files are packed. Arrays are read as they are asked for and
never mapped: where a mapped file shrinks, or its disk fails, a process ends with SIGBUS
and without a word. A read that comes short, or fails, is an error like any other.
"""

import contextlib
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from data.files import describe_file, new_directory
from data.json_text import read_json_object, short
from data.remote import RangeReader, State, as_path, open_binary, reach, state

FILES = "files"
"""Key of an index: the bytes and the SHA-256 of each file beside it, by name."""
COMPARED_BYTES = 1 << 28
"""Files of up to this size, together, are always compared with their digests."""
_BYTES_AT_A_TIME = 1 << 22
_GAP_BYTES = 1 << 16
_identified: dict[Path, State] = {}
"""Files that `identify` has looked at, as they were then: they are read as these."""


class StoredArray:
    """Rows of numbers, one after the other in a file; threads may share it.

    path: of the file, on a disk or in a bucket.
    dtype: of the numbers, little-endian. shape: (rows, ...).
    """

    def __init__(
        self, path: Path, dtype: np.dtype, shape: tuple[int, ...], offset: int = 0
    ):
        """Opens the file; raises OSError where that fails.

        offset: bytes before the first row.
        """
        self.path = path
        self.shape = shape
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._offset = offset
        self._row_bytes = self.dtype.itemsize * prod(shape[1:])
        self._reader = RangeReader(path, _identified.get(path))

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Reads these rows; raises OSError where they cannot be read."""
        begin, end, _ = rows.indices(self.shape[0])
        numbers = np.empty((max(end - begin, 0), *self.shape[1:]), self.dtype)
        buffer = numbers.reshape(-1).view(np.uint8)
        first = self._offset + begin * self._row_bytes
        done = 0
        # A disk or a bucket may give less than it is asked for.
        while done < buffer.size:
            count = self._reader.into(buffer[done:], first + done)
            if not count:
                raise OSError(
                    f"{self.path} ends at byte {first + done} and was longer when it "
                    "was opened: it was cut short while it was read; copy it again"
                )
            done += count
        return numbers

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Reads rows by their numbers, int of any shape: (*that shape, *a row's).

        Fastest where numbers do not decrease. What lies between rows is read too, where
        it is short, but little of it is in memory at a time.

        Raises:
          OSError: as above.
        """
        flat = rows.reshape(-1)
        order = None
        if (flat[1:] < flat[:-1]).any():
            order = np.argsort(flat, kind="stable")
            flat = flat[order]
        taken = np.empty((flat.size, *self.shape[1:]), self.dtype)
        is_far = np.diff(flat) * self._row_bytes > _GAP_BYTES
        is_far |= np.diff(flat * self._row_bytes // _BYTES_AT_A_TIME) > 0
        bounds = np.r_[0, np.flatnonzero(is_far) + 1, flat.size] if flat.size else []
        for begin, end in pairwise(bounds):
            near = flat[begin:end]
            taken[begin:end] = self[near[0] : near[-1] + 1][near - near[0]]
        if order is not None:
            taken[order] = taken.copy()
        return taken.reshape(rows.shape + self.shape[1:])


@dataclass(frozen=True)
class PackedFormat:
    """What directories of one kind have in common, to read them and to refuse others.

    name: what messages call a directory. index: name of its index.
    version: of the format that this program reads.
    remedy: what to do about a bad one. make: how to get one, of files TEXTS.
    origin: keys of the index, and files, that say where data are from, and not which
      data they are.
    """

    name: str
    index: str
    version: int
    remedy: str
    make: str
    origin: Collection[str] = ()

    def read_index(self, directory: Path) -> dict[str, Any]:
        """Reads the index of a directory.

        Raises:
          FileNotFoundError: the directory has no index.
          OSError, ValueError: as `reach`; or it is not a JSON object, has no version,
            or another one.
        """
        reach(directory)
        path = directory / self.index
        if not path.is_file():
            make = self.make
            why = ""
            if directory.exists():
                why = f", it has no {self.index}"
                make = make.replace("TEXTS", str(directory))
            raise FileNotFoundError(
                f"there is no {self.name} {directory}{why}: give the directory of one, "
                f"or make one: {make}"
            )
        index = read_json_object(path, self.remedy)
        version = index.get("version")
        if type(version) is not int or version != self.version:
            raise ValueError(
                f"{path} has format version {short(version)}, and this program reads "
                f"version {self.version}: {self.remedy}"
            )
        return index

    @contextlib.contextmanager
    def parsing(self, directory: Path, what: str) -> Iterator[None]:
        """Turns errors that an index causes into one ValueError that names the index.

        what: the index should describe it.
        """
        try:
            yield
        except (
            AttributeError,
            KeyError,
            OverflowError,
            TypeError,
            ValueError,
        ) as error:
            raise ValueError(
                f"{directory / self.index} does not describe {what} "
                f"({type(error).__name__}: {error}): {self.remedy}"
            ) from error

    def open_array(
        self, path: Path, dtype: Any, shape: tuple[int, ...], header: bytes = b""
    ) -> StoredArray:
        """Opens an array after checking that its file holds this and no more.

        header: bytes that the file begins with.

        Raises:
          FileNotFoundError: the file is missing.
          ValueError: it has another size, or another header.
        """
        dtype = np.dtype(dtype)
        expected = len(header) + dtype.itemsize * prod(shape)
        described = f"{dtype.name} of {shape}, which is {expected} bytes"
        self._check_size(path, expected, described)
        with open_binary(path) as file:
            if file.read(len(header)) != header:
                raise ValueError(
                    f"{path} does not begin as {described}, as {self.index} says: the "
                    f"file was replaced; copy it again or {self.remedy}"
                )
        return StoredArray(path, dtype, shape, len(header))

    def _check_size(self, path: Path, expected: int, described: str) -> None:
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: {self.remedy}")
        size = path.stat().st_size
        if size != expected:
            raise ValueError(
                f"{path} has {size} bytes, but {self.index} says {described}: "
                f"the file was cut short or replaced; copy it again or {self.remedy}"
            )

    def identify(self, directory: Path, *, compare: bool = False) -> tuple[str, str]:
        """Returns the digest of a directory, and a note of what was not compared.

        From then on arrays are read of the files that are there now, and of no others.

        compare: files of any size with their digests, not only small ones.

        Raises:
          FileNotFoundError: the index or a file is missing.
          ValueError: a file is not what was written, or the index is damaged.
        """
        directory = as_path(directory)
        index = self.read_index(directory)
        named = {n: v for n, v in index.items() if n not in self.origin}
        described = digest(named)
        sizes: dict[Path, int] = {}
        digests: dict[Path, str] = {}
        with self.parsing(directory, f"its {FILES}"):
            for name, facts in index[FILES].items():
                path = (directory / self.index).with_name(name)
                sizes[path] = whole_number("bytes", facts["bytes"])
                digests[path] = str(facts["sha256"])
        for path, size in sizes.items():
            self._check_size(path, size, str(size))
            # Taken before the digests are compared: a file that is replaced behind
            # that is refused where it is read, not trained on.
            _identified[path] = state(path)
        whole = sum(sizes.values())
        if whole > COMPARED_BYTES and not compare:
            return described, (
                f"{directory} has {whole / 1e9:.1f} GB, which are not compared with "
                "their digests: config.data.compare_digests=True does"
            )
        for path, sha256 in digests.items():
            if describe_file(path)["sha256"] != sha256:
                raise ValueError(
                    f"{path} is not what was written, by its digest: it was damaged or "
                    f"replaced; copy it again or {self.remedy}"
                )
        return described, ""


class PackedWriter:
    """Streams files into a new directory, which appears whole or not at all.

    A context manager: files are written to a hidden sibling of `directory`, which
    takes its name when the block ends, and is removed when the block raises.

    format: of the directory.

    Raises:
      FileExistsError: `directory` exists and is not empty; nothing in it is touched.
    """

    format: PackedFormat

    def __init__(self, directory: Path):
        self.directory = as_path(directory)

    def __enter__(self) -> Self:
        self._whole = contextlib.ExitStack()
        self._opened = contextlib.ExitStack()
        self._partial = self._whole.enter_context(new_directory(self.directory))
        self._whole.enter_context(self._opened)
        return self

    def _open(self, name: str) -> BinaryIO:
        """Opens a new file, to be closed when the block ends."""
        return self._opened.enter_context((self._partial / name).open("wb"))

    def _finish(self) -> dict[str, Any]:
        """Returns the rest of the index; raises ValueError if nothing was written."""
        raise NotImplementedError

    def __exit__(self, *error: Any) -> None:
        if error[0] is not None:
            self._whole.__exit__(*error)
            return
        with self._whole:
            self._opened.close()
            facts = self._finish()
            names = sorted(path.name for path in self._partial.iterdir())
            kept = [name for name in names if name not in self.format.origin]
            paths = map(self._partial.joinpath, kept)
            with ThreadPoolExecutor() as pool:  # hashing lets others run
                files = dict(zip(kept, pool.map(describe_file, paths), strict=True))
            index = {"version": self.format.version, **facts, FILES: files}
            text = json.dumps(index, indent=1) + "\n"
            (self._partial / self.format.index).write_text(text)


def whole_number(name: str, number: Any, least: int = 0) -> int:
    """Checks a number that an index has to hold.

    Raises:
      ValueError: it is not a whole number, or is below the least.
    """
    if type(number) is not int or number < least:
        given = f"{name}={short(number)}"
        raise ValueError(f"{given} must be a whole number, at least {least}")
    return number


def truth(index: Mapping[str, Any], name: str) -> bool:
    """Reads a truth value of an index; False where it is missing.

    Raises:
      ValueError: it is another value.
    """
    value = index.get(name, False)
    if type(value) is not bool:
        raise ValueError(f"{name}={short(value)} must be true or false")
    return value


def digest(description: Mapping[str, Any]) -> str:
    """Returns 16 hex digits that are equal only for equal descriptions."""
    text = json.dumps(description, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
