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

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..device import is_cpu, is_tpu
from ..masks import Visible
from ..merge import added
from .device import Bounds, Pair, Ring
from .pieces import Arrays, Pieces, Step, run_steps
from .schedule import Piece

Rows = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""q, do (B, L, H, D), lse and delta (B, H, L) of a device's queries."""

Sums = Pair | None

LSE_RANK = 3
"""Axes of lse (B, H, L); out, and all gradients, have four."""


def forward_steps(
    ring: Ring, q: jax.Array, kv: Pair, visible: Visible, length: int
) -> Pair:
    """Returns out (B, T, H, D) and lse (B, H, T) in float32. length: of a shard."""
    return _run(lambda pieces: Forward(pieces, q), Pieces.of(ring, kv, visible, length))


def backward_steps(
    ring: Ring, rows: Rows, kv: Pair, visible: Visible
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns dq, dk and dv, float32; of dq and dk without the factor `scale`.

    visible: key indices [k_start, k_end) of each query.
    """
    takes_turns = is_tpu() if ring.takes_turns is None else ring.takes_turns
    adds_late = not is_cpu() or ring.takes_turns is False
    pieces = Pieces.of(ring, kv, visible, kv[0].shape[1], turns=1 + takes_turns)
    return _run(lambda pieces: Backward(pieces, rows, adds_late), pieces)


def _run(one_way: Callable, pieces: Pieces) -> Any:
    """Runs all steps; of a ring that counts them, as many as there are."""
    ring = pieces.ring
    if ring.size == 1:
        return one_way(pieces).run_alone()
    if not ring.route.is_counted:
        return one_way(pieces).run()
    count = ring.count(pieces.visible, pieces.length)
    counted = one_way(replace(pieces, count=count))
    return lax.cond(count > 0, counted.run, counted.run_alone)


class Forward:
    """Attends to the pieces: a partial result of each head group."""

    def __init__(self, pieces: Pieces, q: jax.Array):
        self.pieces, self.q = pieces, pieces.of_queries(q, axis=2)

    def run(self) -> Pair:
        """Goes through all steps."""
        state = tuple(self.pieces.cut()), (None,) * len(self.q)
        return self._joined(run_steps(self.pieces, self.step, state)[1])

    def run_alone(self) -> Pair:
        """Attends to the local shard."""
        pieces, nothing = self.pieces, (None,) * len(self.q)
        own = {i: pieces.bounds(p, 0) for i, p in enumerate(pieces) if p.first == 0}
        return self._joined(self._attended(own, pieces.cut(), nothing, is_one=False))

    def step(self, role: int, step: Step, kv: Sequence, partial: Sequence) -> tuple:
        """Takes a step, which has the transfers and pieces of the step `role`."""
        pieces = self.pieces
        bounds = {
            i: pieces.bounds(piece, step)
            for i, piece in enumerate(pieces)
            if piece.first <= role <= piece.last
        }
        arriving = pieces.sent(range(len(kv)), kv, role)
        partial = self._attended(bounds, kv, partial, is_one=bool(arriving))
        arriving = [arriving.get(i) for i in range(len(kv))]
        if role < pieces.schedule.last:
            # Without the barrier XLA may start all transfers at once, or late.
            (arriving, partial), _ = pieces.ring.barrier((arriving, partial))
        return arriving, partial

    def _attended(
        self, bounds: dict[int, Bounds], kv: Sequence, partial: Sequence, is_one: bool
    ) -> list[Pair | None]:
        """Attends to pieces. is_one: as one instruction, where they are several."""
        pieces, ring = self.pieces, self.pieces.ring

        def attend(partial: Sequence) -> list[Pair | None]:
            partial = list(partial)
            for i, seen in bounds.items():
                group = pieces.group(i)
                options = {**ring.scores, "carry": partial[group]}
                operands = self.q[group], *kv[i], *seen
                partial[group] = ring.backend.forward(*operands, **options)
            return partial

        if is_one and len(bounds) > 1:
            return _where_seen(bounds, attend, partial)
        return attend(partial)

    def _joined(self, partial: Sequence) -> Pair:
        """Joins the partial results of head groups."""
        out, lse = zip(*partial, strict=True)
        return _join(out, 2), _join(lse, 1)


class Backward:
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
        dq, own = self._zeros(), tuple(self.pieces.cut())
        state = own, dq, self._first_sums(own)
        _, dq, dkv = run_steps(self.pieces, self.step, state)
        late = self.pieces.schedule.last + 1
        _, dq, dkv = self.step(late, late, own, dq, dkv)
        return self._joined(dq), *self._joined_keys(dkv)

    def _zeros(self) -> list[jax.Array]:
        """Returns the dq of each head group before all steps, (B, L, H, D)."""
        return [jnp.zeros(q.shape, lse.dtype) for q, _, lse, _ in self.rows]

    def _first_sums(self, own: tuple[Pair, ...]) -> tuple[Sums, ...]:
        """Returns zeros for pieces that a loop of unknown length starts with."""
        if self.pieces.count is None:
            return (None,) * len(own)
        dtype = self.rows[0][2].dtype
        return tuple(
            (jnp.zeros(k.shape, dtype), jnp.zeros(v.shape, dtype))
            if piece.first
            else None
            for piece, (k, v) in zip(self.pieces, own, strict=True)
        )

    def run_alone(self) -> tuple[jax.Array, ...]:
        """Computes the gradients of the local shard."""
        pieces, own = self.pieces, self.pieces.cut()
        bounds = {i: pieces.bounds(p, 0) for i, p in enumerate(pieces) if p.first == 0}
        dq, dkv = self._added(bounds, own, self._zeros(), [None] * len(own))
        return self._joined(dq), *self._joined_keys(dkv)

    def step(
        self, role: int, step: Step, kv: Sequence, dq: Sequence, dkv: Sequence
    ) -> tuple:
        """Takes a step, which has the transfers and pieces of the step `role`.

        The one after the last is that of the local block's second half.
        """
        pieces, arriving = self.pieces, {}
        for turn, mine in enumerate(self.turns):
            bounds = {
                i: self._bounds(pieces.schedule.pieces[i], role, step) for i in mine
            }
            bounds = {i: seen for i, seen in bounds.items() if seen is not None}
            # Gradients of the turn before travel: in the first turn, of a step ago.
            moved = self._moved(self.turns[turn - 1], role - (turn == 0), dkv)
            sent = pieces.sent(mine, kv, role)
            arriving |= sent
            waits = moved and len(self.turns) == 1 and not self.adds_late
            is_beside = sent or (moved and not waits)
            dkv = [None if i in moved else sums for i, sums in enumerate(dkv)]
            if not self.adds_late:
                dkv, moved = [moved.get(i, sums) for i, sums in enumerate(dkv)], {}
            dq, dkv = self._added(bounds, kv, dq, dkv)
            # With keys of later turns, which would leave before it.
            kv = [None if i in mine else pair for i, pair in enumerate(kv)]
            if is_beside:
                held, dq = pieces.ring.barrier((arriving, kv, dkv, moved), dq)
                arriving, kv, dkv, moved = held
            dkv = [
                added(moved[i], sums) if i in moved and sums else moved.get(i, sums)
                for i, sums in enumerate(dkv)
            ]
        return [arriving.get(i) for i in range(len(kv))], dq, dkv

    def _moved(self, numbers: Sequence[int], role: int, dkv: Sequence) -> Arrays:
        """Sends gradients of pieces, computed in a step, to the next visit, or home."""
        ring, moved, home = self.pieces.ring, {}, {}
        walks = {i: self.pieces.schedule.pieces[i].walk for i in numbers}
        for i in numbers:
            piece, sums = self.pieces.schedule.pieces[i], dkv[i]
            if sums is None or not 0 <= role <= piece.last or piece.last == 0:
                continue
            if role < piece.last:
                moved[i] = ring.hop(sums, walks[i], piece.hops(role))
            elif not ring.route.is_counted:
                moved[i] = ring.hop(sums, walks[i], -piece.visits[-1])
            else:
                home[i] = sums

        def walked(hop: int, _: Step, home: Arrays) -> Arrays:
            return {i: ring.hop(sums, walks[i], hop) for i, sums in home.items()}

        count, size = self.pieces.count, ring.size
        if count is not None and home:  # from device to device, the shorter way
            back = jnp.where(2 * count <= size, count, 0)
            on = jnp.where(2 * count <= size, 0, size - count)
            home = lax.fori_loop(0, back, functools.partial(walked, -1), home)
            moved |= lax.fori_loop(0, on, functools.partial(walked, 1), home)
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
        self, bounds: dict[int, Bounds], kv: Sequence, dq: Sequence, dkv: Sequence
    ) -> tuple[list, list]:
        """Adds the gradients of queries and pieces to those so far."""
        pieces, ring = self.pieces, self.pieces.ring

        def add(sums: tuple[Sequence, Sequence]) -> tuple[list, list]:
            dq, dkv = map(list, sums)
            for i, seen in bounds.items():
                group = pieces.group(i)
                q, *others = self.rows[group]
                options = {**ring.scores, "dq": dq[group], "dkv": dkv[i]}
                operands = q, *kv[i], *others, *seen
                dq[group], *pair = ring.backend.backward(*operands, **options)
                dkv[i] = tuple(pair)
            return dq, dkv

        if len(bounds) > 1 and ring.size > 1:
            return _where_seen(bounds, add, (dq, dkv))
        return add((dq, dkv))

    def _joined(self, dq: Sequence) -> jax.Array:
        """Joins the dq of head groups."""
        return dq[0] if len(dq) == 1 else self.pieces.ring.heads_first(_join(dq, 2))

    def _joined_keys(self, dkv: Sequence) -> Pair:
        """Joins the dk and dv of head groups, and of the pieces of each."""
        groups = range(len(self.pieces.schedule.heads))
        found = [
            _joined_pieces(
                [
                    (piece, sums)
                    for i, (piece, sums) in enumerate(
                        zip(self.pieces, dkv, strict=True)
                    )
                    if sums is not None and self.pieces.group(i) == group
                ]
            )
            for group in groups
        ]
        dk, dv = (_join(parts, 2) for parts in zip(*found, strict=True))
        if len(groups) == 1:
            return dk, dv
        return self.pieces.ring.heads_first(dk), self.pieces.ring.heads_first(dv)


def _joined_pieces(pieces: list[tuple[Piece, Pair]]) -> Pair:
    """Joins pieces by slots, and adds those that have only visited other devices."""
    own = [sums for piece, sums in pieces if piece.first == 0]
    dk, dv = (_join(parts, 1) for parts in zip(*own, strict=True))
    for piece, more in pieces:
        if piece.first:
            begin, end = piece.slots
            around = (0, 0), (begin, dk.shape[1] - end), (0, 0), (0, 0)
            more_dk, more_dv = (jnp.pad(x, around) for x in more)
            dk, dv = dk + more_dk, dv + more_dv
    return dk, dv


def _where_seen(bounds: dict[int, Bounds], run: Callable, sums: Any) -> Any:
    """Runs several kernels on sums so far, if any query sees anything.

    Then they are one instruction for XLA. Of a transfer beside several it believes that
    the last kernel will hide it, and would start it after the others.
    """
    results = jax.eval_shape(run, sums)
    is_seen = functools.reduce(
        jnp.logical_or, (jnp.any(jnp.less(*seen)) for seen in bounds.values())
    )

    def unseen(sums: Any) -> Any:
        """Fills in what is not there yet: out and gradients of 0, lse of -inf."""
        given = dict(jax.tree_util.tree_flatten_with_path(sums)[0])
        paths, structure = jax.tree_util.tree_flatten_with_path(results)
        found = [
            given[path]
            if path in given
            else jnp.full(x.shape, -jnp.inf if x.ndim == LSE_RANK else 0, x.dtype)
            for path, x in paths
        ]
        return jax.tree.unflatten(structure, found)

    return lax.cond(is_seen, run, unseen, sums)


def _join(parts: Sequence[jax.Array], axis: int) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)


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
