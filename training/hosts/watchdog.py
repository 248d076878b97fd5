"""Ends a run that hangs: nothing else does, as the main thread waits inside of XLA."""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, TextIO

HUNG = 70
"""Exit code: a step took too long (EX_SOFTWARE of sysexits.h). Start the run again."""

_TICK = 1.0
"""Seconds between two looks at the clock. A look that comes late counts as two ticks: a
suspended process (SIGSTOP, a scheduler) hangs no longer than it runs."""


@dataclass
class Watchdog:
    """Ends the process with `HUNG`, and the stacks of its threads, when a step hangs.

    Use it as a context manager; there can be one in a process.

    first_step_seconds: limit of what takes long once: restore, compilation, the first
      two steps, a validation, a save. 0 for none.
    step_seconds: limit of every other step, and no less than 10 times the longest; 0
      for none.
    file: takes the stacks; None for stderr.
    clock: seconds, from any origin.
    """

    first_step_seconds: float
    step_seconds: float
    file: TextIO | None = None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._begun: float | None = None
        self._longest = 0.0
        self._cancelled = threading.Event()

    def pause(self) -> None:
        """Notes that something that may take long begins."""
        self._begun = None
        self._arm(self.first_step_seconds)

    def step(self) -> None:
        """Marks that a step was dispatched, and the one before it is done."""
        now = self.clock()
        if self._begun is not None:
            self._longest = max(self._longest, now - self._begun)
        self._begun = now
        # Until a step is timed the limit is that of what takes long once. Ten times the
        # longest, so that a limit set for short steps ends no run of long ones.
        usual = self.step_seconds and max(self.step_seconds, 10 * self._longest)
        self._arm(usual if self._longest else self.first_step_seconds)

    def _arm(self, seconds: float) -> None:
        self._disarm()
        if seconds > 0:
            # With its own event: `_disarm` replaces it, and a thread that looked it up
            # late would watch a step that is not its own.
            watched = (seconds, self._cancelled)
            threading.Thread(target=self._watch, args=watched, daemon=True).start()

    def _disarm(self) -> None:
        self._cancelled.set()
        self._cancelled = threading.Event()

    def _watch(self, seconds: float, cancelled: threading.Event) -> None:
        left = seconds
        while left > 0:
            begun = self.clock()
            if cancelled.wait(min(left, _TICK)):
                return
            left -= min(self.clock() - begun, 2 * _TICK)
        self._end(seconds)

    def _end(self, seconds: float) -> None:
        file = self.file or sys.__stderr__
        line = f"error: nothing happened for {seconds:g} s, the run ends; its threads:"
        print(line, file=file, flush=True)
        if file is not None:  # as where a program has no stderr
            faulthandler.dump_traceback(file=file)
        # Not sys.exit, which ends this thread only: the main thread waits inside XLA.
        os._exit(HUNG)

    def __enter__(self) -> Self:
        self.pause()
        return self

    def __exit__(self, *_: object) -> None:
        self._disarm()
