"""The chunks of a ring's keys and values on one device: cut, bounds, sends, sums.

A chunk (see `routes`) is known by its number in the schedule. A device keeps what it
has of the chunks in dictionaries by these numbers, so that a loop over ring steps
carries only the chunks that are under way. Letters of shapes: see `attend`.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ..masks import Visible
from .comm import Ring
from .routes import Chunk, Counted, Schedule

Steps = TypeVar("Steps")
"""Forward or backward steps of a backend."""

Pair = tuple[jax.Array, jax.Array]
"""Keys and values (B, slots, heads, D) of a chunk, or their gradients dk and dv."""

Pairs = dict[int, Pair]
"""The same by the numbers of chunks."""


class RingStep(NamedTuple):
    """A step of a ring.

    number: 0, 1, …; may be traced. It picks the rows of tables of bounds.
    like: a step that sends the same keys and gradients and attends to the same chunks,
      known while tracing, as these make the program.
    """

    number: jax.Array | int
    like: int

    @property
    def next(self) -> "RingStep":
        return RingStep(self.number + 1, self.like + 1)


class BoundsTable(NamedTuple):
    """What kernels read of the bounds of a chunk.

    Leading axes: ring steps and intervals, (steps, m, …); of one step, (m, …).

    prepared: arrays of a backend's steps (`prepare`).
    any_visible: bool, whether any query of this device sees a key.
    """

    prepared: Any
    any_visible: jax.Array

    def row(self, index: jax.Array | int) -> "BoundsTable":
        """Returns the part at an index of the first axis."""
        return jax.tree.map(lambda x: x[index], self)


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
        """Slots of a shard."""
        return self.kv[0].shape[1]

    @functools.cached_property
    def schedule(self) -> Schedule:
        heads = self.kv[0].shape[2]
        return self.ring.route.schedule(self.ring.size, heads, self.length)

    def __getitem__(self, number: int) -> Chunk:
        return self.schedule.chunks[number]

    @functools.cached_property
    def own(self) -> Pairs:
        """Returns the chunks of this device's own shard."""
        k, v = self.kv
        pairs = {}
        for number, chunk in enumerate(self.schedule.chunks):
            slots = slice(*chunk.slots)
            heads = slice(*chunk.heads)
            part = slice(None), slots, heads
            pairs[number] = k[part], v[part]
        return pairs

    @property
    def are_alike(self) -> bool:
        """Returns whether all chunks have the same number of slots."""
        return len({len(range(*chunk.slots)) for chunk in self.schedule.chunks}) == 1

    @property
    def has_one_kernel(self) -> bool:
        """Returns whether one kernel computes all, so that nothing is added to it."""
        return self.ring.size == 1 and len(self.visible.k_start) == 1

    def group(self, number: int) -> int:
        """Returns the number of a chunk's head group."""
        return self.schedule.heads.index(self[number].heads)

    def split_heads(self, x: jax.Array, axis: int) -> list[jax.Array]:
        """Cuts an array with an axis of query heads into the head groups."""
        if len(self.schedule.heads) == 1:
            return [x]
        queries_of_key = x.shape[axis] // self.kv[0].shape[2]
        ends = [queries_of_key * end for _, end in self.schedule.heads]
        return jnp.split(x, ends[:-1], axis)

    # Bounds: everything here is computed before the loop over ring steps, which is left
    # with transfers and kernels.

    def bounds(self, number: int, shifts: jax.Array) -> Visible:
        """Returns the slots that queries see of a chunk of another device.

        shifts: devices from the chunk's own one to this one, below 0 the other way.

        Returns:
          Intervals (m, B or 1, L) within the chunk's slots.
        """
        chunk = self[number]
        route = self.ring.route
        owner = (self.ring.shard() - shifts) % self.ring.size
        k_start, k_end = self.ring.slots(owner, self.visible, self.length)
        if isinstance(route, Counted) and route.both_ways and chunk.first:
            # The opposite shard comes both ways: counted twice, it would be summed
            # twice. Here the interval is empty.
            is_new = 2 * abs(shifts) < self.ring.size
            k_end = jnp.where(is_new, k_end, k_start)
        begin, end = chunk.slots
        if (begin, end) == (0, self.length):
            return Visible(k_start, k_end)
        # Intervals beside the chunk become empty at its edges, so that bounds still do
        # not decrease.
        return Visible(
            (k_start - begin).clip(0, end - begin),
            (k_end - begin).clip(0, end - begin),
        )

    def table(
        self, number: int, prepare: Callable, defers: bool = False
    ) -> BoundsTable:
        """Prepares what a chunk's kernels read of the bounds of all ring steps.

        prepare: of a backend's steps. defers: whether the local block's queries are cut
          into halves, of which the second has a row of its own behind the last step's.

        Returns:
          A table with axes (steps, m, …), from the chunk's first stop on.
        """
        chunk = self[number]
        stops = chunk.stops
        shifts = jnp.arange(stops.start, stops.stop, stops.step, dtype=jnp.int32)
        # (steps, m, B or 1, L) each.
        bounds = jax.vmap(lambda x: self.bounds(number, x))(shifts)
        if defers and chunk.first == 0:
            begin, end = chunk.slots
            local = Visible(bounds.k_start[0], bounds.k_end[0])  # (m, B or 1, L)
            early, late = halves(local, end - begin)
            # (steps + 1, m, B or 1, L): the late half comes after the last step's row,
            # where `rows` takes it as row -1.
            bounds = Visible(
                jnp.concatenate(
                    [early.k_start[None], bounds.k_start[1:], late.k_start[None]]
                ),
                jnp.concatenate(
                    [early.k_end[None], bounds.k_end[1:], late.k_end[None]]
                ),
            )
        k_start, k_end = bounds
        any_visible = jnp.less(k_start, k_end).any(axis=(2, 3))  # (steps, m)
        steps_and_intervals = k_start.shape[:2]
        # One axis for both, (steps · m, B or 1, L): `prepare` takes bounds (B or 1, L).
        prepared = jax.vmap(prepare)(
            k_start.reshape(-1, *k_start.shape[2:]), k_end.reshape(-1, *k_end.shape[2:])
        )
        prepared = jax.tree.map(
            lambda x: x.reshape(*steps_and_intervals, *x.shape[1:]), prepared
        )
        return BoundsTable(prepared, any_visible)

    def rows(
        self, tables: dict[int, BoundsTable], step: RingStep
    ) -> dict[int, BoundsTable]:
        """Returns the rows (m, …) of a step, of the chunks that it attends to.

        Those of the step after the last one are of the queries that were put off.
        """
        is_after_last = step.like > self.schedule.last
        rows = {}
        for number, chunk in enumerate(self.schedule.chunks):
            if is_after_last and chunk.first == 0:
                rows[number] = tables[number].row(-1)
            elif chunk.first <= step.like <= chunk.last:
                # Row 0 is of the first stop, in step 1 if the chunk only visits others.
                rows[number] = tables[number].row(step.number - chunk.first)
        return rows

    # Sends.

    def send_on(self, kv: Pairs, step: RingStep) -> Pairs:
        """Sends chunks to where they are attended to in the next step, if anywhere."""
        arriving = {}
        for number, pair in kv.items():
            if step.like < self[number].last:
                shifts = self[number].shifts_after(step.like)
                arriving[number] = self.ring.shift(pair, shifts)
        return arriving

    def send_gradients(
        self, dkv: Pairs, step: RingStep, count: jax.Array | None
    ) -> Pairs:
        """Sends dk and dv of the step before to the next stop, or to their owner.

        count: ring steps after the first, where the program counts them.
        """
        before = step.like - 1
        sent = {}
        returning = {}
        for number, pair in dkv.items():
            chunk = self[number]
            # What step n adds leaves in step n + 1: nothing in step 0, and in the step
            # after its last stop a chunk's dk and dv go home.
            is_begun = before >= 0
            is_home = chunk.last == 0 or before > chunk.last
            if not is_begun or is_home:
                continue
            if before < chunk.last:
                sent[number] = self.ring.shift(pair, chunk.shifts_after(before))
            elif count is None:
                # One transfer over several devices, and not a step for each of them.
                sent[number] = self.ring.shift(pair, -chunk.stops[-1])
            else:
                # A transfer's distance must be known while tracing, and this is not.
                returning[number] = pair
        if count is not None and returning:
            sent |= self._send_home(returning, count)
        return sent

    def _send_home(self, dkv: Pairs, count: jax.Array) -> Pairs:
        """Sends dk and dv home from device to device, the shorter way round."""
        # One of the two loops has no rounds. All devices run as many, as count is the
        # same on all of them: otherwise their transfers would wait for each other.
        back = jnp.where(2 * count <= self.ring.size, count, 0)
        on = jnp.where(2 * count <= self.ring.size, 0, self.ring.size - count)
        dkv = lax.fori_loop(0, back, lambda _, dkv: self._one_device_on(dkv, -1), dkv)
        return lax.fori_loop(0, on, lambda _, dkv: self._one_device_on(dkv, 1), dkv)

    def _one_device_on(self, dkv: Pairs, sign: int) -> Pairs:
        """Shifts each chunk's pair by one device along its way, or against it."""
        return {
            number: self.ring.shift(pair, sign * self[number].way)
            for number, pair in dkv.items()
        }

    # Gradients.

    def join_gradients(self, dkv: Pairs) -> Pair:
        """Returns dk and dv (B, L, K, D) of the shard, from those of its chunks."""
        groups = [self._join_group(dkv, heads) for heads in self.schedule.heads]
        dk = join([dk for dk, _ in groups], axis=2)
        dv = join([dv for _, dv in groups], axis=2)
        return dk, dv

    def _join_group(self, dkv: Pairs, heads: tuple[int, int]) -> Pair:
        """Joins dk and dv of a head group along the slots.

        Chunks that only visit other devices have slots that the device's own chunk has
        too: their gradients are added to its.
        """
        of_group = {i: dkv[i] for i in sorted(dkv) if self[i].heads == heads}
        own = [pair for i, pair in of_group.items() if self[i].first == 0]
        dk = join([dk for dk, _ in own], axis=1)  # (B, L, heads, D)
        dv = join([dv for _, dv in own], axis=1)
        for number, (visitor_dk, visitor_dv) in of_group.items():
            if self[number].first:
                begin, end = self[number].slots
                widths = (0, 0), (begin, self.length - end), (0, 0), (0, 0)
                visitor_dk = jnp.pad(visitor_dk, widths)
                visitor_dv = jnp.pad(visitor_dv, widths)
                dk = dk + visitor_dk
                dv = dv + visitor_dv
        return dk, dv


def of_groups(chunks: Chunks, kernels: dict[int, Steps]) -> list[Steps]:
    """Returns a backend's steps for each head group, those of its last chunk.

    The steps of all chunks of a group have carries of one form.
    """
    of_group = {chunks.group(number): steps for number, steps in kernels.items()}
    return [of_group[group] for group in sorted(of_group)]


def zeros_like(kv: Pair, dtype: jnp.dtype) -> Pair:
    """Returns dk and dv of no queries, for keys and values."""
    k, v = kv
    return jnp.zeros_like(k, dtype), jnp.zeros_like(v, dtype)


def join(parts: Sequence[jax.Array], axis: int) -> jax.Array:
    """Concatenates arrays; of one, returns it, without an instruction."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)


def halves(bounds: Visible, length: int) -> tuple[Visible, Visible]:
    """Splits intervals into those of the first half of the queries, and of the second.

    bounds: (m, B or 1, L) each, within [0, length], not decreasing along the queries.
    Outside of its half a query's interval is empty, [length, length) in the first and
    [0, 0) in the second, so that bounds still do not decrease.
    """
    k_start, k_end = bounds
    queries = k_start.shape[-1]
    is_first = jnp.arange(queries) < queries // 2  # (L,)
    early = Visible(
        jnp.where(is_first, k_start, length), jnp.where(is_first, k_end, length)
    )
    late = Visible(jnp.where(is_first, 0, k_start), jnp.where(is_first, 0, k_end))
    return early, late
