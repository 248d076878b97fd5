"""Notices that a run is to stop soon: SIGTERM, to one process or to any of many."""

import os
import signal
from typing import Any, Protocol, Self

import jax
from jax.experimental import multihost_utils


class Preempted(Exception):
    """A run that has stopped because it was told to; it goes on when started again."""


class Notice(Protocol):
    """Says whether the run is to stop; a context manager."""

    def arrived(self) -> bool:
        """Whether to stop here: on all processes at the same call, and ever after."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def notice() -> Notice:
    """The kind of notice for as many processes as there are."""
    return SharedNotice() if jax.process_count() > 1 else SignalNotice()


class SignalNotice:
    """A signal to this process, which is the only one; for the main thread only."""

    def __init__(self) -> None:
        self._arrived = False
        self._handlers: dict[signal.Signals, Any] = {}

    def arrived(self) -> bool:
        return self._arrived

    def __enter__(self) -> Self:
        for number in signal.SIGTERM, signal.SIGINT:
            self._handlers[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _take(self, *_: object) -> None:
        self._arrived = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)


class SharedNotice:
    """A signal to any process: JAX tells the others, and agrees with them on a call.

    Of signals it knows SIGTERM, so Ctrl-C is handed on as that.

    That is the first one that no process has made yet. JAX counts by the number that it
    is given, and waits for exactly that one: so calls are counted here, from the first
    of the process. Steps would not do: a run that resumes at 1000 never makes step 1,
    on which processes agree that have made none.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._arrived = False
        self._handler: Any = signal.SIG_DFL

    def arrived(self) -> bool:
        if not self._arrived:
            self._calls += 1
            self._arrived = multihost_utils.reached_preemption_sync_point(self._calls)
        return self._arrived

    def __enter__(self) -> Self:
        self._handler = signal.signal(signal.SIGINT, self._hand_on)
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves SIGTERM to JAX."""
        signal.signal(signal.SIGINT, self._handler)

    def _hand_on(self, *_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
