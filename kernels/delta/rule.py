"""The gated delta rule (Gated DeltaNet, 2412.06464), in chunks and in plain XLA.

A head's state S (D, V) is read by queries and written by keys and values:

    S <- exp(log_decay) S;   S <- S + beta k (v - S^T k)^T;   out = S^T q

So tokens are an affine map of the state, S -> A S + B (see `after`).
Within a chunk the writes of all tokens are one triangular solve (the UT transform of
2406.06484); between chunks a loop carries the state. Everything is in float32.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import solve_triangular

from ..precision import product

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
    state: (…, H, D, W), or what becomes that, before the first token. Of columns beyond
      the first V the values are 0.
    """
    depth, values = state.shape[-2:]
    tokens = q.shape[-3]
    size = min(CHUNK, tokens)
    lead = q.ndim - 3  # axes before the tokens
    state = jnp.broadcast_to(state, (*q.shape[:lead], q.shape[-2], depth, values))

    def chunks(x: jax.Array) -> jax.Array:
        """Cuts the tokens (…, T, H, …) into chunks: (chunks, …, H, size, …) float32."""
        widths = [(0, -tokens % size if axis == lead else 0) for axis in range(x.ndim)]
        x = jnp.pad(x, widths).astype(jnp.float32)
        x = x.reshape(*x.shape[:lead], -1, size, *x.shape[lead + 1 :])
        return jnp.moveaxis(jnp.moveaxis(x, lead + 2, lead + 1), lead, 0)

    operands = q, k, v, log_decay, beta, is_first[..., None]
    q, k, v, log_decay, beta, is_first = map(chunks, operands)
    document = jnp.cumsum(is_first, axis=-1)  # (…, 1, C)
    # A first token's decay is of a state that it does not see.
    log_decay = jnp.where(is_first > 0, 0, log_decay)
    total = jnp.cumsum(log_decay, axis=-1)  # (…, H, C)
    # Summed for each pair: differences of long sums would lose digits.
    between = log_decay[..., None] * jnp.tri(size, k=-1)  # (…, H, C, C), of l > j
    between = product("il,...lj->...ij", jnp.tri(size), between)
    sees = jnp.tri(size, dtype=bool) & (document[..., None] == document[..., None, :])
    decay = jnp.exp(jnp.where(sees, between, -jnp.inf))
    # Of document 0 are the tokens that the state before the chunk reaches.
    kept = jnp.where(document == 0, jnp.exp(total), 0)[..., None]
    scores = decay * product("...id,...jd->...ij", q, k)
    system = decay * beta[..., None] * product("...id,...jd->...ij", k, k)
    written = jnp.concatenate([v, kept * k], axis=-1) * beta[..., None]
    # Each write needs those before it in the chunk: (I + system) u = written.
    solve = functools.partial(solve_triangular, lower=True, unit_diagonal=True)
    own, read = jnp.split(solve(system, written), [v.shape[-1]], axis=-1)
    own = jnp.pad(own, [(0, 0)] * (own.ndim - 1) + [(0, values - v.shape[-1])])

    def step(state: jax.Array, chunk: tuple) -> tuple[jax.Array, jax.Array]:
        own, read, queries, scores, keys, stays = chunk
        new = own - product("...cd,...dw->...cw", read, state)  # (…, H, C, W)
        out = product("...cd,...dw->...cw", queries, state)
        out += product("...ij,...jw->...iw", scores, new)
        return stays * state + product("...cd,...cw->...dw", keys, new), out

    keys = decay[..., -1, :, None] * k  # as the chunk's end has them
    chunked = own, read, kept * q, scores, keys, kept[..., -1:, :]
    state, out = lax.scan(step, state.astype(jnp.float32), chunked)
    out = jnp.moveaxis(jnp.moveaxis(out, 0, lead), lead + 1, lead + 2)
    out = out.reshape(*out.shape[:lead], -1, *out.shape[-2:])  # (…, chunks * C, H, W)
    return out[..., :tokens, :, :], state


def after(one: jax.Array, earlier: jax.Array) -> jax.Array:
    """Applies an affine map of states to states, or to the columns of an earlier map.

    one: (…, D, V + D), of S -> A S + B: B, and then A; as what the rule makes of a
      state whose last D columns are the identity, and zeros before them.
    earlier: states (…, D, V), or a map (…, D, V + D).
    """
    depth, width = one.shape[-2:]
    linear = product("...de,...ew->...dw", one[..., width - depth :], earlier)
    widths = [(0, 0)] * (one.ndim - 1) + [(0, earlier.shape[-1] - (width - depth))]
    return linear + jnp.pad(one[..., : width - depth], widths)


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
    width = len(kernel)
    tokens = x.shape[-3]
    whole = jnp.concatenate([before, x], axis=-3).astype(jnp.float32)
    out = jnp.zeros((), jnp.float32)
    for back in range(width):
        first = width - 1 - back
        seen = lax.slice_in_dim(whole, first, first + tokens, axis=-3)
        is_here = (positions >= back)[..., None, None]
        out += jnp.where(is_here, seen * kernel[first].astype(jnp.float32), 0)
    return jax.nn.silu(out)
