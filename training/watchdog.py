"""Ends a run that hangs: nothing else does, as the main thread waits inside of XLA."""

import faulthandler
import sys
import time
from collections.abc import Callable
from typing import Self, TextIO


class Watchdog:
    """Ends the process with code 1, and the stacks of its threads, when a step hangs.

    Use it as a context manager; there can be one in a process.
    """

    def __init__(
        self,
        first_step_seconds: float,
        step_seconds: float,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Sets the limits; 0 is no limit.

        Args:
          first_step_seconds: for what takes long once: restore, compilation, the first
            two steps, a validation, a save.
          step_seconds: for every other step; but no less than 10 times the longest.
          file: takes the stacks; None for stderr.
          clock: seconds, from any origin.
        """
        self._first, self._usual = first_step_seconds, step_seconds
        self._file = file or sys.__stderr__
        self._clock = clock
        self._begun: float | None = None
        self._longest = 0.0

    def pause(self) -> None:
        """Something that may take long begins."""
        self._begun = None
        self._arm(self._first)

    def step(self) -> None:
        """A step was handed to the devices, and the one before it is made."""
        now = self._clock()
        if self._begun is not None:
            self._longest = max(self._longest, now - self._begun)
        self._begun = now
        usual = self._usual and max(self._usual, 10 * self._longest)
        self._arm(usual if self._longest else self._first)

    def _arm(self, seconds: float) -> None:
        faulthandler.cancel_dump_traceback_later()
        if seconds:
            faulthandler.dump_traceback_later(seconds, exit=True, file=self._file)

    def __enter__(self) -> Self:
        self.pause()
        return self

    def __exit__(self, *_: object) -> None:
        faulthandler.cancel_dump_traceback_later()
