"""Builds the step that `train.py` runs, for the devices of an AOT topology.

Reads where its memory goes, and finds the largest that fits with few compilations.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import ml_collections

from kernels.backends import IMPLEMENTATIONS, choose
from tasks import task
from tasks.layout_choice import typical_rows
from tasks.memory_choice import device_bytes, saved_bytes
from tasks.run import Run
from tasks.state import abstract_frozen
from tools.lib.compiled.pods import Pod, compile_to_fit
from training.reports.metrics import StepWork

TOLERANCE = 1 / 64
"""Relative precision of the largest size that is found."""

LARGEST_GROWTH = 8
"""Largest factor from one try to the next while nothing has failed."""

TRUSTED_TRIES = 5
"""Tries after which memory is not taken for linear: bisection follows."""

MOST_TRIES = 12

MOST_TOKENS = 2**31 - 1
"""Longest context, as indices are int32."""


@dataclass(frozen=True)
class Step:
    """The training step of a config on the devices of a pod, before it is compiled.

    program: (state, batch, frozen) -> (state, metrics), jitted.
    frozen: shapes, dtypes and shardings of the parameters that are not trained.
    implementation: the attention kernel that it runs.
    documents: those packed in a row (see `typical_rows`); none for one document.
    """

    run: Run
    pod: Pod
    program: jax.stages.Wrapped
    frozen: Any
    implementation: str
    documents: tuple[int | str, ...] = ()

    @classmethod
    def of(
        cls,
        config: ml_collections.ConfigDict,
        pod: Pod,
        documents: tuple[int | str, ...] = (),
    ) -> "Step":
        """Builds the step as `train.py` does.

        Raises:
          ValueError: something in the config is wrong, or does not suit the devices.
        """
        check(config, len(pod.devices))
        run = task.make_run(config, pod.devices, typical_rows(config, documents))
        frozen = abstract_frozen(run.model, run.partition)
        kernel = _implementation(run)
        return cls(run, pod, run.train_step(), frozen, kernel, documents)

    def compile(self) -> jax.stages.Compiled:
        """Compiles and schedules the program.

        Raises:
          TooLarge: the compiler finds no program that fits.
        """
        rest = (self.frozen,) if self.frozen else ()
        arguments = self.run.state_like, self.run.batch_like, *rest
        return compile_to_fit(self.run.partition.mesh, self.program, *arguments)

    def work(self) -> StepWork:
        """Returns the work of a step whose rows are documents; without padding."""
        data = self.run.config.data
        windows = self.run.sizes.attention_windows
        pairs = [
            row.seen_within(window).pairs for row in self.run.rows for window in windows
        ]
        tokens = data.batch_rows * data.context_tokens
        return self.run.work(tokens, data.batch_rows * sum(pairs) / len(pairs))


def check(config: ml_collections.ConfigDict, devices: int | None = None) -> None:
    """Raises ValueError if the config has no step that can be planned.

    devices: number of devices, for the config's own mesh; None for any mesh.
    """
    if not 1 <= config.data.context_tokens <= MOST_TOKENS:
        raise ValueError(
            f"{config.data.context_tokens=} must be at least 1 and at most "
            f"{MOST_TOKENS}, as indices are int32"
        )
    task.check(config, devices)


def _implementation(run: Run) -> str:
    with jax.sharding.use_abstract_mesh(run.partition.mesh.abstract_mesh):
        chosen = choose(run.implementation, run.compute_dtype, run.sizes.head_dim)
    return next(name for name, it in IMPLEMENTATIONS.items() if it is chosen)


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest device, and where they come from.

    parameters: those that are not trained included. They and optimizer_state are
      exact, from shapes and shardings.
    saved: activations saved for the backward, by the formula of `saved_bytes`.
    workspace: the rest of the peak.
    peak: memory that the compiler allocates (see `peak_bytes`).
    capacity: memory of the chip.
    host: pinned memory of the host for each device: activations, and the state of an
      optimizer that is there.
    """

    parameters: int
    optimizer_state: int
    saved: int
    workspace: int
    peak: int
    capacity: int
    host: int

    @property
    def spare_share(self) -> float:
        """Free share of the chip's memory; below 0 if the step does not fit."""
        return 1 - self.peak / self.capacity

    @classmethod
    def of(cls, step: Step, compiled: jax.stages.Compiled) -> "Memory":
        """Reads the memory of a compiled step."""
        stats = compiled.memory_analysis()
        peak = peak_bytes(stats)
        state = step.run.state_like
        parameters = device_bytes((state.params, step.frozen))
        optimizer_state = device_bytes(state.optimizer_state)
        saved = saved_bytes(step.run)
        on_host = saved if step.run.config.remat == "offload" else 0
        in_host = stats.host_temp_size_in_bytes + stats.host_argument_size_in_bytes
        return cls(
            parameters=parameters,
            optimizer_state=optimizer_state,
            saved=saved - on_host,
            workspace=peak - parameters - optimizer_state - saved + on_host,
            peak=peak,
            capacity=step.pod.chip.hbm_bytes,
            host=in_host,
        )


def peak_bytes(stats: Any) -> int:
    """Returns the device memory allocated for a program, its arguments included.

    stats: of `Compiled.memory_analysis`. On TPUs `peak_memory_in_bytes` counts the
    host's memory instead of the device's where that is more, and leaves out the gaps
    between allocations, and `temp_size_in_bytes` is not what is allocated: the total
    is. Compilers that do not report it (XLA's for GPUs) allocate what they name.
    """
    total = getattr(stats, "total_allocation_bytes", 0)
    return total or (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
    )


def precision(context: int, unit: int) -> int:
    """Returns how precisely a longest context of about `context` tokens is found."""
    return max(unit, int(TOLERANCE * context))


def longest_context(
    peak_of: Callable[[int], int | None], first: int, unit: int, limit: float
) -> int:
    """Tries contexts until the longest that fits is known to within `precision`.

    Args:
      peak_of: compiles a context and returns the bytes that it takes, None if it does
        not compile. Memory is taken to be close to a line in the context: tries go to
        where the line through two of them meets the limit, and each is confirmed by
        compiling.
      first: context to begin with.
      unit: contexts are multiples of it.
      limit: bytes that a device may take.

    Returns:
      The longest that was tried and fits; 0 if none does.
    """
    low = 0
    high = math.inf
    peaks: dict[int, int] = {}
    context = max(unit, first // unit * unit)
    for tries in range(1, MOST_TRIES + 1):
        if (peak := peak_of(context)) is not None:
            peaks[context] = peak
        if peak is not None and peak <= limit:
            low = context
        else:
            high = context
        step = precision(low, unit)
        guess = _guess(peaks, context, limit)
        if high == math.inf:
            # At least a step: what the line excludes must be shown to fail.
            guess = max(min(guess, LARGEST_GROWTH * low, MOST_TOKENS), low + step)
        elif high - low <= step:
            break
        elif tries > TRUSTED_TRIES or not low < guess < high:
            guess = (low + high) / 2
        else:
            # Not next to what is known already: lines are wrong by a little.
            margin = (high - low) / 16
            guess = min(max(guess, low + margin), high - margin)
        context = max(int(guess) // unit * unit, low + unit)
        if context == high or context > MOST_TOKENS:
            break
    return low


def _guess(peaks: Mapping[int, int], last: int, limit: float) -> float:
    """Estimates the context whose memory meets the limit; last: that was tried."""
    known = sorted(peaks.items(), key=lambda tried: (abs(tried[1] - limit), -tried[0]))
    if not known:
        return last / 2
    near, peak = known[0]
    if len(known) > 1:
        far, other = known[1]
        slope = (peak - other) / (near - far)
        if slope > 0:
            return near + (limit - peak) / slope
    # In proportion: what does not grow with the context then makes the guess small.
    return near * limit / peak
