"""Ring attention: exact attention over a sequence sharded over a ring of devices.

Every device keeps its queries; keys and values go around, while it attends to the ones
that are here. Two chunks of heads, a and b, one each way round (2310.01889):

                  step 0         step 1             step 2             step 3
    device 1      own a, b       a of 0, b of 2     a of 3, b of 3     a of 2, b of 0
    meanwhile     a -> 2, b -> 0   -> 2, -> 0         -> 2, -> 0

In the backward pass dq stays; dk and dv follow their keys, and return. A chunk of
device 0, K being the kernel that adds to its dk and dv:

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

A query's keys on a visiting shard are intervals of the shard's slots, counted by the
layout: neither this file nor the kernels know layouts or masks. A step runs a kernel
for each interval. A ring of one device is attention on that device.

A head's attention sink is a key that every query sees, with a logit of its own and a
value of 0: the partial result (0, sink), merged after the last ring step.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ..backends.steps import (
    CommonForward,
    Rows,
    backward_steps,
    forward_steps,
    nothing,
)
from ..device import is_cpu
from ..masks import Visible
from ..merge import added, merge
from ..precision import product
from .comm import Chunks, Pair, Pairs, Ring, join

Gradients = tuple[jax.Array, jax.Array, jax.Array]
"""Of the local q, k and v."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    ring: Ring,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    k_start: jax.Array,
    k_end: jax.Array,
) -> Pair:
    """Returns the attention of the local queries to the keys of the whole ring.

    q: (B, L, H, D). k, v: (B, L, K, D), the local shards.
    sinks: (H,) float32, logit of each head's sink, if any.
    k_start, k_end: int32 (m, B or 1, L), m half-open intervals of the key indices that
      each local query attends to, which share no key.

    Returns:
      out (B, L, H, D) in the type of q, lse (B, H, L) in float32.
    """
    return _attend_forward(ring, q, k, v, sinks, k_start, k_end)[0]


def _attend_forward(ring, q, k, v, sinks, k_start, k_end):
    kv = ring.as_read(k), ring.as_read(v)  # D, or in whole lanes
    out, lse = forward(ring, ring.as_read(q), kv, Visible(k_start, k_end))
    if sinks is not None:
        # Here and not as the first step's carry: it costs no zeros to write and read,
        # as XLA fuses it with the cast.
        sink = jnp.broadcast_to(sinks[:, None], lse.shape)  # (B, H, T)
        out, lse = merge((jnp.zeros((), out.dtype), sink), (out, lse))
    out = ring.heads_first(out[..., : q.shape[-1]].astype(q.dtype))  # (B, T, H, D)
    # Named here, where the backward's residuals are made, so that a remat policy can
    # save these two and not rerun the ring (names given outside have no effect).
    out = checkpoint_name(out, "attention_out")
    lse = checkpoint_name(lse, "attention_lse")
    return (out, lse), (q, k, v, sinks, k_start, k_end, out, lse)


def _attend_backward(ring, residuals, cotangents):
    q, k, v, sinks, k_start, k_end, out, lse = residuals
    do, d_lse = cotangents
    # ds = p · (dp - delta) + p · d_lse: the gradient of lse joins delta.
    delta = product("bthd,bthd->bht", out, do) - d_lse  # (B, H, L)
    rows = ring.as_read(q), ring.as_read(do), lse, delta
    kv = ring.as_read(k), ring.as_read(v)
    dq, dk, dv = backward(ring, rows, kv, Visible(k_start, k_end))
    gradients = tuple(
        x[..., : q.shape[-1]].astype(q.dtype)
        for x in (ring.scale * dq, ring.scale * dk, dv)
    )
    d_sinks = None
    if sinks is not None:
        # A key whose value is 0: dp = 0 in ds = p · (dp - delta).
        p = jnp.exp(sinks[:, None] - lse)  # (B, H, L)
        d_sinks = -(p * delta).sum(axis=(0, 2))  # (H,), of this device's queries
        # Of a sink of -inf p is 0, and nan where a query sees no other key.
        d_sinks = jnp.where(sinks == -jnp.inf, 0, d_sinks)
    return *gradients, d_sinks, None, None


attend.defvjp(_attend_forward, _attend_backward)


def forward(ring: Ring, q: jax.Array, kv: Pair, visible: Visible) -> Pair:
    """Attends with the local queries to the keys of the whole ring.

    Returns:
      out (B, L, H, D) and lse (B, H, L) in float32.
    """
    chunks = Chunks(ring, kv, visible)
    queries = chunks.head_groups(q, axis=2)
    own, none = chunks.own(), [None] * len(queries)
    scores = ring.scores
    steps = {
        i: forward_steps(ring.backend, queries[chunks.group(i)], k, visible, scores)
        for i, (k, _) in own.items()
    }
    if len({k.shape[1] for k, _ in own.values()}) > 1:
        steps = {i: CommonForward(one) for i, one in steps.items()}
    tables = {i: chunks.table(i, one.prepare) for i, one in steps.items()}

    def run(i: int, kv: Pair, seen: Any, sums: tuple) -> tuple:
        return steps[i].attend(*kv, seen, sums[0]), None

    def skip(i: int, kv: Pair, sums: tuple) -> tuple:
        return sums[0] or steps[i].begin(nothing(queries[chunks.group(i)])), None

    def attend(
        static_step: int, n: jax.Array | int, held: Pairs, partial: list
    ) -> list:
        """Attends to the chunks of a step, from the partial result of each group."""
        now = chunks.at(tables, static_step, n)
        return chunks.computed(run, skip, now, held, (partial, {}))[0]

    def step(static_step: int, n: jax.Array | int, held: Pairs, partial: list) -> tuple:
        arriving = chunks.passed_on(held, static_step)
        partial = attend(static_step, n, held, partial)
        if arriving:
            # Without the barrier XLA may start all transfers at once, or late.
            (arriving, partial), _ = ring.barrier((arriving, partial))
        return arriving, partial

    def around(count: jax.Array | None) -> list:
        return chunks.run(step, (own, none), count)[1]

    count = ring.count(visible, chunks.length)
    if count is None:
        partial = around(None)
    else:
        alone = functools.partial(attend, 0, 0, own, none)
        partial = lax.cond(count > 0, lambda: around(count), alone)
    finish = {chunks.group(i): one.finish for i, one in steps.items()}
    out, lse = zip(*(finish[g](x) for g, x in enumerate(partial)), strict=True)
    return join(out, 2), join(lse, 1)


def backward(ring: Ring, rows: Rows, kv: Pair, visible: Visible) -> Gradients:
    """Computes the gradients of the local queries, and of the local keys and values.

    Returns:
      dq, dk and dv, float32; dq and dk without the factor `scale`.
    """
    chunks = Chunks(ring, kv, visible)
    groups = list(zip(*map(chunks.head_groups, rows, (2, 2, 1, 1)), strict=True))
    own, last = chunks.own(), chunks.schedule.last
    count, in_place = ring.count(visible, chunks.length), is_cpu()
    steps = {
        i: backward_steps(
            ring.backend, groups[chunks.group(i)], k, visible, ring.scores
        )
        for i, (k, _) in own.items()
    }
    tables = {i: chunks.table(i, x.prepare, not in_place) for i, x in steps.items()}
    gradients = functools.partial(chunks.computed, *_kernels(steps))
    of_group = {chunks.group(i): one for i, one in steps.items()}
    zeros = [
        of_group[g].begin(jnp.zeros_like(q, lse.dtype))
        for g, (q, _, lse, _) in enumerate(groups)
    ]
    # A loop of unknown length begins with zeros for the chunks that only visit.
    visitors = [i for i in own if count is not None and chunks[i].first]
    visiting = {i: _zeros(own[i], zeros[0].dtype) for i in visitors}

    def step(
        static_step: int, n: jax.Array | int, held: Pairs, dq: list, dkv: Pairs
    ) -> tuple:
        """Takes a step; the one after the last is that of the second half."""
        arriving = chunks.passed_on(held, static_step)
        moved = _followed(chunks, dkv, static_step - 1, count)
        sums = dkv | moved
        before, apart = (sums, {}) if in_place else ({}, sums)
        is_home = in_place and static_step > last
        now = {} if is_home else chunks.at(tables, static_step, n)
        dq, new = gradients(now, held, (dq, before))
        if arriving or moved:
            (arriving, apart, new), dq = ring.barrier((arriving, apart, new), dq)
        return arriving, dq, apart | {i: added(apart.get(i), new[i]) for i in new}

    def around() -> tuple[list, Pairs]:
        _, *sums = chunks.run(step, (own, zeros, visiting), count)
        return step(last + 1, last + 1, own, *sums)[1:]

    def alone() -> tuple[list, Pairs]:
        mine = {i: one for i, one in steps.items() if not chunks[i].first}
        whole = {i: chunks.table(i, one.prepare) for i, one in mine.items()}
        dq, dkv = gradients(chunks.at(whole, 0, 0), own, (zeros, {}))
        return dq, dkv | visiting

    if last and count is not None:
        dq, dkv = lax.cond(count > 0, around, alone)
    else:
        dq, dkv = around() if last else alone()
    dq = [of_group[g].finish(x) for g, x in enumerate(dq)]
    found = join(dq, 2), *_joined(chunks, dkv)
    dq, dk, dv = found if len(groups) == 1 else map(ring.heads_first, found)
    return dq, dk, dv


def _kernels(steps: dict[int, Any]) -> tuple[Callable, Callable]:
    """Returns what adds to dq of a head group, and to dk and dv of a chunk, or not."""

    def run(i: int, kv: Pair, seen: Any, sums: tuple) -> tuple:
        dq, *pair = steps[i].add(*kv, seen, *sums)
        return dq, tuple(pair)

    def skip(i: int, kv: Pair, sums: tuple) -> tuple:
        dq, pair = sums
        return dq, pair or _zeros(kv, dq.dtype)

    return run, skip


def _zeros(kv: Pair, dtype: jnp.dtype) -> Pair:
    """Returns zeros of the shape of k and v."""
    return jax.tree.map(lambda x: jnp.zeros_like(x, dtype), kv)


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
            moved[i] = ring.shift(sums, chunk.shifts_after(static_step))
        elif count is None:
            moved[i] = ring.shift(sums, -chunk.stops[-1])
        else:
            returning[i] = sums
    if count is None or not returning:
        return moved

    def shifted(shifts: int, _: jax.Array, held: Pairs) -> Pairs:
        return {i: ring.shift(x, shifts * chunks[i].way) for i, x in held.items()}

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
