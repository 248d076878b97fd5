"""The delta rule a segment of the tokens at a time, where memory binds."""

import jax
import jax.numpy as jnp
from jax import lax

from .rule import gated_delta


def gated_delta_in_segments(
    size: int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    is_first: jax.Array,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns `gated_delta`, whose backward holds the terms of one segment.

    size: tokens of a segment, which is recomputed in the backward from the state before
      it; 0 for all of them at once. Other arguments as of `gated_delta`.
    """
    axis = q.ndim - 3  # of the tokens
    tokens = q.shape[axis]
    if not 0 < size < tokens:
        return gated_delta(q, k, v, log_decay, beta, is_first, state)

    def cut(x: jax.Array) -> jax.Array:
        """Cuts (…, T, …) into (segments, …, size, …)."""
        # Padding decays nothing and writes nothing: its log_decay and beta are 0.
        widths = [(0, 0)] * x.ndim
        widths[axis] = 0, -tokens % size
        x = jnp.pad(x, widths)
        x = x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    # Inside a scan the loop itself keeps XLA from undoing it (prevent_cse).
    run_segment = jax.checkpoint(gated_delta, prevent_cse=False)

    def step(state: jax.Array, part: tuple) -> tuple[jax.Array, jax.Array]:
        q, k, v, log_decay, beta, is_first = part
        out, state = run_segment(q, k, v, log_decay, beta, is_first, state)
        return state, out

    heads = v.shape[-2]
    state = jnp.broadcast_to(state, (*q.shape[:axis], heads, *state.shape[-2:]))
    parts = cut(q), cut(k), cut(v), cut(log_decay), cut(beta), cut(is_first)
    state, out = lax.scan(step, state.astype(jnp.float32), parts)
    out = jnp.moveaxis(out, 0, axis)  # (…, segments, size, H, W)
    out = out.reshape(*out.shape[:axis], -1, *out.shape[axis + 2 :])
    return out[..., :tokens, :, :], state
