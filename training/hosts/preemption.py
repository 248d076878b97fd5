"""Requests to stop a run soon: SIGTERM, SIGHUP or Ctrl-C, to any of its processes."""

import os
import signal
from typing import Any, Self

import jax
from jax.experimental import multihost_utils


class Preempted(Exception):
    """A run was stopped by a request; it continues when started again."""


def stop_notice() -> "SignalNotice":
    """Returns the notice for one process or for many."""
    return SharedNotice() if jax.process_count() > 1 else SignalNotice()


class SignalNotice:
    """A signal to this process, which is the only one; for the main thread only."""

    _signals: tuple[signal.Signals, ...] = signal.SIGTERM, signal.SIGHUP, signal.SIGINT

    def __init__(self) -> None:
        self._requested = False
        self._handlers: dict[signal.Signals, Any] = {}

    def requested(self) -> bool:
        """Returns whether to stop: on all processes at the same call and ever after."""
        return self._requested

    def __enter__(self) -> Self:
        for number in self._signals:
            # Under `nohup` a process is to ignore SIGHUP.
            if (number, signal.getsignal(number)) != (signal.SIGHUP, signal.SIG_IGN):
                self._handlers[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _take(self, *_: object) -> None:
        self._requested = True
        # A second Ctrl-C ends the run at once.
        signal.signal(signal.SIGINT, signal.SIG_DFL)


class SharedNotice(SignalNotice):
    """A signal to any process; JAX makes all of them stop at the same call.

    JAX handles SIGTERM, so SIGHUP and Ctrl-C are forwarded as that. All processes stop
    at the first call that none of them has made yet. JAX waits for exactly the number
    that it is given, so calls are counted here, from the first of the process. Numbers
    of steps would not do: processes that have made no step agree on step 1, which a run
    that resumes at 1000 never makes.
    """

    _signals = signal.SIGHUP, signal.SIGINT  # SIGTERM is JAX's
    _calls = 0

    def requested(self) -> bool:
        if not self._requested:
            self._calls += 1
            self._requested = multihost_utils.reached_preemption_sync_point(self._calls)
        return self._requested

    def _take(self, *_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
