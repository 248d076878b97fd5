"""Directories of data: new ones appear whole or not at all."""

import contextlib
import fcntl
import glob
import hashlib
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.remote import is_bucket, open_binary, reach, upload


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Gives an empty, hidden sibling of `path`, which takes its name at the end.

    Where the block raises, it is removed. It is locked as long as its process lives.
    Those of the same `path` that killed processes of this host have left are removed
    first. Of a path in a bucket it is `beside` that, and its files are copied there,
    the last one to be written last.

    Raises:
      FileExistsError: `path` exists and is not empty, at the beginning or, of another
        process, at the end; nothing in it is touched.
    """
    refuse_existing(path)
    hidden = beside(path)
    hidden.parent.mkdir(parents=True, exist_ok=True)
    # The locks of another host are not seen.
    mine = f".{hidden.name}.{socket.gethostname()}."
    for left in hidden.parent.glob(f"{glob.escape(mine)}*.partial"):
        with contextlib.suppress(OSError), _locked(left):  # else its process lives
            shutil.rmtree(left, ignore_errors=True)
    partial = hidden.with_name(f"{mine}{uuid.uuid4().hex[:12]}.new")
    partial.mkdir()
    with contextlib.ExitStack() as lock:
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                lock.enter_context(_locked(partial))
                # Others find it under this name alone.
                partial = partial.rename(partial.with_suffix(".partial"))
            with naming_failed(path):
                yield partial
            if is_bucket(path):
                upload(partial, path)
            else:
                refuse_existing(path)
                partial.rename(path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def naming_failed(path: Path) -> Iterator[None]:
    """Names a path in the error of a write to it: a full disk names none."""
    try:
        yield
    except OSError as error:
        if error.errno and error.filename is None:
            error.filename = str(path)
        raise


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
