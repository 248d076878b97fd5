"""Oracle: attention with the whole score matrix, and its gradients, in plain jnp.

It stays simple on purpose. Every other implementation has the same two functions and
is compared with this one, run in float64. As in every implementation, matrix products
take operands of the inputs' own type and add up in float32 or wider, so the oracle run
in bfloat16 shows the error that bfloat16 alone makes.
"""

import jax
import jax.numpy as jnp

from ..masks import in_interval
from ..merge import Partial, added, merge
from ..precision import Scores, product, soft_capped


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_start: jax.Array,
    k_end: jax.Array,
    *,
    scale: float,
    soft_cap: float | None = None,
    carry: Partial | None = None,
) -> Partial:
    """Computes the attention of every query to the key slots [k_start, k_end).

    q: (B, T, H, D). k, v: (B, S, K, D), H a multiple of K; query head h reads key/value
      head h // (H // K).
    k_start, k_end: int32 (B, T) or (1, T), within [0, S], not decreasing along T.
    scale: factor on the scores.
    soft_cap: scores s become soft_cap · tanh(s / soft_cap), if given.
    carry: a partial result over other keys, merged into this one.

    Returns:
      out (B, T, H, D) and the natural-log lse (B, H, T), float32 (float64 for float64
      inputs). A row without visible keys has out = 0 and lse = -inf.
    """
    mask = _mask(k.shape[1], k_start, k_end)  # (B, T, S)
    partial = masked(q, k, v, mask, Scores(scale, soft_cap))
    return partial if carry is None else merge(carry, partial)


def masked(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, scores: Scores
) -> Partial:
    """Computes `forward` under a mask, bool (B, T, S)."""
    s, mask, _ = _scores(q, k, mask, scores)  # (B, K, G, T, S)
    lse = jax.nn.logsumexp(s, axis=-1)  # (B, K, G, T)
    p = _probabilities(s, lse, mask)  # (B, K, G, T, S)
    out = product("bkgts,bskd->btkgd", p.astype(v.dtype), v).reshape(q.shape)
    return out, lse.reshape(q.shape[0], q.shape[2], q.shape[1])  # (B, H, T)


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
    soft_cap: float | None = None,
    dq: jax.Array,
    dkv: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes gradients of the attention to these keys (FlashAttention, 2205.14135).

    q, k, v, k_start, k_end, scale, soft_cap: as in `forward`.
    do: (B, T, H, D), gradient of the whole result.
    lse: (B, H, T), of the whole result, over all keys of the ring.
    delta: (B, H, T), the sum over D of do · out, less the gradient of lse if any.
    dq: (B, T, H, D) float32, to which the partial gradient of these keys is added.
    dkv: dk and dv (B, S, K, D) float32, to which that of these queries is; or zeros.

    Returns:
      dq (B, T, H, D), dk and dv (B, S, K, D): float32. The factor `scale` of dq and dk
      is left to the end of a ring.
    """
    mask = _mask(k.shape[1], k_start, k_end)  # (B, T, S)
    scores = Scores(scale, soft_cap)
    s, mask, slope = _scores(q, k, mask, scores)  # (B, K, G, T, S)
    grouped = s.shape[:4]  # (B, K, G, T)
    rows = (q.shape[0], q.shape[1], *grouped[1:3], q.shape[3])
    q = q.reshape(rows)  # (B, T, K, G, D)
    do = do.reshape(rows)  # (B, T, K, G, D)
    p = _probabilities(s, lse.reshape(grouped), mask)  # (B, K, G, T, S)
    dp = product("btkgd,bskd->bkgts", do, v)  # (B, K, G, T, S)
    ds = (p * (dp - delta.reshape(grouped)[..., None]) * slope).astype(q.dtype)
    dv = product("bkgts,btkgd->bskd", p.astype(q.dtype), do)  # (B, S, K, D)
    dk = product("bkgts,btkgd->bskd", ds, q)  # (B, S, K, D)
    partial = product("bkgts,bskd->btkgd", ds, k)  # (B, T, K, G, D)
    return dq + partial.reshape(dq.shape), *added(dkv, (dk, dv))


def _mask(keys: int, k_start: jax.Array, k_end: jax.Array) -> jax.Array:
    """Returns which keys are visible, (B, T, S)."""
    slot = jnp.arange(keys, dtype=k_start.dtype)  # (S,)
    return in_interval(k_start[..., None], slot, k_end[..., None])


def _scores(
    q: jax.Array, k: jax.Array, mask: jax.Array, scores: Scores
) -> tuple[jax.Array, jax.Array, jax.Array | float]:
    """Returns masked scores (B, K, G, T, S), mask (B, 1, 1, T, S), slope of the cap."""
    batch, length, heads, depth = q.shape
    kv_heads = k.shape[2]
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, depth)
    s = scores.scale * product("btkgd,bskd->bkgts", q, k)  # (B, K, G, T, S)
    s, slope = soft_capped(s, scores.soft_cap)  # (B, K, G, T, S)
    mask = mask[:, None, None]  # (B, 1, 1, T, S)
    return jnp.where(mask, s, -jnp.inf), mask, slope


def _probabilities(s: jax.Array, lse: jax.Array, mask: jax.Array) -> jax.Array:
    # In rows without visible keys lse is -inf and the difference nan: hence the where.
    return jnp.where(mask, jnp.exp(s - lse[..., None]), 0)
