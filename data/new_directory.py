"""Directories that appear whole or not at all."""

import contextlib
import fcntl
import glob
import os
import shutil
import socket
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
        """Removes the sibling, where it has not appeared."""
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
    """
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    is_corpus = index is not None and (directory / index).exists()
    what = "already holds a corpus" if is_corpus else "already exists"
    raise FileExistsError(
        f"{directory} {what} and is left as it is: remove it or choose another output"
    )
