"""The directory of a run: its lock, and files in it, also in a bucket."""

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import jax
from etils import epath

from training.hosts.processes import tell_all

LOCK = "lock"
"""Name of the lock file; it remains after a run that was killed."""

UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""Errors of file systems that cannot lock."""


def path_of(directory: str | Path) -> epath.Path:
    """Returns the path of a directory, local or in a bucket (`gs://...`).

    Raises:
      ImportError: it is in a bucket, and the package that reads it is missing.
    """
    return epath.Path(directory)


def replace_text(path: Path | epath.Path, text: str) -> None:
    """Writes a file whole or not at all, in place of any earlier one.

    Raises:
      OSError: it cannot be written; what was there before still is.
    """
    # Renamed when it is whole: a run that is killed meanwhile leaves the old file.
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_text(text)
        new.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk names none
        raise


def make_writable(directory: str | Path) -> None:
    """Makes a directory where it is missing.

    directory: a bucket (`gs://...`) needs none, and is passed over.

    Raises:
      OSError: it cannot be made, or files in it cannot.
    """
    if is_bucket(directory):
        return
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise OSError(f"nothing can be written to {directory}: {error}") from error


@contextlib.contextmanager
def locked(directory: str, say: Callable[[str], None] = print) -> Iterator[None]:
    """Keeps a run's directory for this process until it leaves, or ends in any way.

    Two runs in one directory would delete each other's checkpoints. The operating
    system holds the lock: a run that was killed leaves none behind.

    Args:
      directory: made where it is missing. Buckets cannot be locked, nor can some shared
        file systems: that is a warning, no error.
      say: takes the warning.

    Raises:
      ValueError: it has no name, or one that a shell would have changed; or another
        run holds it, named by its process, its host and its start.
      OSError: nothing can be written there.
    """
    if not directory.strip() or directory.startswith("~"):
        raise ValueError(
            f"config.workdir={directory!r} must be the path of a directory, as in "
            'runs/mine; "~" is not replaced there'
        )
    if is_bucket(directory):
        say(
            f"WARNING: {directory} is a bucket, so not locked: start no other run in it"
        )
        yield
        return
    make_writable(directory)
    path = Path(directory) / LOCK
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(_take(path, say))
            stack.callback(path.unlink, missing_ok=True)  # while locked: see _take
            file.truncate(0)
            since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
            holder = f"process {os.getpid()} on {socket.gethostname()}"
            file.write(f"{holder} since {since}\n")
            file.flush()
        except OSError as error:
            raise OSError(f"nothing can be written to {path}: {error}") from error
        yield


def check_shared(directory: str) -> None:
    """Refuses a directory that is not the same on all processes of a run.

    All of them must call this, the first while it holds the lock. Buckets pass.

    Raises:
      ValueError: a process does not see the lock of the first; on all of them alike.
    """
    if jax.process_count() == 1 or is_bucket(directory):
        return
    path = Path(directory) / LOCK

    def locks() -> list[str]:
        return tell_all(path.read_text() if path.is_file() else "")

    # Twice: in the first round a process may look before the first one has locked.
    first = locks()[0]
    if others := [index for index, lock in enumerate(locks()) if lock != first]:
        raise ValueError(
            f"config.workdir={directory} on process {others[0]} is not the directory "
            "that process 0 has locked: give one that all hosts share, or a bucket "
            "(gs://BUCKET/RUN)"
        )


def _take(path: Path, say: Callable[[str], None]) -> TextIO:
    """Opens and locks the file at a path; it still lies there once it is locked."""
    while True:
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                file.seek(0)
                holder = file.read().strip() or "which has just begun"
            raise ValueError(
                f"config.workdir={path.parent} is in use by another run, {holder}: "
                "wait for its end, stop it, or use another config.workdir"
            ) from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                file.close()
                raise
            say(f"WARNING: {path} cannot be locked ({error}): start no other run there")
            return file
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()  # its holder has removed it since we opened it


def is_bucket(directory: str | Path) -> bool:
    """Returns whether a path is in a bucket."""
    return "://" in str(directory)
