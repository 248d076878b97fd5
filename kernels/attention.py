"""The door for one device: exact attention of queries to what a mask lets them see."""

import jax
import jax.numpy as jnp

from kernels.backend import choose
from kernels.layout import Contiguous
from kernels.masks import Mask, Visible, causal
from kernels.operands import check_operands, checked_bounds
from kernels.ring import Ring, attend


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    visible: Mask | Visible = causal(),
    scale: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """softmax(scale · q kᵀ) v over the visible keys, differentiable in q, k and v.

    q: (B, T, H, D). k, v: (B, S, K, D), H a multiple of K; query head h reads
      key/value head h // (H // K).
    visible: a mask of `masks`, or `Visible` bounds (B or 1, T) of key indices, neither
      of them decreasing along T.
    scale: factor on the scores, 1/sqrt(D) unless given.
    implementation: "reference" (whole score matrix), "blockwise" (XLA loops over the
      live tiles), "pallas_tpu" (kernels for TPUs), "hopper" (for H100 and H200, in 16
      bits), "hopper_deterministic" (the same gradients each time) or "triton" (for
      other NVIDIA GPUs); a named one runs or raises, None takes the best there is.

    Returns:
      (B, T, H, D) in the type of q; zeros for a query that sees nothing.

    Raises:
      ValueError: operands or bounds that do not fit together, or an unknown
        implementation.
    """
    return attention_with_lse(
        q, k, v, visible=visible, scale=scale, implementation=implementation
    )[0]


def attention_with_lse(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    visible: Mask | Visible = causal(),
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """As `attention`, with the log of each softmax's sum, for `merge.merge`.

    Returns:
      out, and lse (B, H, T) in float32, natural logarithm, -inf for a query that sees
      nothing. Both are differentiable.
    """
    check_operands(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if isinstance(visible, Mask):
        visible = visible(jnp.arange(q.shape[1], dtype=jnp.int32), k.shape[1])
    visible = checked_bounds(q, visible, k.shape[1])
    backend = choose(implementation, q.dtype)
    ring = Ring(None, 1, Contiguous(), scale, backend)
    return attend(ring, q, k, v, *visible)
