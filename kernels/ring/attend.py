"""Ring attention: exact attention over a sequence sharded over a ring of devices.

Every device keeps its queries; keys and values go around: see `forward`, `backward`.

A query's keys on a visiting shard are intervals of the shard's slots, counted by the
layout: neither these files nor the kernels know layouts or masks. A step runs a kernel
for each interval. A ring of one device is attention on that device.

A head's attention sink is a key that every query sees, with a logit of its own and a
value of 0: the partial result (0, sink), merged after the last ring step.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ..layouts import front_slots
from ..masks import Visible
from ..merge import merge
from ..precision import product
from .backward import backward
from .comm import Pair, Ring
from .forward import forward


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
    visible = seen = Visible(*(bound[..., rows] for bound in visible))
    if keys < length:
        seen = Visible(*(jnp.minimum(bound, end) for bound in visible))
    kv = ring.as_read(k[:, :keys]), ring.as_read(v[:, :keys])  # D, or in whole lanes
    out, lse = forward(ring, ring.as_read(q[:, rows]), kv, seen, length)
    if sinks is not None:
        # Here and not as the first step's carry: it costs no zeros to write and read,
        # as XLA fuses it with the cast.
        sink = jnp.broadcast_to(sinks[:, None], lse.shape)  # (B, H, T)
        out, lse = merge((jnp.zeros((), out.dtype), sink), (out, lse))
    out = ring.heads_first(out[..., : q.shape[-1]].astype(q.dtype))  # (B, T, H, D)
    if keys < length:
        is_wrong = (visible.k_start < visible.k_end) & (visible.k_end > end)
        out = jnp.where(is_wrong.any(axis=0)[..., None, None], jnp.nan, out)
    return out, lse


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
