"""Turns of a ring of two levels: inner rings on fast links, joined by slow ones.

While a shard's pieces go around an inner ring, all of it goes to the next one, in as
many parts as the inner ring has steps: each is hidden by the kernels of its step. The
sums of dk and dv follow one turn behind. Half of the queries of the own turn are
deferred, to hide their way home. A ring of one level is one turn.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .device import is_cpu, is_tpu
from .masks import Visible
from .merge import added
from .ring_device import Pair, Ring
from .ring_pieces import Pieces, looped
from .ring_steps import Backward, Forward, Rows, halves

Arrays = tuple[Any, ...]
"""Of one shape but for their types: keys, values and sums of gradients."""


def forward_steps(
    ring: Ring, q: jax.Array, kv: Pair, visible: Visible, length: int
) -> Pair:
    """Returns out (B, T, H, D) and lse (B, H, T) in float32. length: of a shard."""
    pieces = Pieces.of(ring, kv, visible, length)
    if pieces.schedule.outer > 1:
        return _forward_turns(pieces, q)
    return _run(lambda pieces: Forward(pieces, q), pieces)


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
    backward = functools.partial(Backward, rows=rows, adds_late=adds_late)
    if pieces.schedule.outer > 1:
        return _backward_turns(backward, pieces)
    return _run(backward, pieces)


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


def _forward_turns(pieces: Pieces, q: jax.Array) -> Pair:
    """Returns out (B, T, H, D) and lse (B, H, T) in float32."""

    def turn(number: Any, kv: Pair, partial: Sequence, sends: bool = True) -> tuple:
        one = Forward(pieces.at(number, kv), q)
        parts = _cut(kv, len(pieces.steps_apart)) if sends else ()
        partial, parts = one.go(partial, parts)
        return _whole(parts), partial

    kv, partial = turn(0, pieces.kv, (None,) * len(pieces.schedule.heads))
    last = pieces.schedule.outer - 1
    kv, partial = looped(1, last, turn, (kv, partial), pieces.schedule.last + 1)
    _, partial = turn(last, kv, partial, sends=False)
    return Forward(pieces, q).joined(partial)


def _backward_turns(backward: Callable, pieces: Pieces) -> Any:
    """Returns dq, dk and dv, float32.

    backward: makes the steps of pieces.
    """
    steps = len(pieces.steps_apart)
    last = pieces.schedule.outer - 1

    def turn(
        number: Any, kv: Any, dq: Sequence, sums: Any, sends: bool = True
    ) -> tuple:
        arrays = (kv if sends else ()) + (sums or ())
        one: Backward = backward(pieces.at(number, kv))
        dq, partial, parts = one.go(dq, _cut(arrays, steps))
        moved = _whole(parts)
        kv, sums = (moved[:2], moved[2:]) if sends else (None, moved)
        return kv, dq, added(sums or None, partial)

    bounds = halves(pieces.visible, pieces.ring.size * pieces.length)
    early, late = (Visible(*half) for half in bounds)
    dq = backward(pieces).zeros()
    first = backward(pieces.at(0, pieces.kv, early))
    dq, own, parts = first.go(dq, _cut(pieces.kv, steps))
    kv = _whole(parts)
    if last > 1:
        kv, dq, sums = turn(1, kv, dq, None)
        inner = pieces.schedule.last + 1
        kv, dq, sums = looped(2, last, turn, (kv, dq, sums), inner)
        _, dq, sums = turn(last, kv, dq, sums, sends=False)
    else:
        _, dq, sums = turn(last, kv, dq, None, sends=False)
    deferred = backward(pieces.at(0, pieces.kv, late))
    dq, more, parts = deferred.go(dq, _cut(sums, steps))
    dkv = added(added(own, more), _whole(parts))
    return deferred.joined(dq), *dkv


def _cut(arrays: Arrays, parts: int) -> tuple[Arrays, ...]:
    """Cuts arrays (B, S, K, D) along their slots, as evenly as can be."""
    if not arrays:
        return ()
    slots = arrays[0].shape[1]
    ends = [slots * i // parts for i in range(1, parts)]
    return tuple(zip(*(jnp.split(x, ends, axis=1) for x in arrays), strict=True))


def _whole(parts: Sequence[Arrays]) -> Any:
    """Undoes `_cut`."""
    return tuple(jnp.concatenate(xs, axis=1) for xs in zip(*parts, strict=True))
