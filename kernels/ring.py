"""Ring attention: exact attention over a sequence sharded over a ring of devices.

Every device keeps its queries. In each ring step, keys and values are sent to the next
device while those that have arrived are attended to (Ring Attention, 2310.01889). In
the backward pass dq stays, and dk and dv follow their keys and values one step behind,
so that the next step's compute overlaps their transfer too; half of the local block's
queries are deferred to overlap the last transfer.

A query's keys on a visiting shard are an interval of the shard's slots, counted by the
layout: neither this file nor the kernels know layouts or masks. A ring of one device is
attention on that device.

A head's attention sink is a key that every query sees, with a logit of its own and a
value of 0: the partial result (0, sink), merged after the last ring step.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import layout as memory_layout

from .backends import Backend
from .device import device_kind
from .layouts import Array, Layout, front_slots
from .masks import Visible
from .merge import merge
from .precision import product

UNROLLED_STEPS = 16
"""Rings with more steps are compiled as a loop: its compile time does not grow."""

LOOP_UNROLL = 2
"""Ring steps in an iteration of that loop: keys alternate between two buffers, and are
not copied back into one."""

LANES = 128
"""A TPU's memory pads the last dimension of arrays to a multiple of this."""

Pair = tuple[jax.Array, jax.Array]
Bounds = tuple[Array, Array]


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
    keep_tail: as in `ring_attention.make_ring_attention`.
    """

    axis_name: str | tuple[str, ...] | None
    size: int
    layout: Layout
    scale: float
    backend: Backend
    soft_cap: float | None = None
    keep_tail: bool = False

    @property
    def scores(self) -> dict[str, float | None]:
        """Returns the backends' arguments of what becomes of q · k."""
        return {"scale": self.scale, "soft_cap": self.soft_cap}

    def shard(self) -> jax.Array | int:
        """Returns the number of the shard that this device's queries belong to."""
        return lax.axis_index(self.axis_name) if self.size > 1 else 0

    def slots(self, shard: jax.Array | int, visible: Visible, length: int) -> Bounds:
        """Returns the interval [k_start, k_end) of visible slots of a shard."""
        k_start = self.layout.count(shard, visible.k_start, self.size, length)
        k_end = self.layout.count(shard, visible.k_end, self.size, length)
        return k_start, k_end  # as visible, (B or 1, L)

    def rotate(self, arrays: Pair) -> Pair:
        """Sends the arrays to the next device of the ring."""
        neighbours = [(d, (d + 1) % self.size) for d in range(self.size)]
        return lax.ppermute(arrays, self.axis_name, neighbours)

    def as_read(self, x: jax.Array) -> jax.Array:
        """Lays out (B, L, H, D) as a TPU's kernels read it: (B, H, L, D) in memory.

        D is padded to a multiple of 128, which it takes in a TPU's memory anyway. An
        array sent like this arrives like this; otherwise each ring step would transpose
        and pad it. On other devices, and in a ring of one, x is returned unchanged.
        """
        if self.size == 1 or not device_kind().startswith("TPU"):
            return x
        x = jnp.pad(x, ((0, 0),) * 3 + ((0, -x.shape[-1] % LANES),))
        heads_first = memory_layout.Layout(major_to_minor=(0, 2, 1, 3))
        return memory_layout.with_layout_constraint(x, heads_first)


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
    k_start, k_end: int32 (B, L) or (1, L), half-open interval of the key indices that
      each local query attends to.

    Returns:
      out (B, L, H, D) in the type of q, lse (B, H, L) in float32.
    """
    return _attend_forward(ring, q, k, v, sinks, k_start, k_end)[0]


def _attend_forward(ring, q, k, v, sinks, k_start, k_end):
    length = k.shape[1]
    keys = front_slots(ring.layout, ring.size, length) if ring.keep_tail else 0
    rows = q.shape[1] // 2 if keys else 0
    qkv, visible, front = (q, k, v), Visible(k_start, k_end), ()
    if rows:
        front = _attend_rows(ring, slice(rows), keys, qkv, sinks, visible)
        qkv, _ = lax.optimization_barrier((qkv, front))  # one ring after the other
    tail = _attend_rows(ring, slice(rows, None), length, qkv, sinks, visible)
    # Named here, where the backward's residuals are made, so that a remat policy can
    # save these two and not rerun the ring (names given outside have no effect).
    out, lse = map(checkpoint_name, tail, ("attention_out", "attention_lse"))
    if front:
        names = "attention_front_out", "attention_front_lse"
        early, early_lse = map(checkpoint_name, front, names)
        out = jnp.concatenate([early, out], axis=1)  # (B, L, H, D)
        lse = jnp.concatenate([early_lse, lse], axis=2)  # (B, H, L)
    return (out, lse), (q, k, v, sinks, k_start, k_end, out, lse)


def _attend_rows(ring, rows, keys, qkv, sinks, visible):
    """Attends with a slice of the queries to the first `keys` slots of every shard.

    A query that sees other slots gets nan: its result would be wrong.
    """
    (q, k, v), length, end = qkv, qkv[1].shape[1], keys * ring.size
    visible = seen = Visible(*(bound[:, rows] for bound in visible))
    if keys < length:
        seen = Visible(*(jnp.minimum(bound, end) for bound in visible))
    kv = ring.as_read(k[:, :keys]), ring.as_read(v[:, :keys])  # D, or in whole lanes
    out, lse = _forward_steps(ring, ring.as_read(q[:, rows]), kv, seen, length)
    if sinks is not None:
        # Here and not as the first step's carry: it costs no zeros to write and read,
        # as XLA fuses it with the cast.
        sink = jnp.broadcast_to(sinks[:, None], lse.shape)  # (B, H, T)
        out, lse = merge((jnp.zeros((), out.dtype), sink), (out, lse))
    out = out[..., : q.shape[-1]].astype(q.dtype)  # (B, T, H, D)
    if keys < length:
        is_wrong = (visible.k_start < visible.k_end) & (visible.k_end > end)
        out = jnp.where(is_wrong[..., None, None], jnp.nan, out)
    return out, lse


def _attend_backward(ring, residuals, cotangents):
    q, k, v, sinks, k_start, k_end, out, lse = residuals
    do, d_lse = cotangents
    # ds = p · (dp - delta) + p · d_lse: the gradient of lse joins delta.
    delta = product("bthd,bthd->bht", out, do) - d_lse  # (B, H, L)
    rows = ring.as_read(q), ring.as_read(do), lse, delta
    kv = ring.as_read(k), ring.as_read(v)
    gradients = _backward_steps(ring, rows, kv, Visible(k_start, k_end))
    gradients = (x[..., : q.shape[-1]].astype(q.dtype) for x in gradients)
    d_sinks = None
    if sinks is not None:
        # A key whose value is 0: dp = 0 in ds = p · (dp - delta).
        p = jnp.exp(sinks[:, None] - lse)  # (B, H, L)
        d_sinks = -(p * delta).sum(axis=(0, 2))  # (H,), of this device's queries
    return *gradients, d_sinks, None, None


attend.defvjp(_attend_forward, _attend_backward)


def _forward_steps(
    ring: Ring, q: jax.Array, kv: Pair, visible: Visible, length: int
) -> Pair:
    def compute(step, kv, carry):
        source = (ring.shard() - step) % ring.size
        bounds = ring.slots(source, visible, length)
        return ring.backend.forward(q, *kv, *bounds, **ring.scores, carry=carry)

    def step_and_rotate(step, kv, carry):
        arriving = ring.rotate(kv)
        carry = compute(step, kv, carry)
        # Without the barrier XLA may start all transfers at once, or late.
        return lax.optimization_barrier((arriving, carry))

    if ring.size == 1:
        return compute(0, kv, None)
    state = step_and_rotate(0, kv, None)
    state = _loop(1, ring.size - 1, step_and_rotate, state)
    return compute(ring.size - 1, *state)


def _backward_steps(
    ring: Ring, fixed: tuple[jax.Array, ...], kv: Pair, visible: Visible
) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, do, lse, delta = fixed
    length = kv[0].shape[1]

    def bounds(step):
        return ring.slots((ring.shard() - step) % ring.size, visible, length)

    def compute(bounds, kv, dq):
        dq, dk, dv = ring.backend.backward(
            q, *kv, do, lse, delta, *bounds, **ring.scores, dq=dq
        )
        return dq, (dk, dv)

    def step_and_rotate(step, kv, dq, dkv):
        # The gradients summed so far for these keys follow them, one step behind.
        arriving, dkv = ring.rotate(kv), ring.rotate(dkv)
        dq, partial = compute(bounds(step), kv, dq)
        arriving, dkv, dq, partial = lax.optimization_barrier(
            (arriving, dkv, dq, partial)
        )
        return arriving, dq, _add(dkv, partial)

    dq = jnp.zeros(q.shape, lse.dtype)  # (B, L, H, D)
    if ring.size == 1:
        dq, (dk, dv) = compute(bounds(0), kv, dq)
        return dq, dk, dv
    # The local block is computed in halves: the first half of the queries overlaps the
    # first transfer of keys, the second half the transfer of dk and dv to their owner.
    early, late = halves(bounds(0), length)
    arriving = ring.rotate(kv)
    dq, partial = compute(early, kv, dq)
    state = lax.optimization_barrier((arriving, dq, partial))
    visiting, dq, dkv = _loop(1, ring.size - 1, step_and_rotate, state)
    dkv = ring.rotate(dkv)
    dq, partial = compute(bounds(ring.size - 1), visiting, dq)
    dkv, dq, partial = lax.optimization_barrier((dkv, dq, partial))
    dkv = ring.rotate(_add(dkv, partial))
    dq, partial = compute(late, kv, dq)
    dkv, dq, partial = lax.optimization_barrier((dkv, dq, partial))
    return dq, *_add(dkv, partial)


def halves(bounds: Bounds, length: int) -> tuple[Pair, Pair]:
    """Splits intervals into those of the first half of the queries, and of the second.

    bounds: (B, L) each, within [0, length]. The other half's are empty, at the end of
    the keys or at their start, so that bounds do not decrease along the queries.
    """
    first = np.arange(bounds[0].shape[1]) < bounds[0].shape[1] // 2
    k_start, k_end = bounds
    early = jnp.where(first, k_start, length), jnp.where(first, k_end, length)
    late = jnp.where(first, 0, k_start), jnp.where(first, 0, k_end)
    return early, late


def _loop(first: int, end: int, body: Callable, state: tuple) -> tuple:
    """Runs `state = body(step, *state)` for the ring steps first … end - 1."""
    if end - first < UNROLLED_STEPS:
        for step in range(first, end):
            state = body(step, *state)
        return state
    steps = jnp.arange(first, end, dtype=jnp.int32)
    return lax.scan(
        lambda state, step: (body(step, *state), None), state, steps, unroll=LOOP_UNROLL
    )[0]


def _add(dkv: Pair, partial: Pair) -> Pair:
    return dkv[0] + partial[0], dkv[1] + partial[1]
