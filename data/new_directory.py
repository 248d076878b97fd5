"""Directories of data: new ones appear whole or not at all, and none is in a bucket."""

import contextlib
import difflib
import fcntl
import glob
import os
import shutil
import socket
import sys
import uuid
from pathlib import Path


class NewDirectory:
    """A hidden sibling of `path`, which takes its name when it is whole.

    It is locked as long as its process lives. Those of the same `path` that killed
    processes of this host have left are removed first.

    index: the file that a corpus at `path` would have; what is there is called one.
    partial: the sibling, empty at first.

    Raises:
      FileExistsError: `path` exists and is not empty; nothing in it is touched.
      ValueError: it is in a bucket.
    """

    def __init__(self, path: Path, index: str | None = None):
        self._path, self._index = path, index
        refuse_existing(path, index)
        path.parent.mkdir(parents=True, exist_ok=True)
        # The locks of another host are not seen.
        mine = f".{path.name}.{socket.gethostname()}."
        for left in path.parent.glob(f"{glob.escape(mine)}*.partial"):
            with contextlib.suppress(OSError):  # its process lives
                lock = _lock(left)
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)
        self.partial = path.with_name(f"{mine}{uuid.uuid4().hex[:12]}.new")
        self.partial.mkdir()
        self._locked = contextlib.ExitStack()
        with contextlib.suppress(OSError):  # a file system without locks
            self._locked.callback(os.close, _lock(self.partial))
            # Others find it under this name alone.
            self.partial = self.partial.rename(self.partial.with_suffix(".partial"))

    def appear(self) -> None:
        """Gives the sibling its name.

        Raises:
          FileExistsError: another process has made the same since.
        """
        try:
            self.partial.rename(self._path)
        except OSError:
            refuse_existing(self._path, self._index)
            raise

    def remove(self) -> None:
        """Removes the sibling, where it has not appeared; an error gets its path."""
        error = sys.exception()
        if isinstance(error, OSError) and error.errno and error.filename is None:
            error.filename = str(self._path)  # a full disk names none
        shutil.rmtree(self.partial, ignore_errors=True)
        self._locked.close()


def _lock(directory: Path) -> int:
    """Returns a descriptor that holds the directory's lock; raises OSError if held."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def refuse_existing(directory: Path, index: str | None = None) -> None:
    """Raises FileExistsError if there is something at `directory`.

    index: the file with which it is called a corpus.

    Raises:
      ValueError: it is in a bucket.
    """
    refuse_bucket(directory)
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    is_corpus = index is not None and (directory / index).exists()
    what = "already holds a corpus" if is_corpus else "already exists"
    raise FileExistsError(
        f"{directory} {what} and is left as it is: remove it or choose another output"
    )


def refuse_missing(directory: Path, index: str) -> None:
    """Raises FileNotFoundError if there is no corpus, which has the file `index`."""
    refuse_bucket(directory)
    if (directory / index).is_file():
        return
    near = [path.parent.name for path in directory.parent.glob(f"*/{index}")]
    near = difflib.get_close_matches(directory.name, near, n=1)
    why = f"; {directory.with_name(near[0])} is one" if near else ""
    why = f", it has no {index}" if directory.exists() else why
    texts = directory if directory.exists() else "TEXTS"
    raise FileNotFoundError(
        f"there is no corpus {directory}{why}: give the directory of one, or make one: "
        f"python -m tools.prepare_text {texts} --output CORPUS"
    )


def refuse_bucket(path: Path) -> None:
    """Raises ValueError for a path that was "gs://…", unless there is such a folder."""
    scheme, *rest = path.parts or [""]
    if rest and scheme.endswith(":") and not path.exists():
        raise ValueError(
            f"{scheme}//{'/'.join(rest)} is in a bucket, and data are read from and "
            "written to file systems: copy it to a disk of every host, or mount the "
            "bucket there (as with gcsfuse), and give that path"
        )
