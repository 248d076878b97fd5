"""Files on a disk or in a bucket: their paths, ranges of them, and copies to a bucket.

Buckets are reached by fsspec, whose clients try again where a connection is lost or a
server is busy. What cannot be read after that is an OSError that names it.
"""

import contextlib
import functools
import importlib
import io
import os
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np

BUCKETS = {"gs": "gcsfs", "s3": "s3fs"}
"""Packages that buckets need and that are not installed everywhere."""
FETCHED_BYTES = 1 << 22
"""Of a range that is fetched at once."""
_KEPT = 64
"""Ranges that a process keeps: 256 MiB at most."""
WAITS = (1.0, 4.0)
"""Seconds before each next try of what a bucket's client tries once."""

State = tuple[Any, ...]


def is_bucket(path: str | Path) -> bool:
    """Returns whether a path is in a bucket."""
    return "://" in str(path)


def as_path(path: str | Path) -> Path:
    """Returns a path on a disk, or in a bucket (`gs://…`, `s3://…`), which acts alike.

    A "~" at its beginning is the home directory, as no shell replaces it in --x=~/y.

    Raises:
      NotImplementedError: it is in a bucket of another kind.
      ImportError: the packages are missing that read the bucket.
    """
    if not is_bucket(path):
        return Path(os.path.expanduser(path))
    kind = str(path).partition("://")[0]
    if kind not in BUCKETS:
        known = " or ".join(f"{name}://" for name in BUCKETS)
        raise NotImplementedError(f"{path}: give a path, or one in a bucket of {known}")
    try:
        importlib.import_module(BUCKETS[kind])
        from upath import UPath
    except ImportError as error:
        raise ImportError(
            f"{path} needs {error.name}, which is not installed: install what "
            "requirements/buckets.txt pins (make venv ACCELERATOR=buckets)"
        ) from error
    return cast(Path, UPath(path))


def reach(path: Path) -> None:
    """Raises OSError where a path's bucket does not answer, if it is in one."""
    if is_bucket(path):
        with naming_lost(path):
            path.exists()


@contextlib.contextmanager
def naming_lost(path: Path) -> Iterator[None]:
    """Makes what a bucket's client raises an OSError that names the path."""
    try:
        yield
    except Exception as error:  # each library has its own
        reason = " ".join(str(error).split()) or type(error).__name__
        raise OSError(
            f"{path} cannot be reached, after several tries ({reason}): see to the "
            "connection, or to your rights there, and start again"
        ) from error


def open_binary(path: Path) -> io.BufferedReader:
    """Opens a file to read, with a buffer."""
    file = path.open("rb")
    return io.BufferedReader(file) if is_bucket(path) else file


def upload(directory: Path, path: Path) -> None:
    """Copies a directory's files to a bucket, in the order in which they were written.

    Raises:
      OSError: as `naming_lost`.
    """
    files = filter(Path.is_file, directory.rglob("*"))
    # The index of a directory was written last, and says that the others are there.
    for file in sorted(files, key=lambda file: file.stat().st_mtime_ns):
        target: Any = path / file.relative_to(directory).as_posix()
        with naming_lost(target):
            target.fs.put_file(str(file), target.path)


def state(file: Any) -> State:
    """Returns what tells a file, by its path or descriptor, from another in its place.

    On a disk its inode, time and size; in a bucket its ETag (S3's) or generation.
    """
    if is_bucket(file):
        file.fs.invalidate_cache(file.path)
        facts = file.fs.info(file.path)
        return facts.get("size"), facts.get("ETag"), facts.get("generation")
    facts = os.stat(file)
    return facts.st_ino, facts.st_mtime_ns, facts.st_size


class RangeReader:
    """Reads ranges of a file, of which threads may share the reader.

    A file on a disk stays open as long as the reader lives.
    """

    def __init__(self, path: Path, before: State | None = None):
        """Raises OSError where the file cannot be opened.

        before: the file's state that it has to have; None: that it has now.
        """
        self._path = path
        self._file = None
        if not is_bucket(path):
            self._file = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
        self._state = before or state(path)

    def into(self, wanted: np.ndarray, begin: int) -> int:
        """Reads from a byte on into uint8 (n,); returns how many were read, maybe less.

        Raises:
          OSError: they cannot be read, or the file has changed.
        """
        if self._file is not None:
            count = os.preadv(self._file, [wanted], begin)
            now = state(self._file)
        else:
            end = begin + min(wanted.size, FETCHED_BYTES)
            fetched, now = _fetch(self._path, self._state, begin, end)
            count = len(fetched)
            wanted[:count] = np.frombuffer(fetched, np.uint8)
        # After the read: what was read may be of either file.
        if now != self._state:
            raise OSError(
                f"{self._path} was changed or replaced while it was used: copy it "
                "again, and start again"
            )
        return count


@functools.lru_cache(_KEPT)
def _fetch(path: Any, before: State, begin: int, end: int) -> tuple[bytes, State]:
    """Fetches a range of an object that was in a state; and the state after that."""
    with naming_lost(path):
        for seconds in WAITS:
            with contextlib.suppress(FileNotFoundError, ValueError):
                fetched = _fetch_once(path, begin, end)
                break
            time.sleep(seconds)
        else:
            fetched = _fetch_once(path, begin, end)
        return fetched, state(path)


def _fetch_once(path: Any, begin: int, end: int) -> bytes:
    fetched = path.fs.cat_file(path.path, start=begin, end=end)
    if len(fetched) > end - begin:
        raise ValueError(f"of {end - begin} bytes it sends {len(fetched)}")
    return fetched
