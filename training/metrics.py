"""Writes TensorBoard points and console lines; measures throughput and MFU."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import jax
from tensorboard.backend.event_processing import event_accumulator, io_wrapper
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from training import chips
from training.sinks import FLUSH_SECONDS, Sink


class TensorBoardWriter(Sink):
    """Writes TensorBoard's own event files, without TensorFlow."""

    def __init__(
        self,
        directory: str | Path,
        first_step: int,
        say: Callable[[str], None] = print,
    ) -> None:
        """Starts a new event file in `directory`.

        Args:
          directory: local path, or a bucket (`gs://...`, which needs gcsfs).
          first_step: first step that this run reports. What earlier runs left in the
            directory from that step on disappears from the curves, so that a resumed
            run draws no zig-zag.
          say: logs when points are lost, as on a full disk: no run ends for
            that.
        """
        self._directory, self._first_step, self._say = directory, first_step, say
        self._writer: EventFileWriter | None = self._open()
        self._loses = False
        start = SessionLog(status=SessionLog.START)
        self._add(first_step, session_log=start)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one point to the curve of every tag; float32 is what is kept."""
        points = [
            Summary.Value(tag=tag, simple_value=float(value))
            for tag, value in values.items()
        ]
        self._add(step, summary=Summary(value=points))

    def text(self, tag: str, text: str) -> None:
        """Adds a text, which TensorBoard renders as Markdown, at the first step."""
        self._add(self._first_step, summary=text_pb(tag, text))

    def flush(self) -> None:
        """Returns when every point so far is in the file: not even SIGKILL loses it."""
        self._try(lambda writer: writer.flush())

    def close(self) -> None:
        """Flushes, and closes the file."""
        self._try(lambda writer: writer.close())

    def _add(self, step: int, **what: Any) -> None:
        event = Event(wall_time=time.time(), step=step, **what)
        self._try(lambda writer: writer.add_event(event))

    def _try(self, write: Callable[[EventFileWriter], None]) -> None:
        """Writes, after a failure to a new file; logs the first failure in a row."""
        try:
            self._writer = self._writer or self._open()
            write(self._writer)
            self._loses = False
        except OSError as error:
            self._writer = None
            if not self._loses:
                self._say(f"WARNING: points of {self._directory} are lost: {error}")
            self._loses = True

    def _open(self) -> EventFileWriter:
        # By default every 120 s.
        return EventFileWriter(str(self._directory), flush_secs=FLUSH_SECONDS)


def run_directory(directory: str, workdir: str) -> str:
    """Gives the folder of a run's curves, whose name is what TensorBoard calls it.

    That of its workdir; or, where curves are there, the folder that they are in, as the
    workdir may have been moved since.

    directory: that TensorBoard is given.
    """
    there = list(io_wrapper.GetLogdirSubdirectories(directory))
    name = Path(workdir).absolute().name or "run"
    return there[0] if len(there) == 1 else f"{directory}/{name}"


def read_scalars(directory: str | Path) -> dict[str, list[tuple[int, float]]]:
    """Reads the curves of a run as TensorBoard shows them, every point of them.

    directory: that TensorBoard is given: it, or one folder below, holds the run.

    Returns:
      For each tag its (step, value) pairs in the order written.

    Raises:
      FileNotFoundError: if a local `directory` does not exist.
      ValueError: there are several runs below it.
    """
    if "://" not in str(directory) and not Path(directory).is_dir():
        raise FileNotFoundError(f"no directory {directory} to read event files from")
    runs = sorted(io_wrapper.GetLogdirSubdirectories(str(directory)))
    if len(runs) > 1:
        raise ValueError(f"{directory} holds several runs: give one of {runs}")
    accumulator = event_accumulator.EventAccumulator(
        *runs or [str(directory)], size_guidance={event_accumulator.SCALARS: 0}
    ).Reload()
    return {
        tag: [(point.step, point.value) for point in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def peak_bytes() -> int | None:
    """Returns the peak memory of this host's devices since the process began.

    None where devices do not say.
    """
    stats = [device.memory_stats() for device in jax.local_devices()]
    return max((each["peak_bytes_in_use"] for each in stats if each), default=None)


@dataclass(frozen=True)
class StepWork:
    """Work of one training step, over all devices.

    Attributes:
      tokens: real tokens; padding does not count.
      model_flops: matrix products of forward and backward, causal attention counted in
        half; recomputation is not counted.
      paper_flops: by the formula of Ring Attention, appendix C: attention in full.
    """

    tokens: int
    model_flops: float
    paper_flops: float


class Throughput:
    """Tokens per second and MFU between reports, without compilation and pauses.

    JAX runs ahead of Python, so call `report` only when the result of the last counted
    step is known (its loss has been fetched, say): the clock then measures device time.
    """

    def __init__(
        self,
        *,
        num_devices: int,
        peak_flops: float | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Starts in the state "nothing measured yet".

        Args:
          num_devices: JAX devices of all processes.
          peak_flops: FLOP/s of one device (`chips.Chip.peak_flops`); None for an
            unknown chip, which then has no MFU.
          clock: seconds, from any origin.

        Raises:
          ValueError: if `num_devices` or `peak_flops` is not positive.
        """
        if num_devices < 1 or (peak_flops is not None and not peak_flops > 0):
            raise ValueError(
                f"{num_devices=} {peak_flops=}: both must be positive; an unknown chip"
                " has the peak None"
            )
        self._num_devices = num_devices
        self._peak_flops = peak_flops
        self._clock = clock
        self._start: float | None = None
        self._excluded_seconds = 0.0
        self._work: list[StepWork] = []

    @classmethod
    def of(cls, devices: Sequence[jax.Device]) -> Self:
        """Measures the rates of these devices."""
        chip = chips.find(devices[0].device_kind)
        peak_flops = chip.peak_flops if chip else None
        return cls(num_devices=len(devices), peak_flops=peak_flops)

    def count(self, work: StepWork) -> None:
        """Counts one step that was dispatched to the devices."""
        self._work.append(work)

    @contextmanager
    def exclude(self, after: Any = None) -> Iterator[None]:
        """Stops the clock for the block: a validation, the blocking part of a save.

        Args:
          after: arrays of the last counted step. They are waited for first, since work
            that is still under way belongs to the steps and not to the pause.
        """
        jax.block_until_ready(after)
        start = self._clock()
        try:
            yield
        finally:
            self._excluded_seconds += self._clock() - start

    def report(self) -> dict[str, float]:
        """Returns the rates since the last report, or {} without steps.

        The first report only starts the clock: make it after the first step, which
        compiles.

        Returns:
          `perf/step_time` (seconds), `perf/tokens_per_second`,
          `perf/tokens_per_second_per_device`, and for a known chip `perf/mfu` and
          `perf/mfu_paper` (fractions of the peak).
        """
        now, work, start = self._clock(), self._work, self._start
        excluded, self._excluded_seconds = self._excluded_seconds, 0.0
        self._start, self._work = now, []
        if start is None or not work:
            return {}
        seconds = now - start - excluded
        tokens_per_second = sum(step.tokens for step in work) / seconds
        rates = {
            "perf/step_time": seconds / len(work),
            "perf/tokens_per_second": tokens_per_second,
            "perf/tokens_per_second_per_device": tokens_per_second / self._num_devices,
        }
        if self._peak_flops is not None:
            available = seconds * self._num_devices * self._peak_flops
            rates["perf/mfu"] = sum(step.model_flops for step in work) / available
            rates["perf/mfu_paper"] = sum(step.paper_flops for step in work) / available
        return rates


@dataclass(frozen=True)
class ConsoleLine:
    """One line on the state of the run; `str` formats it.

    Attributes:
      step: updates made.
      total_steps: updates of the whole run.
      loss: mean over the step's tokens, in the unit of the task.
      grad_norm: global norm before clipping.
      learning_rate: of this step.
      rates: what `Throughput.report` gave; parts it does not hold are left out.
    """

    step: int
    total_steps: int
    loss: float
    grad_norm: float
    learning_rate: float
    rates: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        width = len(str(self.total_steps))
        parts = [
            f"step {self.step:{width}d}/{self.total_steps}",
            f"loss {self.loss:.4f}",
            f"grad {self.grad_norm:.3g}",
            f"lr {self.learning_rate:.1e}",
        ]
        if "perf/tokens_per_second" in self.rates:
            parts.append(f"{_short(self.rates['perf/tokens_per_second'])} tok/s")
        if "perf/mfu" in self.rates:
            parts.append(f"MFU {100 * self.rates['perf/mfu']:.1f} %")
        if "perf/step_time" in self.rates:
            remaining_steps = self.total_steps - self.step
            seconds = remaining_steps * self.rates["perf/step_time"]
            parts.append(f"ETA {_hours(seconds)}")
        return "  ".join(parts)


def _short(number: float) -> str:
    """Formats with one decimal and a prefix: 950.0, 41.2k, 3.4M."""
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        # Half a last digit early, so that 999 999 is 1.0M and not 1000.0k.
        if number >= 0.99995 * size:
            return f"{number / size:.1f}{prefix}"
    return f"{number:.1f}"


def _hours(seconds: float) -> str:
    """Formats h:mm:ss; days are hours too, so that lines of one run compare."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}"
