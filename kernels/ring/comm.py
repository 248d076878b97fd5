"""What a device of a ring knows of it, which chunks it holds, and how it sends them."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import layout as memory_layout

from ..backends import Backend
from ..device import is_cpu, is_tpu
from ..layouts import Array, Layout
from ..masks import Visible
from ..placement import varying_over
from ..precision import Scores
from .routes import ONE_WAY, Chunk, Counted, Route, Schedule

LANES = 128
"""A TPU's memory pads the last dimension of arrays to a multiple of this."""

HEADS_FIRST = 0, 2, 1, 3
"""Order of axes (B, L, H, D) as (B, H, L, D)."""

TOKENS_LAST = 0, 2, 3, 1
"""Of the same as (B, H, D, L), in which dq is summed."""

TOKENS_SECOND = 0, 3, 1, 2
"""Of that as (B, L, H, D) again."""

UNROLLED_STEPS, UNROLLED_ON_TPU = 16, 4
"""Rings with more steps are compiled as a loop: its compile time does not grow."""

LOOP_UNROLL = 2
"""Ring steps in an iteration of that loop: keys alternate between two buffers, and are
not copied back into one."""

Pair = tuple[jax.Array, jax.Array]
Bounds = tuple[Array, Array]
Pairs = dict[int, Pair]
"""Keys and values, or their gradients, by the numbers of chunks."""
Table = tuple[Any, jax.Array]
"""What kernels read of bounds, of a backend's steps, and whether any query sees a key:
of m intervals, (m, …), or of those in each ring step, (steps, m, …)."""
Sums = tuple[list, dict[int, Any]]
"""Of each head group, its partial result or dq so far; of chunks, dk and dv."""


@dataclass(frozen=True)
class Ring:
    """Static parameters of a ring.

    axis_name: mesh axis around which keys and values travel, or axes that make up one
      ring; None for a ring of one.
    size: devices in the ring.
    layout: which indices a shard holds.
    scale: factor on the scores.
    backend: the attention step (see `backends`).
    soft_cap: scores s become soft_cap · tanh(s / soft_cap), if given.
    route: ways that keys and values take, and how far.
    """

    axis_name: str | tuple[str, ...] | None
    size: int
    layout: Layout
    scale: float
    backend: Backend
    soft_cap: float | None = None
    route: Route = ONE_WAY

    @property
    def scores(self) -> Scores:
        return Scores(self.scale, self.soft_cap)

    def shard(self) -> jax.Array | int:
        """Returns the number of the shard that this device's queries belong to."""
        return lax.axis_index(self.axis_name) if self.size > 1 else 0

    def slots(self, shard: jax.Array | int, visible: Visible, length: int) -> Bounds:
        """Returns the interval [k_start, k_end) of visible slots of a shard."""
        k_start = self.layout.count(shard, visible.k_start, self.size, length)
        k_end = self.layout.count(shard, visible.k_end, self.size, length)
        return k_start, k_end  # as visible, (m, B or 1, L)

    def shift(self, arrays: Any, shifts: int) -> Any:
        """Sends the arrays a number of devices on, or back if it is below 0."""
        pairs = [(device, (device + shifts) % self.size) for device in range(self.size)]
        arrays = lax.ppermute(_ordered(arrays, HEADS_FIRST), self.axis_name, pairs)
        return _ordered(arrays, HEADS_FIRST)

    def count(self, visible: Visible, length: int) -> jax.Array | None:
        """Counts the steps after which no device reads a shard that has not come yet.

        The same number on all devices of the ring, and of the other axes; None for a
        route whose steps are known. length: of a shard.
        """
        if self.size == 1 or not isinstance(self.route, Counted):
            return None
        shards = jnp.arange(self.size, dtype=jnp.int32)
        bounds = self.slots(shards[:, None, None, None], visible, length)
        is_read = jnp.any(jnp.less(*bounds), axis=(1, 2, 3))  # (N,)
        shifts = (self.shard() - shards) % self.size
        if self.route.both_ways:
            shifts = jnp.minimum(shifts, self.size - shifts)
        ring = (self.axis_name,) if isinstance(self.axis_name, str) else self.axis_name
        most = jnp.max(jnp.where(is_read, shifts, 0))
        axes = *(ring or ()), *self.route.other_axes
        return lax.pmax(varying_over(axes, most), axes)

    def barrier(self, arrays: Any, dq: Any = None) -> tuple[Any, Any]:
        """Returns both as they are, once all of them are computed."""
        held = _ordered(arrays, HEADS_FIRST), _ordered(dq, TOKENS_LAST)
        arrays, dq = lax.optimization_barrier(held)
        return _ordered(arrays, HEADS_FIRST), _ordered(dq, TOKENS_SECOND)

    def as_read(self, x: jax.Array) -> jax.Array:
        """Lays out (B, L, H, D) as a TPU's kernels read it: (B, H, L, D) in memory.

        D is padded to a multiple of 128, which it takes in a TPU's memory anyway. An
        array sent like this arrives like this; otherwise each ring step would transpose
        and pad it. On other devices, and in a ring of one, x is returned unchanged.
        """
        if self.size == 1 or not is_tpu():
            return x
        return self.heads_first(
            jnp.pad(x, ((0, 0),) * 3 + ((0, -x.shape[-1] % LANES),))
        )

    def heads_first(self, x: jax.Array) -> jax.Array:
        """Lays out (B, L, H, D) as (B, H, L, D) in a TPU's memory.

        Kernels may leave results as (B, H, D, L). What is made of them must not ask
        for queries like that, which would be copied before each ring.
        """
        if self.size == 1 or not is_tpu():
            return x
        layout = memory_layout.Layout(major_to_minor=(0, 2, 1, 3))
        return memory_layout.with_layout_constraint(x, layout)


@dataclass(frozen=True)
class Chunks:
    """The chunks of a ring's keys and values, on this device.

    kv: keys and values of its shard, (B, L, K, D).
    visible: key indices [k_start, k_end) of each query, (m, B or 1, L).
    """

    ring: Ring
    kv: Pair
    visible: Visible

    @property
    def length(self) -> int:
        """Tokens of a shard."""
        return self.kv[0].shape[1]

    @functools.cached_property
    def schedule(self) -> Schedule:
        heads = self.kv[0].shape[2]
        return self.ring.route.schedule(self.ring.size, heads, self.length)

    def __getitem__(self, number: int) -> Chunk:
        return self.schedule.chunks[number]

    def own(self) -> Pairs:
        """Returns the chunks of this device's shard."""
        k, v = self.kv
        parts = [(slice(*c.slots), slice(*c.heads)) for c in self.schedule.chunks]
        return {i: (k[:, *part], v[:, *part]) for i, part in enumerate(parts)}

    def group(self, number: int) -> int:
        """Returns the number of a chunk's head group."""
        return self.schedule.heads.index(self[number].heads)

    def head_groups(self, x: jax.Array, axis: int) -> list[jax.Array]:
        """Cuts an array with an axis of query heads into the head groups."""
        each = x.shape[axis] // self.kv[0].shape[2]
        ends = [each * end for _, end in self.schedule.heads]
        return jnp.split(x, ends[:-1], axis) if len(ends) > 1 else [x]

    def bounds(self, number: int, shifts: jax.Array) -> Bounds:
        """Returns the slots that queries see of the chunk `shifts` devices before."""
        chunk, route = self[number], self.ring.route
        begin, end = chunk.slots
        owner = (self.ring.shard() - shifts) % self.ring.size
        bounds = self.ring.slots(owner, self.visible, self.length)
        if isinstance(route, Counted) and route.both_ways and chunk.first:
            # Opposite shards come both ways: this one is empty.
            is_new = 2 * abs(shifts) < self.ring.size
            bounds = bounds[0], jnp.where(is_new, bounds[1], bounds[0])
        if begin == 0 and end == self.length:
            return bounds
        k_start, k_end = ((x - begin).clip(0, end - begin) for x in bounds)
        return k_start, k_end

    def table(self, number: int, prepare: Callable, is_cut: bool = False) -> Table:
        """Prepares what a chunk's kernels read of the bounds of all ring steps.

        Outside of the loop over these, which is left with transfers and kernels.

        prepare: of a backend's steps. is_cut: whether half of the local block's queries
          are put off to a step after the last.
        """
        chunk, stops = self[number], self[number].stops
        if isinstance(self.ring.route, Counted):  # as far as it may go
            stops = range(stops.start, chunk.way * self.ring.size, chunk.way)
        shifts = jnp.arange(stops.start, stops.stop, stops.step, dtype=jnp.int32)
        bounds = jax.vmap(lambda x: self.bounds(number, x))(shifts)  # (steps, m, B, L)
        if is_cut and not chunk.first:
            begin, end = chunk.slots
            own = halves((bounds[0][0], bounds[1][0]), end - begin)
            bounds = tuple(
                jnp.concatenate([early[None], x[1:], late[None]])
                for early, x, late in zip(own[0], bounds, own[1], strict=True)
            )
        is_seen = jnp.less(*bounds).any(axis=(2, 3))
        flat = (x.reshape(-1, *x.shape[2:]) for x in bounds)
        seen = jax.tree.map(
            lambda x: x.reshape(*bounds[0].shape[:2], *x.shape[1:]),
            jax.vmap(prepare)(*flat),
        )
        return seen, is_seen

    def at(
        self, tables: dict[int, Table], static_step: int, n: jax.Array | int
    ) -> dict[int, Table]:
        """Returns the tables of a step, of the chunks that it attends to.

        Those of the step after the last are of what was put off.
        """
        is_late, found = static_step > self.schedule.last, {}
        for i, chunk in enumerate(self.schedule.chunks):
            if chunk.first <= (0 if is_late else static_step) <= chunk.last:
                place = -1 if is_late else n - chunk.first
                found[i] = jax.tree.map(lambda x, at=place: x[at], tables[i])
        return found

    def passed_on(self, held: Pairs, static_step: int) -> Pairs:
        """Sends chunks to where they are attended to in the next step, if anywhere."""
        return {
            i: self.ring.shift(pair, self[i].shifts_after(static_step))
            for i, pair in held.items()
            if static_step < self[i].last
        }

    def computed(
        self,
        run: Callable,
        skip: Callable,
        now: dict[int, Table],
        held: Pairs,
        sums: Sums,
    ) -> Sums:
        """Runs kernels on sums so far; several, in a ring, as one instruction for XLA.

        Of a transfer beside several XLA believes that the last kernel will hide it, and
        would start it after the others. They are skipped where no query sees anything;
        so is each of several intervals.

        run: (number of a chunk, its keys and values, what the kernels read of an
          interval, sums of its group and its own) -> these sums.
        skip: (number, keys and values, sums) -> the same, of the form that run returns.
        """

        def each(compute: Callable, sums: Sums) -> Sums:
            groups, pairs = list(sums[0]), dict(sums[1])
            for i in now:
                g = self.group(i)
                groups[g], pairs[i] = compute(i, held[i], (groups[g], pairs.get(i)))
            return groups, pairs

        def kernels(i: int, kv: Pair, sums: tuple) -> tuple:
            tables, is_seen = now[i]
            for n in range(len(is_seen)):
                seen = jax.tree.map(lambda x, n=n: x[n], tables)
                run_one = functools.partial(run, i, kv, seen)
                if len(is_seen) == 1:
                    return run_one(sums)
                skip_one = functools.partial(skip, i, kv)
                sums = lax.cond(is_seen[n], run_one, skip_one, sums)
            return sums

        every, none = (functools.partial(each, way) for way in (kernels, skip))
        is_seen = [one for _, one in now.values()]
        if sum(map(len, is_seen)) < 2 or self.ring.size == 1:
            return every(sums)
        return lax.cond(jnp.concatenate(is_seen).any(), every, none, sums)

    def run(self, step: Callable, state: tuple, count: jax.Array | None) -> tuple:
        """Runs `state = step(static_step, n, *state)` for the ring steps n = 0, 1, …

        n may be traced: static_step is a step with the same transfers and chunks.
        count: steps after the first, where the program counts them.
        """
        if count is not None:  # static steps: the first, those between, the last
            state = step(0, 0, *state)
            state = lax.fori_loop(1, count, lambda n, state: step(1, n, *state), state)
            return step(2, count, *state)
        begin = 0
        for alone in self.schedule.distinct:
            state = _looped(begin, alone, step, state)
            state = step(alone, alone, *state)
            begin = alone + 1
        return state


def _looped(first: int, end: int, step: Callable, state: tuple) -> tuple:
    """Runs `state = step(first, n, *state)` for n < end, unrolled if these are few."""
    if end - first < (UNROLLED_ON_TPU if is_tpu() else UNROLLED_STEPS):
        for n in range(first, end):
            state = step(first, n, *state)
        return state
    return lax.scan(
        lambda state, n: (step(first, n, *state), None),
        state,
        jnp.arange(first, end, dtype=jnp.int32),
        unroll=LOOP_UNROLL,
    )[0]


def join(parts: Sequence[jax.Array], axis: int) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)


def _ordered(arrays: Any, order: tuple[int, ...]) -> Any:
    """Reorders the axes of arrays (B, L, H, D) for a CPU, and of those only.

    Elsewhere XLA orders in memory what travels as the kernels read it. On a CPU, the
    memory of what is sent, or waits at a barrier, is in the order of its axes: without
    another one each ring step would transpose what it reads and what it returns.
    """
    if not is_cpu():
        return arrays
    return jax.tree.map(lambda x: x.transpose(order) if x.ndim == 4 else x, arrays)


def halves(bounds: Bounds, length: int) -> tuple[Bounds, Bounds]:
    """Splits intervals into those of the first half of the queries, and of the second.

    bounds: (m, B, L) each, within [0, length]. The other half's are empty, at the end
    of the keys or at their start, so that bounds do not decrease along the queries.
    """
    queries = bounds[0].shape[-1]
    first = jnp.arange(queries) < queries // 2
    k_start, k_end = bounds
    early = jnp.where(first, k_start, length), jnp.where(first, k_end, length)
    late = jnp.where(first, 0, k_start), jnp.where(first, 0, k_end)
    return early, late
