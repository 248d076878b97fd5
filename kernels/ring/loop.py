"""The loop over ring steps, and the kernels of one step."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ..devices.device import is_tpu
from .chunks import BoundsTable, Chunks, Pair, Pairs, RingStep
from .routes import Schedule

UNROLLED_STEPS = 16
UNROLLED_ON_TPU = 4
"""Runs of as many alike steps are compiled as a loop: compile time does not grow."""

LOOP_UNROLL = 2
"""Ring steps in an iteration of that loop: keys alternate between two buffers, and are
not copied back into one."""

State = TypeVar("State")


def ring_loop(
    schedule: Schedule,
    take: Callable[[RingStep, State], State],
    state: State,
    count: jax.Array | None,
) -> State:
    """Runs `state = take(step, state)` for all ring steps.

    count: ring steps after the first, where the program counts them; at least one.
    """
    if count is not None:
        return _counted_loop(schedule, take, state, count)
    begin = 0
    for distinct in schedule.distinct:
        state = _run_alike(begin, distinct, take, state)
        state = take(RingStep(distinct, like=distinct), state)
        begin = distinct + 1
    return _run_alike(begin, schedule.last + 1, take, state)


def _counted_loop(
    schedule: Schedule,
    take: Callable[[RingStep, State], State],
    state: State,
    count: jax.Array,
) -> State:
    """Runs the first step, those between, and the last, which sends no keys on."""
    state = take(RingStep(0, like=0), state)
    if schedule.last > 1:
        state = lax.fori_loop(
            1, count, lambda n, state: take(RingStep(n, like=1), state), state
        )
    return take(RingStep(count, like=schedule.last), state)


def _run_alike(
    first: int, end: int, take: Callable[[RingStep, State], State], state: State
) -> State:
    """Runs steps in which the same chunks are sent: unrolled if few, else a loop."""
    if end - first < (UNROLLED_ON_TPU if is_tpu() else UNROLLED_STEPS):
        for n in range(first, end):
            state = take(RingStep(n, like=n), state)
        return state

    # The carry keeps its form, as alike steps have the same chunks under way.
    def iteration(state: State, n: jax.Array) -> tuple[State, None]:
        return take(RingStep(n, like=first), state), None

    numbers = jnp.arange(first, end, dtype=jnp.int32)
    return lax.scan(iteration, state, numbers, unroll=LOOP_UNROLL)[0]


class Sums(NamedTuple):
    """What the kernels of a pass have summed so far.

    groups: of each head group its partial result, or dq; None before the first kernel.
    chunks: dk and dv by the numbers of chunks; in the forward each is None.
    """

    groups: list[Any]
    chunks: dict[int, Any]


class ChunkSums(NamedTuple):
    """Of `Sums`, those that a kernel of a chunk goes on from."""

    of_group: Any
    of_chunk: Any


class RingPass(Protocol):
    """A pass around the ring, as `run_kernels` sees it."""

    @property
    def chunks(self) -> Chunks: ...

    def run_kernel(
        self, number: int, kv: Pair, prepared: Any, sums: ChunkSums
    ) -> ChunkSums:
        """Runs the kernel of a chunk for the bounds of one interval."""
        ...

    def skip(self, number: int, kv: Pair, sums: ChunkSums) -> ChunkSums:
        """Returns the sums as they are, in the form that `run_kernel` returns."""
        ...


def run_kernels(
    ring_pass: RingPass, rows: dict[int, BoundsTable], kv: Pairs, sums: Sums
) -> Sums:
    """Runs the kernels of a ring step: of each chunk, one for each interval.

    If several kernels follow a transfer, XLA schedules the transfer's start late, as if
    the last one alone hid it; as one conditional they count as one instruction. All are
    skipped on a device whose queries see no key of this step, and each of several
    intervals that they do not see. One kernel alone always runs, on empty bounds too.

    rows: (m, …), of the chunks that this step attends to.
    """

    def run_all(sums: Sums) -> Sums:
        for number, row in rows.items():
            run = functools.partial(_run_chunk, ring_pass, number, kv[number], row)
            sums = _with_chunk(ring_pass.chunks, number, run, sums)
        return sums

    def skip_all(sums: Sums) -> Sums:
        for number in rows:
            skip = functools.partial(ring_pass.skip, number, kv[number])
            sums = _with_chunk(ring_pass.chunks, number, skip, sums)
        return sums

    any_visible = [row.any_visible for row in rows.values()]  # (m,) each
    kernels = sum(len(intervals) for intervals in any_visible)
    if kernels < 2 or ring_pass.chunks.ring.size == 1:
        return run_all(sums)
    # Devices may take different branches: there must be no transfer in them.
    return lax.cond(jnp.concatenate(any_visible).any(), run_all, skip_all, sums)


def _run_chunk(
    ring_pass: RingPass, number: int, kv: Pair, row: BoundsTable, sums: ChunkSums
) -> ChunkSums:
    """Runs a chunk's kernel for each interval; of several, where a query sees keys."""
    intervals = len(row.any_visible)
    # One object for all intervals: JAX traces a branch once for each that it sees.
    skip = functools.partial(ring_pass.skip, number, kv)
    for interval in range(intervals):
        prepared = jax.tree.map(lambda x, m=interval: x[m], row.prepared)
        run = functools.partial(ring_pass.run_kernel, number, kv, prepared)
        if intervals == 1:
            return run(sums)
        sums = lax.cond(row.any_visible[interval], run, skip, sums)
    return sums


def _with_chunk(
    chunks: Chunks,
    number: int,
    compute: Callable[[ChunkSums], ChunkSums],
    sums: Sums,
) -> Sums:
    """Replaces the sums of a chunk and of its head group, in a copy of all."""
    group = chunks.group(number)
    before = ChunkSums(sums.groups[group], sums.chunks.get(number))
    after = compute(before)
    groups = [*sums.groups[:group], after.of_group, *sums.groups[group + 1 :]]
    return Sums(groups, sums.chunks | {number: after.of_chunk})
