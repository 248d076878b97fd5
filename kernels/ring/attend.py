"""Ring attention: exact attention over a sequence sharded over a ring of devices.

Every device keeps its queries; keys and values go around, while it attends to the ones
that are here. Two chunks of heads, a and b, one each way round (2310.01889), as device
1 of a ring of four attends to them, and what it sends meanwhile:

                  step 0         step 1             step 2             step 3
    device 1      own a, b       a of 0, b of 2     a of 3, b of 3     a of 2, b of 0
    sends         a -> 2, b -> 0 both on: -> 2, 0   both on: -> 2, 0

`forward` and `backward` draw each of their steps.

Letters: B batch, T tokens of the sequence, L of a shard, N devices, S slots of a chunk,
H query heads, K key/value heads, D head size, m intervals of a query.

Bounds come as indices in the sequence. The layout counts them into slots of a visiting
shard, which is all that kernels see of masks and layouts; a step runs a kernel for each
interval of slots. A ring of one device is attention on that device.

A head's attention sink is a key that every query sees, with a logit of its own and a
value of 0: the partial result (0, sink), merged after the last ring step.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ..backends.steps import Rows, rounded
from ..masks import Visible
from ..merge import merge
from ..precision import product
from .backward import BackwardPass
from .chunks import Pair
from .comm import Ring
from .forward import ForwardPass
from .natural import bounds_to_shard, to_shard, to_slice


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
    k_start, k_end: int32 (m, B or 1, L), m half-open intervals of key indices in the
      sequence that each local query attends to, which share no key.
    All of them are slices of natural order, as the results are, if ring.natural_order.

    Returns:
      out (B, L, H, D) in the type of q, lse (B, H, L) in float32.
    """
    return _attend_forward(ring, q, k, v, sinks, k_start, k_end)[0]


def _attend_forward(ring, q, k, v, sinks, k_start, k_end):
    # Keys first: the ring sends them on before any query is read.
    k = to_shard(ring, k)
    v = to_shard(ring, v)
    q = to_shard(ring, q)
    visible = bounds_to_shard(ring, Visible(k_start, k_end))
    kv = ring.as_read(k), ring.as_read(v)  # D; on a TPU in whole lanes
    may_round = sinks is None  # else they are merged into out
    out, lse = ForwardPass.prepare(ring, ring.as_read(q), kv, visible, may_round).run()
    if sinks is not None:
        # Here and not as the first step's carry, whose zeros would be written and read:
        # XLA fuses this with the cast below.
        sink = jnp.broadcast_to(sinks[:, None], lse.shape)  # (B, H, L)
        out, lse = merge((jnp.zeros((), out.dtype), sink), (out, lse))
    out = ring.heads_first(out[..., : q.shape[-1]].astype(q.dtype))  # (B, L, H, D)
    out = to_slice(ring, out)
    lse = to_slice(ring, lse, axis=2)
    # Named here, where the backward's residuals are made, so that a remat policy can
    # save these two and not rerun the ring (names given outside have no effect).
    out = checkpoint_name(out, "attention_out")
    lse = checkpoint_name(lse, "attention_lse")
    return (out, lse), (q, k, v, sinks, visible, out, lse)


def _attend_backward(ring, residuals, cotangents):
    q, k, v, sinks, visible, out, lse = residuals
    do, d_lse = cotangents
    # ds = p · (dp - delta) + p · d_lse: the gradient of lse joins delta.
    delta = product("bthd,bthd->bht", out, do) - d_lse  # (B, H, L)
    # q, k, v and bounds were kept as shards. Of out only delta, a number a row, has to
    # become one: what a remat policy saves is not exchanged again.
    do = to_shard(ring, do)
    lse = to_shard(ring, lse, axis=2)
    delta = to_shard(ring, delta, axis=2)
    rows = Rows(ring.as_read(q), ring.as_read(do), lse, delta)
    kv = ring.as_read(k), ring.as_read(v)
    gradients = BackwardPass.prepare(ring, rows, kv, visible).run()
    # Kernels leave the factor `scale` out of the sums dq and dk.
    dq = rounded(gradients.dq, ring.scale, q.dtype)
    dk = rounded(gradients.dk, ring.scale, q.dtype)
    dv = rounded(gradients.dv, 1.0, q.dtype)
    depth = q.shape[-1]
    dq = dq[..., :depth]  # (B, L, H, D), without the lanes' padding
    dk = dk[..., :depth]  # (B, L, K, D)
    dv = dv[..., :depth]
    d_sinks = None
    if sinks is not None:
        # A key whose value is 0: dp = 0 in ds = p · (dp - delta).
        p = jnp.exp(sinks[:, None] - lse)  # (B, H, L)
        d_sinks = -(p * delta).sum(axis=(0, 2))  # (H,), of this device's queries
        # For a sink of -inf p is 0, or nan where a query sees no other key.
        d_sinks = jnp.where(sinks == -jnp.inf, 0, d_sinks)
    dk = to_slice(ring, dk)
    dv = to_slice(ring, dv)
    return to_slice(ring, dq), dk, dv, d_sinks, None, None


attend.defvjp(_attend_forward, _attend_backward)
