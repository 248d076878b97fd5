"""Requests to stop a run soon: SIGTERM, SIGHUP or Ctrl-C, to any of its processes."""

import os
import signal
from typing import Any, Self

import jax
from jax.experimental import multihost_utils


class Preempted(Exception):
    """A run was stopped by a request; it continues when started again."""


def hangup() -> list[signal.Signals]:
    """Returns SIGHUP, unless this process is to ignore it, as under `nohup`."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [] if is_ignored else [signal.SIGHUP]


def stop_notice() -> "SignalNotice":
    """Returns the notice for one process or for many."""
    return SharedNotice() if jax.process_count() > 1 else SignalNotice()


class SignalNotice:
    """A signal to this process, which is the only one; for the main thread only."""

    def __init__(self) -> None:
        self._requested = False
        self._handlers: dict[signal.Signals, Any] = {}

    def requested(self) -> bool:
        """Returns whether to stop: on all processes at the same call and ever after."""
        return self._requested

    def _signals(self) -> list[signal.Signals]:
        return [signal.SIGTERM, *hangup(), signal.SIGINT]

    def __enter__(self) -> Self:
        for number in self._signals():
            self._handlers[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _take(self, *_: object) -> None:
        self._requested = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)


class SharedNotice(SignalNotice):
    """A signal to any process; JAX makes all of them stop at the same call.

    JAX handles SIGTERM, so SIGHUP and Ctrl-C are forwarded as that. The call is the
    first that no process has made yet. JAX waits for exactly the number that it is
    given, so calls are counted here, from the first of the process. Steps would not do:
    a run that resumes at 1000 never makes step 1, on which processes agree that have
    made none.
    """

    _calls = 0

    def requested(self) -> bool:
        if not self._requested:
            self._calls += 1
            self._requested = multihost_utils.reached_preemption_sync_point(self._calls)
        return self._requested

    def _signals(self) -> list[signal.Signals]:
        return [*hangup(), signal.SIGINT]  # SIGTERM is JAX's

    def _take(self, *_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
