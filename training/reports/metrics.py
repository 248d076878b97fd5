"""Measures throughput, MFU and memory of a run."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import jax

from kernels.devices import chips


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


@dataclass
class Throughput:
    """Tokens per second and MFU between reports, without compilation and pauses.

    JAX runs ahead of Python, so call `report` only when the result of the last counted
    step is known (its loss has been fetched, say): the clock then measures device time.

    num_devices: JAX devices of all processes.
    peak_flops: FLOP/s of one device (`chips.Chip.peak_flops`); None for an unknown
      chip, which then has no MFU.
    clock: seconds, from any origin.
    """

    num_devices: int
    peak_flops: float | None
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
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
        start = self.wait(after)
        try:
            yield
        finally:
            self._excluded_seconds += self.clock() - start

    def wait(self, arrays: Any) -> float:
        """Waits for arrays, and returns the clock's time then."""
        jax.block_until_ready(arrays)
        return self.clock()

    def report(self, end: float) -> dict[str, float]:
        """Returns the rates since the last report, or {} without steps.

        The first report only starts the clock: make it after the first step, which
        compiles.

        Args:
          end: the time at which the last step counted was done, from `wait`.

        Returns:
          `perf/step_time` (seconds), `perf/tokens_per_second`,
          `perf/tokens_per_second_per_device`, and for a known chip `perf/mfu` and
          `perf/mfu_paper` (fractions of the peak).
        """
        work = self._work
        start = self._start
        excluded = self._excluded_seconds
        self._work = []
        self._start = end
        self._excluded_seconds = 0.0
        if start is None or not work:
            return {}
        seconds = end - start - excluded
        tokens_per_second = sum(step.tokens for step in work) / seconds
        rates = {
            "perf/step_time": seconds / len(work),
            "perf/tokens_per_second": tokens_per_second,
            "perf/tokens_per_second_per_device": tokens_per_second / self.num_devices,
        }
        if self.peak_flops is not None:
            available = seconds * self.num_devices * self.peak_flops
            rates["perf/mfu"] = sum(step.model_flops for step in work) / available
            rates["perf/mfu_paper"] = sum(step.paper_flops for step in work) / available
        return rates
