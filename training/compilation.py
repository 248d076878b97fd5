"""Compiled programs of a run, kept for its next starts: JAX's persistent cache.

JAX's keys hold the program without its line numbers, the versions of jaxlib and of the
platform, XLA's flags and options, and the devices: kind, topology, and of CPUs their
instructions. They hold no driver and no contents of files: delete the directory after
other changes. Who may write there may run code here, as with a config.
"""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from training.workdir import make_writable, place_of

LEAST_SECONDS = 0.3
"""Programs that compile faster are not kept."""

_COMPILED = "/jax/core/compile/backend_compile_duration"
_READ = "/jax/compilation_cache/cache_retrieval_time_sec"
_FAULT = "Error (reading|writing) persistent compilation cache entry for '(.*?)': "


@dataclass
class Compilation:
    """Seconds in which XLA compiled, and how many programs were found compiled."""

    seconds: float = 0.0
    found: int = 0

    def __str__(self) -> str:
        xla = f"XLA {self.seconds:.1f} s since the start"
        return f"{xla}, {self.found} programs from earlier ones"

    def _count(self, event: str, seconds: float, **_: Any) -> None:
        if event == _COMPILED:  # the reading included
            self.seconds += seconds
        elif event == _READ:
            self.seconds, self.found = self.seconds - seconds, self.found + 1


@contextlib.contextmanager
def counted() -> Iterator[Compilation]:
    """Counts what is compiled in the block, by JAX's events."""
    found = Compilation()
    jax.monitoring.register_event_duration_secs_listener(found._count)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(found._count)


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
    with warnings.catch_warnings():
        _take_faults(directory, say)
        try:
            for name, value in settings.items():
                jax.config.update(name, value)
            yield
        finally:
            for name, value in before.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()


def _take_faults(directory: str, say: Callable[[str], None]) -> None:
    """Says what JAX warns of, once, and removes damaged files, which JAX would keep."""
    show, said = warnings.showwarning, []
    warnings.filterwarnings("always", _FAULT)

    def take(message: Warning | str, *where: Any, **more: Any) -> None:
        fault = re.match(_FAULT, str(message))
        if not fault:
            return show(message, *where, **more)
        if not said:
            said.append(fault)
            say(f"WARNING: {directory}: {message}; the run goes on without")
        if fault[1] == "reading" and jax.process_index() == 0:
            with contextlib.suppress(OSError):
                for file in place_of(directory).glob(f"{fault[2]}-*-cache"):
                    file.unlink()

    warnings.showwarning = take
