"""Steps of a ring: what a device computes in each, and what travels meanwhile.

In each step, pieces of keys and values are sent on while those that have arrived are
attended to (Ring Attention, 2310.01889): see `schedule`. In the backward pass dq stays,
and dk and dv follow their keys and values around the ring, and home:

    in turns    the pieces in two halves: while one is computed, and added in place to
                what has arrived, dk and dv of the other one travel
    at once     keys of the next step, and dk, dv of the last one, travel during a step;
                what it computes is added to those that have arrived, in XLA

so that every transfer overlaps a kernel. Half of the local block's queries are deferred
to overlap the last transfer. On CPUs, which would wait in any case, dk and dv of each
step arrive before it, and it adds to them in place.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .device import is_cpu, is_tpu
from .masks import Visible
from .merge import added
from .ring_device import Bounds, Pair, Ring
from .schedule import Piece, Schedule

UNROLLED_STEPS = 16
"""Rings with more steps are compiled as a loop: its compile time does not grow."""

LOOP_UNROLL = 2
"""Ring steps in an iteration of that loop: keys alternate between two buffers, and are
not copied back into one."""

Rows = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""q, do (B, L, H, D), lse and delta (B, H, L) of a device's queries."""

Sums = Pair | None
Step = jax.Array | int


def forward_steps(
    ring: Ring, q: jax.Array, kv: Pair, visible: Visible, length: int
) -> Pair:
    """Returns out (B, T, H, D) and lse (B, H, T) in float32. length: of a shard."""
    pieces = Pieces.of(ring, kv, visible, length)
    return _run(lambda pieces: _Forward(pieces, q), pieces)


def backward_steps(
    ring: Ring, rows: Rows, kv: Pair, visible: Visible
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns dq, dk and dv, float32; of dq and dk without the factor `scale`.

    visible: key indices [k_start, k_end) of each query.
    """
    length = kv[0].shape[1]
    takes_turns = is_tpu() if ring.takes_turns is None else ring.takes_turns
    pieces = Pieces.of(ring, kv, visible, length, turns=1 + takes_turns)
    adds_late = not is_cpu() or ring.takes_turns is False
    return _run(lambda pieces: _Backward(pieces, rows, adds_late), pieces)


def _run(one_way: Callable, pieces: "Pieces") -> tuple[jax.Array, ...]:
    """Runs all steps; of a ring that counts them, as many as there are."""
    ring = pieces.ring
    if ring.size == 1:
        return one_way(pieces).run_alone()
    if not ring.route.is_counted:
        return one_way(pieces).run()
    count = ring.count(pieces.visible, pieces.length)
    counted = one_way(replace(pieces, count=count))
    return lax.cond(count > 0, counted.run, counted.run_alone)


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
        return [tuple(_cut(x, piece) for x in self.kv) for piece in self]

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

    def sent(
        self, kv: Sequence[Pair | None], role: int, moment: "Moment"
    ) -> dict[tuple[int, int], jax.Array]:
        """Sends arrays to where they are attended to in the next step, if anywhere."""
        pieces = self.schedule.pieces
        return {
            (i, array): self.ring.hop(
                kv[i][array], pieces[i].walk, pieces[i].hops(role)
            )
            for i in moment.mine
            for array in moment.arrays
            if role < pieces[i].last
        }


class Moment(NamedTuple):
    """A part of a turn, with a barrier behind it.

    mine: pieces of the turn. computed: those that are attended to in this part.
    arrays: of keys and values, and of their gradients, that travel meanwhile.
    """

    mine: Sequence[int]
    computed: Sequence[int]
    arrays: Sequence[int]


def moments(mine: Sequence[int], computed: Sequence[int]) -> list[Moment]:
    """Cuts a turn in two where it has several kernels: one array travels in each.

    Of a transfer that several kernels have to hide, XLA believes that the last will do.
    """
    half = -(-len(computed) // 2)
    if len(computed) < 2:
        return [Moment(mine, computed, (0, 1))]
    return [Moment(mine, computed[:half], (0,)), Moment(mine, computed[half:], (1,))]


class _Forward:
    """Attends to the pieces: a partial result of each head group."""

    def __init__(self, pieces: Pieces, q: jax.Array):
        self.pieces, self.q = pieces, pieces.of_queries(q, axis=2)

    def run(self) -> Pair:
        """Goes through all steps."""
        state = tuple(self.pieces.cut()), (None,) * len(self.q)
        _, partial = _steps(self.pieces, self.step, state)
        return self._joined(partial)

    def run_alone(self) -> Pair:
        """Attends to the local shard."""
        own = [i for i, piece in enumerate(self.pieces) if piece.first == 0]
        nothing = (None,) * len(self.q)
        return self._joined(self._attended(own, 0, self.pieces.cut(), nothing))

    def step(self, role: int, step: Step, kv: tuple, partial: tuple) -> tuple:
        """Takes a step, which has the transfers and pieces of the step `role`."""
        pieces, arriving, is_last = self.pieces, {}, role == self.pieces.schedule.last
        computed = [i for i, p in enumerate(pieces) if p.first <= role <= p.last]
        for moment in moments(range(len(kv)), computed):
            arriving |= pieces.sent(kv, role, moment)
            partial = self._attended(moment.computed, step, kv, partial)
            if not is_last:
                # Without the barrier XLA may start all transfers at once, or late.
                kept = kv if moment.arrays == (0,) else None
                held = arriving, kept, partial
                (arriving, kept, partial), _ = pieces.ring.barrier(held)
                kv = kept or kv
        return _paired(arriving, len(kv)), partial

    def _attended(
        self, numbers: Sequence[int], step: Step, kv: Sequence, partial: Sequence
    ) -> tuple:
        pieces, partial = self.pieces, list(partial)
        for i in numbers:
            group = pieces.group(i)
            bounds = pieces.bounds(pieces.schedule.pieces[i], step)
            options = {**pieces.ring.scores, "carry": partial[group]}
            partial[group] = pieces.ring.backend.forward(
                self.q[group], *kv[i], *bounds, **options
            )
        return tuple(partial)

    def _joined(self, partial: tuple) -> Pair:
        out, lse = zip(*partial, strict=True)
        return _join(out, 2), _join(lse, 1)


class _Backward:
    """Computes the gradients of all pieces, which go home.

    adds_late: whether, in a single turn, what a step computes is added after it to what
      has arrived meanwhile; else it arrives before.
    """

    def __init__(self, pieces: Pieces, rows: Rows, adds_late: bool):
        cut = map(pieces.of_queries, rows, (2, 2, 1, 1))
        self.rows: list[Rows] = list(zip(*cut, strict=True))
        self.pieces, self.turns = pieces, pieces.schedule.turns
        self.adds_late = adds_late and len(self.turns) == 1
        self.is_cut = adds_late or len(self.turns) > 1  # the local block, in halves

    def run(self) -> tuple[jax.Array, ...]:
        """Goes through all steps."""
        own = tuple(self.pieces.cut())
        state = own, tuple(map(_zeros, self.rows)), self._first_sums(own)
        _, dq, dkv = _steps(self.pieces, self.step, state)
        late = self.pieces.schedule.last + 1
        _, dq, dkv = self.step(late, late, own, dq, dkv)
        return self._joined(dq, dkv)

    def _first_sums(self, own: tuple[Pair, ...]) -> tuple[Sums, ...]:
        """Returns zeros for pieces that a loop of unknown length starts with."""
        if self.pieces.count is None:
            return (None,) * len(own)
        dtype = self.rows[0][2].dtype
        return tuple(
            tuple(jnp.zeros(x.shape, dtype) for x in kv) if piece.first else None
            for piece, kv in zip(self.pieces, own, strict=True)
        )

    def run_alone(self) -> tuple[jax.Array, ...]:
        """Computes the gradients of the local shard."""
        own, dq = self.pieces.cut(), list(map(_zeros, self.rows))
        dkv: list[Sums] = [None] * len(own)
        for number, piece in enumerate(self.pieces):
            if piece.first == 0:
                bounds = self.pieces.bounds(piece, 0)
                dq, dkv[number] = self._added(number, own[number], bounds, dq, None)
        return self._joined(dq, dkv)

    def step(self, role: int, step: Step, kv: tuple, dq: tuple, dkv: tuple) -> tuple:
        """Takes a step, which has the transfers and pieces of the step `role`.

        The one after the last is that of the local block's second half.
        """
        pieces, dq, arriving = self.pieces, list(dq), {}
        dkv = [sums and list(sums) for sums in dkv]
        for turn, mine in enumerate(self.turns):
            bounds = {
                i: self._bounds(pieces.schedule.pieces[i], role, step) for i in mine
            }
            computed = [i for i in mine if bounds[i] is not None]
            for moment in self._moments(mine, computed):
                # Gradients of the turn before travel: in the first turn, of a step ago.
                before = self.turns[turn - 1], role - (turn == 0)
                moved = self._moved(*before, dkv, moment.arrays)
                arriving |= pieces.sent(kv, role, moment)
                if not self.adds_late:
                    moved = _placed(moved, dkv)
                for i in moment.computed:
                    sums = None if (i, 0) in moved else dkv[i]
                    dq, dkv[i] = self._added(i, kv[i], bounds[i], dq, sums)
                # With keys that leave later, and else would before it.
                is_over = moment.computed[-1:] == computed[-1:]
                kv = [None if is_over and i in mine else x for i, x in enumerate(kv)]
                held = arriving, kv, dkv, moved
                (arriving, kv, dkv, moved), dq = pieces.ring.barrier(held, dq)
                for (i, array), sums in moved.items():
                    here = dkv[i][array] if i in computed else None
                    dkv[i][array] = sums if here is None else sums + here
        dkv = tuple(sums and tuple(sums) for sums in dkv)
        return _paired(arriving, len(kv)), tuple(dq), dkv

    def _moments(self, mine: Sequence[int], computed: Sequence[int]) -> list[Moment]:
        """Cuts a turn; not if it waits for its own gradients."""
        if len(self.turns) == 1:
            return [Moment(mine, computed, (0, 1))]
        return moments(mine, computed)

    def _moved(
        self, numbers: Sequence[int], role: int, dkv: list, arrays: Sequence[int]
    ) -> dict[tuple[int, int], jax.Array]:
        """Sends gradients of pieces, computed in a step, to the next visit, or home."""
        ring, moved, home = self.pieces.ring, {}, {}
        walks = {i: self.pieces.schedule.pieces[i].walk for i in numbers}
        for i, array in itertools.product(numbers, arrays):
            piece, sums = self.pieces.schedule.pieces[i], dkv[i]
            if sums is None or not 0 <= role <= piece.last or piece.last == 0:
                continue
            if role < piece.last:
                moved[i, array] = ring.hop(sums[array], walks[i], piece.hops(role))
            elif not ring.route.is_counted:
                hops = -piece.place(role)
                moved[i, array] = ring.hop(sums[array], walks[i], hops)
            else:
                home[i, array] = sums[array]

        def back(_: Step, home: dict) -> dict:
            return {key: ring.hop(x, walks[key[0]], -1) for key, x in home.items()}

        if home:  # one device after the other, as many as there are
            moved |= lax.fori_loop(0, self.pieces.count, back, home)
        return moved

    def _bounds(self, piece: Piece, role: int, step: Step) -> Bounds | None:
        """Returns what each query sees of a piece in a step, if it is attended to."""
        is_late = role > self.pieces.schedule.last
        if not (piece.first <= role <= piece.last or is_late and piece.first == 0):
            return None
        if 0 < role and not is_late:
            return self.pieces.bounds(piece, step)
        if not self.is_cut:
            return None if is_late else self.pieces.bounds(piece, 0)
        length = piece.slots[1] - piece.slots[0]
        return halves(self.pieces.bounds(piece, 0), length)[is_late]

    def _added(
        self, number: int, kv: Pair, bounds: Bounds, dq: list, dkv: Sums
    ) -> tuple[list, list]:
        """Adds the gradients of some queries and a piece to those so far."""
        ring, group = self.pieces.ring, self.pieces.group(number)
        q, *others = self.rows[group]
        options = {**ring.scores, "dq": dq[group], "dkv": dkv and tuple(dkv)}
        operands = q, *kv, *others, *bounds
        dq = list(dq)
        dq[group], dk, dv = ring.backend.backward(*operands, **options)
        return dq, [dk, dv]

    def _joined(self, dq: tuple, dkv: tuple) -> tuple[jax.Array, ...]:
        """Joins the gradients of head groups, and of the pieces of each."""
        of_group: list[list[tuple[Piece, Pair]]] = [[] for _ in dq]
        for number, (piece, sums) in enumerate(zip(self.pieces, dkv, strict=True)):
            if sums is not None:
                of_group[self.pieces.group(number)].append((piece, sums))
        dk, dv = zip(*map(_joined_pieces, of_group), strict=True)
        results = _join(dq, 2), _join(dk, 2), _join(dv, 2)
        if len(dq) == 1:
            return results
        return tuple(map(self.pieces.ring.heads_first, results))


def _joined_pieces(pieces: list[tuple[Piece, Pair]]) -> Pair:
    """Joins pieces by slots, and adds those that have only visited other devices."""
    own = [sums for piece, sums in pieces if piece.first == 0]
    sums = tuple(_join(parts, 1) for parts in zip(*own, strict=True))
    length = sums[0].shape[1]
    for piece, more in pieces:
        if piece.first:
            begin, end = piece.slots
            around = (0, 0), (begin, length - end), (0, 0), (0, 0)
            sums = added(sums, tuple(jnp.pad(x, around) for x in more))
    return sums


def _placed(arrays: dict[tuple[int, int], jax.Array], pairs: list) -> dict:
    """Puts arrays by (piece, which of its two) into lists; returns what remains."""
    for (i, array), x in arrays.items():
        pairs[i][array] = x
    return {}


def _paired(arrays: dict[tuple[int, int], jax.Array], pieces: int) -> tuple:
    """Returns the pair of each piece, or None."""
    return tuple(
        (arrays[i, 0], arrays[i, 1]) if (i, 0) in arrays else None
        for i in range(pieces)
    )


def _join(parts: tuple[jax.Array, ...], axis: int) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)


def _cut(x: jax.Array, piece: Piece) -> jax.Array:
    """Cuts a piece from a shard (B, S, K, D)."""
    return x[:, slice(*piece.slots), slice(*piece.heads)]


def _zeros(rows: Rows) -> jax.Array:
    return jnp.zeros(rows[0].shape, rows[2].dtype)  # (B, L, H, D)


def halves(bounds: Bounds, length: int) -> tuple[Pair, Pair]:
    """Splits intervals into those of the first half of the queries, and of the second.

    bounds: (B, L) each, within [0, length]. The other half's are empty, at the end of
    the keys or at their start, so that bounds do not decrease along the queries.
    """
    queries = bounds[0].shape[1]
    first = jnp.arange(queries) < queries // 2
    k_start, k_end = bounds
    early = jnp.where(first, k_start, length), jnp.where(first, k_end, length)
    late = jnp.where(first, 0, k_start), jnp.where(first, 0, k_end)
    return early, late


def _steps(pieces: Pieces, body: Callable, state: tuple) -> tuple:
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
        state = _loop(begin, alone, body, state)
        state = body(alone, alone, *state)
        begin = alone + 1
    return state


def _loop(first: int, end: int, body: Callable, state: tuple) -> tuple:
    """Runs the ring steps first … end - 1, of one role."""
    if end - first < UNROLLED_STEPS:
        for step in range(first, end):
            state = body(step, step, *state)
        return state
    steps = jnp.arange(first, end, dtype=jnp.int32)
    return lax.scan(
        lambda state, step: (body(first, step, *state), None),
        state,
        steps,
        unroll=LOOP_UNROLL,
    )[0]
