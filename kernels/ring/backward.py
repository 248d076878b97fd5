"""The backward pass of a ring: dq stays; dk and dv follow their keys, and return.

A chunk of device 0, on a ring of four. K: the kernel that adds to its dk and dv.

                  step 0        step 1        step 2        step 3        last
    device 0      K (first                                                K (second
                     half)                                                   half)
    device 1                    K
    device 2                                  K
    device 3                                                K
    keys             0 -> 1        1 -> 2        2 -> 3
    dk, dv                         0 -> 1        1 -> 2        2 -> 3        3 -> 0

Keys of the next step, and dk and dv of the last one, travel beside the kernels of a
step; what these compute is added to what has arrived. Half of the local block's queries
are put off, to hide the way back. On CPUs, which would wait in any case, dk and dv
arrive before the kernels, which add to them in place, and nothing is put off.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..backends.steps import Rows, backward_steps
from ..device import is_cpu
from ..masks import Visible
from ..merge import added
from .comm import Chunks, Pair, Pairs, Ring, Table, as_one, join


def backward(
    ring: Ring, rows: Rows, kv: Pair, visible: Visible
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the gradients of the local queries, and of the local keys and values.

    Returns:
      dq, dk and dv, float32; dq and dk without the factor `scale`.
    """
    chunks = Chunks.of(ring, kv, visible, kv[0].shape[1])
    groups = list(zip(*map(chunks.head_groups, rows, (2, 2, 1, 1)), strict=True))
    own, last, scores = chunks.own(), chunks.schedule.last, ring.scores
    count, in_place = ring.count(visible, chunks.length), is_cpu()
    steps = {
        i: backward_steps(ring.backend, groups[chunks.group(i)], k, visible, scores)
        for i, (k, _) in own.items()
    }
    tables = {
        i: chunks.table(i, one.prepare, is_cut=not in_place) for i, one in steps.items()
    }
    gradients = functools.partial(_gradients, chunks, steps)
    of_group = {chunks.group(i): one for i, one in steps.items()}
    zeros = [of_group[g].begin(_zeros_of(rows)) for g, rows in enumerate(groups)]
    nothing = {} if count is None else _first_sums(chunks, own, zeros[0].dtype)

    def step(
        static_step: int, n: jax.Array | int, held: Pairs, dq: list, dkv: Pairs
    ) -> tuple:
        """Takes a step; the one after the last is that of the second half."""
        arriving = chunks.passed_on(held, static_step)
        moved = _followed(chunks, dkv, static_step - 1, count)
        sums = dkv | moved
        before, apart = (sums, {}) if in_place else ({}, sums)
        is_late = static_step > last and not in_place
        numbers = chunks.attended(0 if is_late else static_step)
        now = {i: tables[i].at(-1 if is_late else n) for i in numbers}
        dq, new = gradients(now, held, (dq, before))
        if arriving or moved:
            (arriving, apart, new), dq = ring.barrier((arriving, apart, new), dq)
        return arriving, dq, apart | {i: added(apart.get(i), new[i]) for i in new}

    def around() -> tuple[list, Pairs]:
        _, dq, dkv = chunks.run(step, (own, zeros, nothing), count)
        _, dq, dkv = step(last + 1, last + 1, own, dq, dkv)
        return dq, dkv

    def alone() -> tuple[list, Pairs]:
        now = {i: chunks.table(i, steps[i].prepare).at(0) for i in chunks.attended(0)}
        dq, dkv = gradients(now, own, (zeros, {}))
        return dq, dkv | nothing

    if last == 0:
        dq, dkv = alone()
    elif count is None:
        dq, dkv = around()
    else:
        dq, dkv = lax.cond(count > 0, around, alone)
    dq = [of_group[g].finish(x) for g, x in enumerate(dq)]
    found = join(dq, 2), *_joined(chunks, dkv)
    dq, dk, dv = found if len(groups) == 1 else map(ring.heads_first, found)
    return dq, dk, dv


def _gradients(
    chunks: Chunks,
    steps: dict[int, Any],
    now: dict[int, Table],
    held: Pairs,
    sums: tuple[list, Pairs],
) -> tuple[list, Pairs]:
    """Adds to dq of the head groups, and to dk and dv so far, of chunks to attend to.

    steps: of the backend. held: keys and values that are here.
    """

    def add(i: int, seen: Any, sums: tuple) -> tuple:
        dq, *pair = steps[i].add(*held[i], seen, *sums)
        return dq, tuple(pair)

    def skip(i: int, sums: tuple) -> tuple:
        dq, pair = sums
        return dq, pair or _zeros(held[i], dq.dtype)

    def kernels(sums: tuple[list, Pairs]) -> tuple[list, Pairs]:
        dq, dkv = list(sums[0]), dict(sums[1])
        for i, one in now.items():
            run, leave = (functools.partial(way, i) for way in (add, skip))
            g = chunks.group(i)
            dq[g], dkv[i] = one.over_intervals(run, leave, (dq[g], dkv.get(i)))
        return dq, dkv

    def unseen(sums: tuple[list, Pairs]) -> tuple[list, Pairs]:
        dq, dkv = sums
        zeros = {i: _zeros(held[i], dq[0].dtype) for i in now}
        return list(dq), {**zeros, **dkv}

    return as_one(kernels, unseen, now, chunks.ring, sums)


def _first_sums(chunks: Chunks, own: Pairs, dtype: jnp.dtype) -> Pairs:
    """Returns the zeros that a loop of unknown length begins with."""
    return {i: _zeros(pair, dtype) for i, pair in own.items() if chunks[i].first}


def _zeros_of(rows: Rows) -> jax.Array:
    """Returns the dq of a head group so far."""
    q, _, lse, _ = rows
    return jnp.zeros(q.shape, lse.dtype)


def _zeros(kv: Pair, dtype: jnp.dtype) -> Pair:
    """Returns zeros of the shape of k and v."""
    k, v = (jnp.zeros(x.shape, dtype) for x in kv)
    return k, v


def _followed(
    chunks: Chunks, dkv: Pairs, static_step: int, count: jax.Array | None
) -> Pairs:
    """Sends the gradients that a step computed to the next stop, or to their owner."""
    ring, moved, returning = chunks.ring, {}, {}
    for i, sums in dkv.items():
        chunk = chunks[i]
        if not 0 <= static_step <= chunk.last or chunk.last == 0:
            continue
        if static_step < chunk.last:
            moved[i] = ring.shift(sums, chunk.order, chunk.shifts_after(static_step))
        elif count is None:
            moved[i] = ring.shift(sums, chunk.order, -chunk.stops[-1])
        else:
            returning[i] = sums
    if count is None or not returning:
        return moved

    def shifted(shifts: int, _: jax.Array, held: Pairs) -> Pairs:
        return {
            i: ring.shift(sums, chunks[i].order, shifts) for i, sums in held.items()
        }

    # From device to device, the shorter way round.
    back = jnp.where(2 * count <= ring.size, count, 0)
    on = jnp.where(2 * count <= ring.size, 0, ring.size - count)
    held = lax.fori_loop(0, back, functools.partial(shifted, -1), returning)
    return moved | lax.fori_loop(0, on, functools.partial(shifted, 1), held)


def _joined(chunks: Chunks, dkv: Pairs) -> Pair:
    """Joins dk and dv of the chunks, and adds those that only visited others."""
    joined = []
    for group in range(len(chunks.schedule.heads)):
        mine = {i: sums for i, sums in dkv.items() if chunks.group(i) == group}
        own = [sums for i, sums in mine.items() if chunks[i].first == 0]
        dk, dv = (join(parts, 1) for parts in zip(*own, strict=True))
        for i, sums in mine.items():
            if chunks[i].first:
                begin, end = chunks[i].slots
                around = (0, 0), (begin, dk.shape[1] - end), (0, 0), (0, 0)
                more_dk, more_dv = (jnp.pad(x, around) for x in sums)
                dk, dv = dk + more_dk, dv + more_dv
        joined.append((dk, dv))
    dk, dv = (join(parts, 2) for parts in zip(*joined, strict=True))
    return dk, dv
