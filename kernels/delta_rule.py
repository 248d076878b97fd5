"""The gated delta rule (Gated DeltaNet, 2412.06464), in chunks and in plain XLA.

A head's state S (D, V) is read by queries and written by keys and values:

    S <- exp(log_decay) S;   S <- S + beta k (v - S^T k)^T;   out = S^T q

So tokens are an affine map of the state, S -> A S + B: `starting_map` has A and B.
Within a chunk the writes of all tokens are one triangular solve (the UT transform of
2406.06484); between chunks a loop carries the state. Everything is in float32.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import solve_triangular

from .precision import product

CHUNK = 64
"""Tokens of a chunk at most."""
EPSILON = 1e-6
"""Added to squared norms of queries and keys."""


def gated_delta(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    is_first: jax.Array,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns what queries read, (…, T, H, W) float32, and the state after all tokens.

    q, k: (…, T, H, D), normalised. v: (…, T, H, V). log_decay: (…, T, H), at most 0.
    beta: (…, T, H), from 0 to 1. A token with both 0 leaves the state as it is.
    is_first: bool (…, T), tokens of which the state is zero before they write.
    state: (…, H, D, W), the state before the first token. Of columns beyond the first
      V the values are 0.
    """
    tokens, wide = q.shape[-3], state.shape[-1] - v.shape[-1]
    size = min(CHUNK, tokens)

    def chunks(x: jax.Array, axis: int) -> jax.Array:
        """Cuts the tokens into chunks: (chunks, …, size, …), float32."""
        axis += x.ndim
        widths = [(0, -tokens % size if i == axis else 0) for i in range(x.ndim)]
        x = jnp.pad(x, widths).reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0).astype(jnp.float32)

    q, k, v = (jnp.swapaxes(chunks(x, -3), -3, -2) for x in (q, k, v))  # (…, H, C, D)
    log_decay, beta = (jnp.swapaxes(chunks(x, -2), -2, -1) for x in (log_decay, beta))
    document = jnp.cumsum(chunks(is_first, -1), axis=-1)[..., None, :]  # (…, 1, C)
    log_decay = jnp.where(jnp.diff(document, prepend=0) > 0, 0, log_decay)
    total = jnp.cumsum(log_decay, axis=-1)  # (…, H, C)
    # Of document 0 are the tokens that the state before the chunk reaches.
    kept = jnp.where(document == 0, jnp.exp(total), 0)
    is_last = document == document[..., -1:]
    left = jnp.where(is_last, jnp.exp(total[..., -1:] - total), 0)  # at the chunk's end

    sees = jnp.tri(size, dtype=bool) & (document[..., None] == document[..., None, :])
    between = total[..., None] - total[..., None, :]  # (…, H, C, C)
    decay = jnp.exp(jnp.where(sees, between, -jnp.inf))
    scores = decay * product("...id,...jd->...ij", q, k)
    system = decay * beta[..., None] * product("...id,...jd->...ij", k, k)
    written = jnp.concatenate([v, kept[..., None] * k], axis=-1) * beta[..., None]
    solve = functools.partial(solve_triangular, lower=True, unit_diagonal=True)
    values, read = jnp.split(solve(system, written), [v.shape[-1]], axis=-1)
    values = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, wide)])

    def step(state: jax.Array, chunk: tuple) -> tuple[jax.Array, jax.Array]:
        values, read, queries, scores, keys, stays = chunk
        new = values - product("...cd,...dw->...cw", read, state)  # (…, H, C, W)
        out = product("...cd,...dw->...cw", queries, state)
        out += product("...ij,...jw->...iw", scores, new)
        state = stays[..., None, None] * state
        return state + product("...cd,...cw->...dw", keys, new), out

    keys = left[..., None] * k
    chunked = values, read, kept[..., None] * q, scores, keys, kept[..., -1]
    state, out = lax.scan(step, state.astype(jnp.float32), chunked)
    out = jnp.moveaxis(jnp.swapaxes(out, -3, -2), 0, -4)  # (…, chunks, C, H, W)
    return out.reshape(*out.shape[:-4], -1, *out.shape[-2:])[..., :tokens, :, :], state


def starting_map(rows: tuple[int, ...], depth: int, values: int) -> jax.Array:
    """Returns the state whose results are an affine map: (*rows, D, V + D).

    The last D columns of what comes out multiply the state that is not known yet.
    """
    identity = jnp.eye(depth, values + depth, values, jnp.float32)
    return jnp.broadcast_to(identity, (*rows, depth, values + depth))


def normalised(x: jax.Array) -> jax.Array:
    """Divides each head of x (…, D) by its norm, in float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.square(x).sum(axis=-1, keepdims=True) + EPSILON)


def short_convolution(
    x: jax.Array, before: jax.Array, kernel: jax.Array, positions: jax.Array
) -> jax.Array:
    """Returns silu of each channel's causal convolution, float32, as x.

    x: (…, T, H, D). before: (…, W - 1, H, D), the tokens before these. kernel:
    (W, H, D), of which the last multiplies a token itself. positions: int32 (…, T); a
    token sees no further back than its document's first, of position 0.
    """
    width, tokens = len(kernel), x.shape[-3]
    whole = jnp.concatenate([before, x], axis=-3).astype(jnp.float32)
    out = jnp.zeros((), jnp.float32)
    for back in range(width):
        first = width - 1 - back
        seen = lax.slice_in_dim(whole, first, first + tokens, axis=-3)
        is_here = (positions >= back)[..., None, None]
        out += jnp.where(is_here, seen * kernel[first].astype(jnp.float32), 0)
    return jax.nn.silu(out)
