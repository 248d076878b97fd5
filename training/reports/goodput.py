"""Accounts for the time of a run, over all its starts, and its share of progress."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from etils import epath

from training.saved.workdir import replace_text

KINDS = "setup", "restore", "compile", "data", "step", "save", "evaluation", "lost"
"""`lost` are steps that a later start had to make again; only `step` is progress."""


@dataclass
class Goodput:
    """Divides the time of a process among KINDS; each second counts once.

    A record beside the checkpoints carries the sums from one start of the run to the
    next. Times between starts, when nothing runs, are not counted. The first second is
    of `setup`.

    clock: seconds, from any origin.
    record_every_seconds: least time between two records.
    """

    clock: Callable[[], float] = time.monotonic
    record_every_seconds: float = 15.0

    def __post_init__(self) -> None:
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self._kind = "setup"
        self._since = self.clock()
        self._record: Path | epath.Path | None = None
        self._recorded = -self.record_every_seconds
        self._steps = 0
        self._earlier = 0.0  # seconds of steps at earlier starts

    def switch(self, kind: str) -> str:
        """Counts the time from now on as `kind`; gives the kind before."""
        now = self.clock()
        self.seconds[self._kind] += now - self._since
        before = self._kind
        self._kind = kind
        self._since = now
        return before

    @contextlib.contextmanager
    def spend(self, kind: str) -> Iterator[None]:
        """Counts the time of the block as `kind`."""
        before = self.switch(kind)
        try:
            yield
        finally:
            self.switch(before)

    def resume(
        self,
        record: Path | epath.Path,
        first_step: int,
        say: Callable[[str], None] = print,
    ) -> None:
        """Takes over what earlier starts have recorded, and records there.

        Args:
          record: the file, there or not. One that cannot be read is logged and
            left out, as the run itself does not need it.
          first_step: updates that the run has made where it goes on.
          say: logs that line.
        """
        self._record = record
        if first_step == 0:
            return
        try:
            earlier = json.loads(record.read_bytes())
            lost = max(0, earlier["step"] - first_step) * earlier["seconds_per_step"]
            seconds = {kind: float(earlier["seconds"][kind]) for kind in KINDS}
        except FileNotFoundError:
            return
        except (OSError, ValueError, LookupError, TypeError) as error:
            say(f"{record} is left out of the goodput, as no record: {error!r}")
            return
        # No more than there were: those of a start on faster chips took less each.
        lost = min(lost, seconds["step"])
        for kind in KINDS:
            self.seconds[kind] += seconds[kind]
        self.seconds["step"] -= lost
        self.seconds["lost"] += lost
        self._earlier = self.seconds["step"]

    def step(self, step: int) -> None:
        """Counts a step, and records now and then how far the run is."""
        self._steps += 1
        if self.clock() - self._recorded >= self.record_every_seconds:
            self._recorded = self.clock()
            self.record(step)

    def record(self, step: int) -> None:
        """Writes down how far the run is, and where its time went."""
        if self._record is None:
            return
        self.switch(self._kind)
        each = (self.seconds["step"] - self._earlier) / max(self._steps, 1)
        values = {"step": step, "seconds_per_step": each, "seconds": self.seconds}
        with contextlib.suppress(OSError):  # as on a full disk
            replace_text(self._record, json.dumps(values))

    def points(self) -> dict[str, float]:
        """Returns the seconds of each kind, and the fraction that was progress."""
        self.switch(self._kind)
        seconds = {f"wall_time/{kind}_seconds": x for kind, x in self.seconds.items()}
        return seconds | {"wall_time/goodput": self._fraction}

    def __str__(self) -> str:
        self.switch(self._kind)
        parts = ", ".join(f"{k} {s:.1f}" for k, s in self.seconds.items() if s >= 0.05)
        total = sum(self.seconds.values())
        return f"goodput {100 * self._fraction:.1f} % of {total:.1f} s ({parts})"

    @property
    def _fraction(self) -> float:
        return self.seconds["step"] / max(sum(self.seconds.values()), 1e-9)
