"""The oracle: attention with the whole score matrix, and its gradients, in plain jnp.

It stays stupid on purpose. Every other implementation has the same two functions and
is compared with this one, run in float64. As in every implementation, matrix products
take operands of the inputs' own type and add up in float32 or wider, so the oracle run
in bfloat16 shows the error that bfloat16 alone makes.
"""

import jax
import jax.numpy as jnp

from .block_sizes import BlockSizes
from .masks import in_interval
from .merge import Partial, merge
from .precision import gradient_factors, product


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_start: jax.Array,
    k_end: jax.Array,
    *,
    scale: float,
    block_sizes: BlockSizes | None = None,
    carry: Partial | None = None,
) -> Partial:
    """Attention of every query to the key slots [k_start, k_end).

    q: (B, T, H, D). k, v: (B, S, K, D), H a multiple of K; query head h reads key/value
      head h // (H // K).
    k_start, k_end: int32 (B, T) or (1, T), within [0, S], not decreasing along T.
    scale: factor on the scores.
    block_sizes: tile sizes; no meaning here.
    carry: a partial result over other keys, merged into this one.

    Returns:
      out (B, T, H, D) and the natural-log lse (B, H, T), float32 (float64 for float64
      inputs). A row that sees nothing has out = 0 and lse = -inf.
    """
    del block_sizes
    scores, seen = _scores(q, k, k_start, k_end, scale)  # (B, K, G, T, S)
    lse = jax.nn.logsumexp(scores, axis=-1)
    p = _probabilities(scores, lse, seen)
    out = product("bkgts,bskd->btkgd", p.astype(v.dtype), v).reshape(q.shape)
    lse = lse.reshape(q.shape[0], q.shape[2], q.shape[1])
    return (out, lse) if carry is None else merge(carry, (out, lse))


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    do: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    k_start: jax.Array,
    k_end: jax.Array,
    *,
    scale: float,
    block_sizes: BlockSizes | None = None,
    dq: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of the attention to these keys (FlashAttention, 2205.14135, alg. 4).

    q, k, v, k_start, k_end, scale, block_sizes: as in `forward`.
    do: (B, T, H, D), gradient of the whole result.
    lse: (B, H, T), that of the whole result, over all keys of the ring.
    delta: (B, H, T), the sum over D of do · out, less the gradient of lse if any.
    dq: (B, T, H, D) float32, gradient gathered so far, to which this share is added.

    Returns:
      dq plus this share, dk and dv (B, S, K, D): float32.
    """
    del block_sizes
    scores, seen = _scores(q, k, k_start, k_end, scale)
    grouped = (*scores.shape[:3], q.shape[1])  # (B, K, G, T)
    rows = (q.shape[0], q.shape[1], *grouped[1:3], q.shape[3])  # (B, T, K, G, D)
    q, do = q.reshape(rows), do.reshape(rows)
    p = _probabilities(scores, lse.reshape(grouped), seen)
    dp = product("btkgd,bskd->bkgts", do, v)
    before, after = gradient_factors(scale, q.dtype)
    ds = (before * p * (dp - delta.reshape(grouped)[..., None])).astype(q.dtype)
    dv = product("bkgts,btkgd->bskd", p.astype(q.dtype), do)
    dk = after * product("bkgts,btkgd->bskd", ds, q)
    share = after * product("bkgts,bskd->btkgd", ds, k)
    return dq + share.reshape(dq.shape), dk, dv


def _scores(
    q: jax.Array, k: jax.Array, k_start: jax.Array, k_end: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Masked scores (B, K, G, T, S) and which of them count (B, 1, 1, T, S)."""
    batch, length, heads, depth = q.shape
    keys, kv_heads = k.shape[1:3]
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, depth)
    s = scale * product("btkgd,bskd->bkgts", q, k)
    slot = jnp.arange(keys, dtype=k_start.dtype)
    seen = in_interval(k_start[..., None], slot, k_end[..., None])  # (B, T, S)
    seen = seen[:, None, None]
    return jnp.where(seen, s, -jnp.inf), seen


def _probabilities(scores: jax.Array, lse: jax.Array, seen: jax.Array) -> jax.Array:
    # Where nothing is seen, lse is -inf and the difference nan: hence the where.
    return jnp.where(seen, jnp.exp(scores - lse[..., None]), 0)
