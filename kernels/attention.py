"""Exact attention on one device, under any mask of `masks`."""

import jax
import jax.numpy as jnp

from . import checks
from .backends import Backend
from .layouts import Contiguous
from .masks import Mask, Visible, causal, full
from .ring_attention import ring_attention


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    visible: Mask | Visible = causal(),
    scale: float | None = None,
    sinks: jax.Array | None = None,
    soft_cap: float | None = None,
    implementation: str | Backend | None = None,
) -> jax.Array:
    """Returns softmax(scale · q kᵀ) v over the visible keys; differentiable.

    q: (B, T, H, D). k, v: (B, S, K, D), H a multiple of K; query head h reads
      key/value head h // (H // K).
    visible: a mask of `masks`, or `Visible` bounds (B or 1, T) of key indices, neither
      of them decreasing along T; or (m, B or 1, T) of m intervals that share no key.
      Others are refused where values are known; under `jit` they are not, and the
      result is wrong: see `checks.check_increasing`.
      Tokens that the mask's `padding` covers may hold anything; all others must be
      finite, and all of them where bounds are given, as nan spreads to queries from
      which it is masked.
    scale: factor on the scores, 1/sqrt(D) unless given; a number, not traced.
    sinks: (H,), logit of a key of each head that every query sees, whose value is 0; a
      parameter, which has a gradient.
    soft_cap: scores s become soft_cap · tanh(s / soft_cap); a number, not traced. Sinks
      are not capped.
    implementation: "reference" (whole score matrix), "blockwise" (XLA loops over the
      live tiles), "pallas_tpu" (kernels for TPUs), "hopper" (for H100 and H200, in 16
      bits), "hopper_deterministic" (the same gradients each time), "triton" (for other
      NVIDIA GPUs), "tokamax" (for Blackwell, if it is installed), or a
      `backends.Backend`. A named one runs or raises; None takes the best one for the
      device.

    Returns:
      (B, T, H, D) in the type of q; zeros for a query without visible keys.

    Raises:
      ValueError: operands or bounds that do not fit together, or an unknown
        implementation.
    """
    return attention_with_lse(
        q,
        k,
        v,
        visible=visible,
        scale=scale,
        sinks=sinks,
        soft_cap=soft_cap,
        implementation=implementation,
    )[0]


def attention_with_lse(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    visible: Mask | Visible = causal(),
    scale: float | None = None,
    sinks: jax.Array | None = None,
    soft_cap: float | None = None,
    implementation: str | Backend | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes `attention` and the log of each softmax's sum, for `merge.merge`.

    Returns:
      out, and lse (B, H, T) in float32, natural logarithm, -inf for a query without
      visible keys; with sinks, which the sum contains, never. Both are differentiable.
    """
    checks.check_operands(q, k, v)
    queries, keys = (jnp.arange(x.shape[1], dtype=jnp.int32) for x in (q, k))
    mask = full()
    if isinstance(visible, Mask):
        mask, visible = visible, visible(queries, k.shape[1])
    q = mask.fill_padding(q, queries)
    k, v = (mask.fill_padding(x, keys) for x in (k, v))
    k_start, k_end = checks.check_visible(q, visible)
    out, lse = ring_attention(
        q,
        k,
        v,
        k_start,
        k_end,
        axis_name=(),
        layout=Contiguous(),
        scale=scale,
        sinks=sinks,
        soft_cap=soft_cap,
        implementation=implementation,
        with_lse=True,
    )
    lse = mask.fill_padding(lse, queries, -jnp.inf, axis=2)
    return mask.fill_padding(out, queries), lse
