"""Directories of data: new ones appear whole or not at all."""

import contextlib
import fcntl
import glob
import hashlib
import os
import shutil
import socket
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.remote import is_bucket, open_binary, reach, upload


class NewDirectory:
    """A hidden sibling of `path`, which takes its name when it is whole.

    It is locked as long as its process lives. Those of the same `path` that killed
    processes of this host have left are removed first. Of a path in a bucket it is
    `beside` that, and its files are copied there, the last one to be written last.

    partial: the sibling, empty at first.

    Raises:
      FileExistsError: `path` exists and is not empty; nothing in it is touched.
    """

    def __init__(self, path: Path):
        self._path = path
        refuse_existing(path)
        path = beside(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # The locks of another host are not seen.
        mine = f".{path.name}.{socket.gethostname()}."
        for left in path.parent.glob(f"{glob.escape(mine)}*.partial"):
            with contextlib.suppress(OSError), _locked(left):  # else its process lives
                shutil.rmtree(left, ignore_errors=True)
        self.partial = path.with_name(f"{mine}{uuid.uuid4().hex[:12]}.new")
        self.partial.mkdir()
        self._locked = contextlib.ExitStack()
        with contextlib.suppress(OSError):  # a file system without locks
            self._locked.enter_context(_locked(self.partial))
            # Others find it under this name alone.
            self.partial = self.partial.rename(self.partial.with_suffix(".partial"))

    def appear(self) -> None:
        """Gives the sibling its name.

        Raises:
          FileExistsError: another process has made the same since.
        """
        if is_bucket(self._path):
            upload(self.partial, self._path)
            return
        try:
            self.partial.rename(self._path)
        except OSError:
            refuse_existing(self._path)
            raise

    def remove(self) -> None:
        """Removes the sibling, where it has not appeared; an error gets its path."""
        error = sys.exception()
        if isinstance(error, OSError) and error.errno and error.filename is None:
            error.filename = str(self._path)  # a full disk names none
        shutil.rmtree(self.partial, ignore_errors=True)
        self._locked.close()


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Holds the directory's lock; raises OSError if it is held."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def refuse_existing(directory: Path) -> None:
    """Raises FileExistsError if there is something at `directory`; or as `reach`."""
    reach(directory)
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise FileExistsError(
            f"{directory} already exists and is left as it is: remove it or choose "
            "another output"
        )


def beside(path: Path) -> Path:
    """Returns where hidden siblings of `path` are: of a bucket's, in this directory."""
    return Path(path.name) if is_bucket(path) else path


def describe_file(path: Path) -> dict[str, Any]:
    """Describes a file: its size and SHA-256."""
    with open_binary(path) as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": sha256}
