"""Ends a process that cannot find the others of its run, or has lost one of them."""

import contextlib
import ctypes
import os
import re
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

import jax

from training.hosts.watchdog import HUNG

LEAVE_SECONDS = 10
"""Seconds that a process with an error waits for the others to have one too."""

LOSS = re.compile("Gloo|NCCL|UNAVAILABLE|heartbeat|coordination service")
"""Pattern of errors that come of the loss of another process."""

_HANDLERS: list[Any] = []
"""Functions that C has been given, which must live as long as the process."""


def _end(say: Callable[[], str], code: int, stderr: int = 2) -> None:
    """Ends the process with a line and an exit code, without waiting for anything."""
    # Not by print: a thread that hangs may hold the lock of Python's stderr.
    line = " ".join(say().split())
    os.write(stderr, f"error: {line}\n".encode())
    os._exit(code)


def _end_at_abort(say: Callable[[], str], code: int, stderr: int = 2) -> None:
    """Lets abort() end the process as `_end` does.

    JAX calls abort() in a thread of its own if it cannot find the other processes, or
    if one of them is silent. Nothing is raised then, and the callback that JAX offers
    cannot be a Python function (std::bad_cast).
    """
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: _end(say, code, stderr))
    _HANDLERS.append(handler)
    ctypes.CDLL(None).signal(int(signal.SIGABRT), handler)


def join(process: str, **options: Any) -> None:
    """Calls `jax.distributed.initialize`; where JAX aborts, ends with 1 and a line.

    From then on the loss of another process ends this one with `HUNG` and a line.

    Args:
      process: names this process and its run in the line.
      options: of `initialize`.
    """
    stderr = os.dup(2)
    # Ctrl-C ends it at once: JAX waits where no handler of Python's runs.
    interrupted = signal.signal(signal.SIGINT, signal.SIG_DFL)
    with tempfile.TemporaryFile() as log:
        _end_at_abort(lambda: _cause(process, log), 1, stderr)
        os.dup2(log.fileno(), 2)  # JAX says why it aborts in 20 lines
        try:
            jax.distributed.initialize(**options)
        except BaseException:
            # What aborts later is no failure to find the others.
            ctypes.CDLL(None).signal(int(signal.SIGABRT), None)
            raise
        finally:
            signal.signal(signal.SIGINT, interrupted)
            os.dup2(stderr, 2)
            os.close(stderr)
            log.seek(0)
            os.write(2, log.read())
    lost = "another process of the run was lost (see the lines above, and what it said"
    _end_at_abort(lambda: f"{lost} last): start all of them again", HUNG)


def _cause(process: str, log: BinaryIO) -> str:
    log.seek(0)
    status = re.search(r"absl::Status: (.*)", log.read().decode(errors="replace"))
    return (
        f"hosts: {process}: the processes have not found each other "
        f"({status[1] if status else 'JAX says no cause'}): start all of them within "
        "config.hosts.start_seconds; each must be given the same count and coordinator,"
        " HOST:PORT of the first, and an index of its own"
    )


def leave(error: Exception) -> None:
    """Ends this process for an error; returns if it is alone, or all have errors.

    JAX would wait for the others for minutes. Where the error comes of the loss of
    another process, the exit code is `HUNG`, else 1.
    """
    if not jax.distributed.is_initialized():
        return
    if LOSS.search(str(error)):
        _end(lambda: f"another process of the run was lost: {error}", HUNG)

    def say() -> str:
        if not isinstance(error, (ArithmeticError, OSError, ValueError)):
            traceback.print_exception(error)
        return str(error)

    # Shutdown returns once the others have errors too. Where they run on it would wait
    # for minutes, which the timer ends; where one of them is lost JAX aborts.
    _end_at_abort(say, 1)
    alone = threading.Timer(LEAVE_SECONDS, _end, (say, 1))
    alone.start()
    with contextlib.suppress(RuntimeError):
        jax.distributed.shutdown()
    alone.cancel()
