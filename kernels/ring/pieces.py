"""Pieces: a device's part of a ring's schedule, and the loop over its steps."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from ..masks import Visible
from .device import Bounds, Pair, Ring
from .schedule import Piece, Schedule

UNROLLED_STEPS = 16
"""Rings with more steps are compiled as a loop: its compile time does not grow."""

LOOP_UNROLL = 2
"""Ring steps in an iteration of that loop: keys alternate between two buffers, and are
not copied back into one."""

Arrays = dict[int, Pair]
"""Keys and values, or their gradients, by the numbers of pieces."""
Step = jax.Array | int


@dataclass(frozen=True)
class Pieces:
    """The pieces of a ring's keys and values, on this device.

    visible: key indices of each query. length: of a shard, tokens.
    count: steps after the first, where the program counts them.
    """

    ring: Ring
    schedule: Schedule
    kv: Pair
    visible: Visible
    length: int
    count: jax.Array | None = None

    @classmethod
    def of(
        cls, ring: Ring, kv: Pair, visible: Visible, length: int, turns: int = 1
    ) -> "Pieces":
        """Cuts keys and values (B, S, K, D). turns: of a device in each step."""
        slots, heads = kv[0].shape[1:3]
        schedule = ring.route.schedule(ring.size, heads, slots, turns)
        return cls(ring, schedule, kv, visible, length)

    def __iter__(self):
        return iter(self.schedule.pieces)

    def cut(self) -> list[Pair]:
        """Returns the pieces of this device's shard."""
        k, v = self.kv
        return [(_cut(k, piece), _cut(v, piece)) for piece in self]

    def group(self, number: int) -> int:
        """Returns the number of a piece's head group."""
        return self.schedule.heads.index(self.schedule.pieces[number].heads)

    def of_queries(self, x: jax.Array, axis: int) -> list[jax.Array]:
        """Cuts an array with an axis of query heads into the head groups."""
        each = x.shape[axis] // self.kv[0].shape[2]
        ends = [each * end for _, end in self.schedule.heads]
        return jnp.split(x, ends[:-1], axis) if len(ends) > 1 else [x]

    def bounds(self, piece: Piece, step: Step) -> Bounds:
        """Returns the slots of a piece that each query sees in a step."""
        place = piece.place(step)
        shard = self.ring.source(piece.walk, place)
        begin, end = piece.slots
        bounds = self.ring.slots(shard, self.visible, self.length)
        if self.ring.route.counts_both_ways and piece.first:
            # Opposite shards come both ways: this one is empty.
            is_new = 2 * place < self.ring.size
            bounds = bounds[0], jnp.where(is_new, bounds[1], bounds[0])
        if begin == 0 and end == self.kv[0].shape[1]:
            return bounds
        k_start, k_end = ((x - begin).clip(0, end - begin) for x in bounds)
        return k_start, k_end

    def sent(self, numbers: Sequence[int], kv: Sequence, role: int) -> Arrays:
        """Sends pieces to where they are attended to in the next step, if anywhere."""
        pieces = self.schedule.pieces
        return {
            i: self.ring.hop(kv[i], pieces[i].walk, pieces[i].hops(role))
            for i in numbers
            if role < pieces[i].last
        }


def run_steps(pieces: Pieces, body: Callable, state: tuple) -> tuple:
    """Runs `state = body(role, step, *state)` for all steps of a schedule.

    Steps of one role have the same transfers and pieces.
    """
    count = pieces.count
    if count is not None:  # whose roles are: the first, those between, the last
        state = body(0, 0, *state)
        state = lax.fori_loop(1, count, lambda i, state: body(1, i, *state), state)
        return body(2, count, *state)
    begin = 0
    for alone in pieces.schedule.alone:
        alike = functools.partial(body, begin)
        state = _looped(begin, alone, alike, state)
        state = body(alone, alone, *state)
        begin = alone + 1
    return state


def _looped(first: int, end: int, body: Callable, state: tuple) -> tuple:
    """Runs `state = body(step, *state)` for first … end - 1, unrolled if few."""
    if end - first < UNROLLED_STEPS:
        for step in range(first, end):
            state = body(step, *state)
        return state
    return lax.scan(
        lambda state, step: (body(step, *state), None),
        state,
        jnp.arange(first, end, dtype=jnp.int32),
        unroll=LOOP_UNROLL,
    )[0]


def _cut(x: jax.Array, piece: Piece) -> jax.Array:
    """Cuts a piece from a shard (B, S, K, D)."""
    return x[:, slice(*piece.slots), slice(*piece.heads)]
