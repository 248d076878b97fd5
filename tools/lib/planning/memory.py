"""Reads where the memory of a compiled training step goes."""

import math
from dataclasses import dataclass
from typing import Any

import jax

from tasks.run import Run
from tools.lib.planning.step import Step
from training.mesh import HOST_MEMORY

SPARE_SHARE = 0.05
"""Share of a chip's memory that a plan should leave free for the runtime."""


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


def device_bytes(tree: Any) -> int:
    """Returns the bytes that a tree of shapes with shardings takes of a device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if leaf.sharding.memory_kind != HOST_MEMORY
    )


def saved_bytes(run: Run) -> int:
    """Returns the bytes of activations that a device saves for the backward."""
    return run.kept.of(run.execution)
