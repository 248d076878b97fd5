"""Accounts for the time of a run, over all its starts, and its share of progress."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.workdir import replace_text

KINDS = "setup", "restore", "compile", "data", "step", "save", "evaluation", "lost"
"""`lost` are steps that a later start had to make again; only `step` is progress."""

TAGS = (*(f"goodput/{kind}_seconds" for kind in KINDS), "goodput/fraction")
"""TensorBoard tags: seconds of each kind, and the fraction that was progress."""

MOST_SECONDS = 1e12
"""Largest seconds and steps of a record; larger ones are not of a run."""


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
        self._kind, self._since = "setup", self.clock()
        self._record: Path | None = None
        self._recorded = -self.record_every_seconds
        self._steps = 0
        self._earlier = 0.0  # seconds of steps at earlier starts

    def switch(self, kind: str) -> str:
        """Counts the time from now on as `kind`; gives the kind before."""
        now = self.clock()
        self.seconds[self._kind] += now - self._since
        before, self._kind, self._since = self._kind, kind, now
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
        self, record: Path, first_step: int, say: Callable[[str], None] = print
    ) -> None:
        """Takes over what earlier starts have recorded, and records there.

        Args:
          record: the file, there or not. One that cannot be read is logged and
            left out, as it is of no weight for the run itself.
          first_step: updates that the run has made where it goes on.
          say: logs that line.
        """
        self._record = record
        if first_step == 0:
            return
        try:
            earlier = _read(record)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            say(f"{record} is left out of the goodput: {error}")
            return
        lost = max(0, earlier["step"] - first_step) * earlier["seconds_per_step"]
        lost = min(lost, earlier["seconds"]["step"])
        for kind in KINDS:
            self.seconds[kind] += earlier["seconds"][kind]
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
        """Returns the values of the curves of TAGS."""
        self.switch(self._kind)
        values = *self.seconds.values(), self._fraction
        return dict(zip(TAGS, values, strict=True))

    def __str__(self) -> str:
        self.switch(self._kind)
        parts = ", ".join(f"{k} {s:.1f}" for k, s in self.seconds.items() if s >= 0.05)
        total = sum(self.seconds.values())
        return f"goodput {100 * self._fraction:.1f} % of {total:.1f} s ({parts})"

    @property
    def _fraction(self) -> float:
        return self.seconds["step"] / max(sum(self.seconds.values()), 1e-9)


def _read(record: Path) -> dict[str, Any]:
    """Reads what `Goodput.record` wrote.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is something else, or a number is out of range.
    """
    try:
        values = json.loads(record.read_bytes())
        seconds = {kind: values["seconds"][kind] for kind in KINDS}
        numbers = [*seconds.values(), values["step"], values["seconds_per_step"]]
        if not all(0 <= x < MOST_SECONDS for x in numbers):
            raise ValueError("a time out of range")
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"it is not a record ({error!r})") from error
    return values | {"seconds": seconds}
