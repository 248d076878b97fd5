"""Compiled programs of a run, kept for its next starts: JAX's persistent cache.

JAX's keys hold the program without its line numbers, the versions of jaxlib and of the
platform, XLA's flags and options, and the devices: kind, topology, and of CPUs their
instructions. They hold no driver and no contents of files: delete the directory after
other changes. Digests find damage, not intent: who may write there may run code here,
as with a config.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import jax
from jax._src import compilation_cache  # the public module takes no cache of ours

from training.saved.workdir import is_bucket, make_writable, path_of

LEAST_SECONDS = 0.3
"""Programs that compile faster are not kept."""

MOST_BYTES = 2 << 30
"""Of all kept programs; the oldest go."""

_SUFFIX = "-sha256-cache"
_COMPILED = "/jax/core/compile/backend_compile_duration"
_READ = "/jax/compilation_cache/cache_retrieval_time_sec"


@dataclass
class Compilation:
    """Seconds in which XLA compiled, and how many programs were found compiled."""

    seconds: float = 0.0
    reused: int = 0

    def __str__(self) -> str:
        xla = f"XLA {self.seconds:.1f} s since the start"
        return f"{xla}, {self.reused} programs from earlier ones"

    def _count(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILED:  # the reading included
            self.seconds += duration_secs
        elif event == _READ:
            self.seconds -= duration_secs
            self.reused += 1


@contextlib.contextmanager
def counted() -> Iterator[Compilation]:
    """Counts what is compiled in the block, by JAX's events."""
    compilation = Compilation()
    jax.monitoring.register_event_duration_secs_listener(compilation._count)
    try:
        yield compilation
    finally:
        jax.monitoring.unregister_event_duration_listener(compilation._count)


@contextlib.contextmanager
def kept_in(directory: str, say: Callable[[str], None] = print) -> Iterator[None]:
    """Keeps the programs that are compiled in the block, and takes those that are kept.

    Does nothing where JAX has a directory already (JAX_COMPILATION_CACHE_DIR). The
    first process writes. Where that fails, or a file is damaged, the run goes on.

    directory: made where it is missing; local, or in a bucket.
    say: logs the first fault, in a line.
    """
    settings = {
        "jax_compilation_cache_dir": directory,
        "jax_persistent_cache_min_compile_time_secs": LEAST_SECONDS,
        # Programs hold what these would, and XLA writes to no bucket.
        "jax_persistent_cache_enable_xla_caches": "none",
    }
    before = {name: getattr(jax.config, name) for name in settings}
    if before["jax_compilation_cache_dir"]:
        yield
        return
    try:
        make_writable(directory)
    except OSError as error:
        say(f"WARNING: compiled programs are not kept: {error}")
        yield
        return
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        # JAX opens a cache once, and would go on with the one that it has.
        compilation_cache.reset_cache()
        compilation_cache._cache = Programs(directory, say)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


class Programs(compilation_cache.CacheInterface):
    """Keeps programs in files that begin with the SHA-256 of their key and contents.

    XLA runs what it reads. JAX's own files have no checksum where it compresses by
    Zstandard, and never hold the key to which they belong.

    say: logs the first fault, in a line.
    """

    def __init__(self, directory: str, say: Callable[[str], None]) -> None:
        # JAX types what is a path of etils as one of pathlib.
        self._path = cast(Path, path_of(directory))
        self._say = say
        self._has_warned = False

    # JAX's own states no type: it is taken to return nothing.
    def get(self, key: str) -> bytes | None:  # pyrefly: ignore[bad-override]
        """Returns a program as it was put; None where it is missing or damaged."""
        file = self._path / (key + _SUFFIX)
        try:
            if not file.exists():
                return None
            entry = file.read_bytes()
        except Exception as error:  # those of a bucket's package are of any kind
            return self._discard(file, f"cannot be read ({error})")
        program = entry[hashlib.sha256().digest_size :]
        if entry != _with_digest(key, program):
            return self._discard(file, "is not what was written under this name")
        return program

    def put(self, key: str, value: bytes) -> None:
        """Writes a program, in place of any other, and removes the oldest for it."""
        file = self._path / (key + _SUFFIX)
        entry = _with_digest(key, value)
        try:
            self._make_room(len(entry))
            file.write_bytes(entry)
        except Exception as error:
            self._discard(file, f"cannot be written ({error})")

    def _make_room(self, num_bytes: int) -> None:
        """Removes the oldest files, JAX's own too, until so many bytes fit."""
        files = {file: _time_and_size(file) for file in self._path.glob("*-cache")}
        total = sum(size for _, size in files.values())
        for file in sorted(files, key=files.__getitem__):
            if total + num_bytes <= MOST_BYTES:
                break
            file.unlink()
            total -= files[file][1]

    def _discard(self, file: Path, why: str) -> None:
        """Logs the first fault, and removes the file, which would fail again."""
        if not self._has_warned:
            self._has_warned = True
            self._say(f"WARNING: {file} {why}; the run goes on without")
        if jax.process_index() == 0:
            with contextlib.suppress(Exception):
                file.unlink()


def _with_digest(key: str, program: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\n" + program).digest() + program


def _time_and_size(file: Path) -> tuple[float, int]:
    """Returns when a file was written, in seconds (0: unknown), and its bytes."""
    if is_bucket(file):
        in_bucket = path_of(file).stat()
        return in_bucket.mtime, in_bucket.length
    # Not of epath, which asks for the owner's name, which a container may lack.
    status = os.stat(file)
    return status.st_mtime, status.st_size
