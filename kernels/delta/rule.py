"""The gated delta rule (Gated DeltaNet, 2412.06464), in chunks and in plain XLA.

A head's state S (D, V) is read by queries and written by keys and values:

    S <- exp(log_decay) S;   S <- S + beta k (v - S^T k)^T;   out = S^T q

So tokens are an affine map of the state, S -> A S + B (see `after`).
Within a chunk the writes of all tokens are one triangular solve (the UT transform of
2406.06484); between chunks a loop carries the state. Everything is in float32.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import solve_triangular

from ..precision import product

CHUNK = 128
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

    q, k: (…, T, K, D), normalised; K divides H. v: (…, T, H, V). log_decay: (…, T, H),
      at most 0.
    beta: (…, T, H), from 0 to 1. A token with both 0 leaves the state as it is.
    is_first: bool (…, T), tokens of which the state is zero before they write.
    state: (…, H, D, W), or what becomes that, before the first token. Of columns beyond
      the first V the values are 0.
    """
    depth, values = state.shape[-2:]
    tokens = q.shape[-3]
    size = min(CHUNK, tokens)
    lead = q.ndim - 3  # axes before the tokens
    heads = v.shape[-2]
    q, k = (jnp.repeat(x, heads // x.shape[-2], axis=-2) for x in (q, k))
    state = jnp.broadcast_to(state, (*q.shape[:lead], heads, depth, values))
    is_first = is_first[..., None]  # (…, T, 1), of all heads
    terms = _chunk_terms(
        _cut(q, lead, size),
        _cut(k, lead, size),
        _cut(v, lead, size),
        _cut(log_decay, lead, size),
        _cut(beta, lead, size),
        _cut(is_first, lead, size),
        values,
    )
    state, out = lax.scan(_take_chunk, state.astype(jnp.float32), terms)
    # (chunks, …, H, C, W) -> (…, chunks, C, H, W)
    out = jnp.moveaxis(jnp.moveaxis(out, 0, lead), lead + 1, lead + 2)
    out = out.reshape(*out.shape[:lead], -1, *out.shape[-2:])  # (…, chunks * C, H, W)
    return out[..., :tokens, :, :], state


class ChunkTerms(NamedTuple):
    """What a chunk of C tokens reads and writes, for any state S (D, W) before it.

    own, read: (…, H, C, W) and (…, H, C, D). The tokens write own - read S.
    queries: (…, H, C, D), decayed from the chunk's first token on.
    scores: (…, H, C, C), of queries and the keys up to their own token, decayed.
    keys: (…, H, C, D), decayed up to the chunk's last token.
    stays: (…, H, 1, 1), the factor on S: 0 if a document begins in the chunk.
    """

    own: jax.Array
    read: jax.Array
    queries: jax.Array
    scores: jax.Array
    keys: jax.Array
    stays: jax.Array


def _cut(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Cuts (…, T, H, …) at the axis of tokens: (chunks, …, H, C, …), float32."""
    # Padding decays nothing and writes nothing: its log_decay and beta are 0.
    widths = [(0, 0)] * x.ndim
    widths[axis] = 0, -x.shape[axis] % size
    x = jnp.pad(x, widths).astype(jnp.float32)
    # (…, chunks, C, H, …) -> (chunks, …, H, C, …)
    x = x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(jnp.moveaxis(x, axis + 2, axis + 1), axis, 0)


def _chunk_terms(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    is_first: jax.Array,
    values: int,
) -> ChunkTerms:
    """Computes the terms of all chunks at once, as none of them needs a state.

    q, k: (chunks, …, H, C, D). v: (chunks, …, H, C, V). log_decay, beta: (chunks, …,
    H, C). is_first: (chunks, …, 1, C), 0 or 1. values: W, columns of the state.
    """
    size = q.shape[-2]
    document = jnp.cumsum(is_first, axis=-1)  # (…, 1, C)
    # A first token's decay is of a state that it does not see.
    log_decay = jnp.where(is_first > 0, 0, log_decay)
    total = jnp.cumsum(log_decay, axis=-1)  # (…, H, C)
    # Summed for each pair: differences of long sums would lose digits.
    between = log_decay[..., None] * jnp.tri(size, k=-1)  # (…, H, C, C), of l > j
    between = product("il,...lj->...ij", jnp.tri(size), between)
    sees = jnp.tri(size, dtype=bool) & (document[..., None] == document[..., None, :])
    decay = jnp.exp(jnp.where(sees, between, -jnp.inf))  # (…, H, C, C)
    # Of document 0 are the tokens that the state before the chunk reaches.
    kept = jnp.where(document == 0, jnp.exp(total), 0)[..., None]  # (…, H, C, 1)
    scores = decay * product("...id,...jd->...ij", q, k)
    system = decay * beta[..., None] * product("...id,...jd->...ij", k, k)
    written = jnp.concatenate([v, kept * k], axis=-1) * beta[..., None]
    # Each write needs those before it in the chunk: (I + system) u = written. The
    # solver takes the diagonal for ones, and so reads none of `system`'s.
    solve = functools.partial(solve_triangular, lower=True, unit_diagonal=True)
    own, read = jnp.split(solve(system, written), [v.shape[-1]], axis=-1)
    own = jnp.pad(own, [(0, 0)] * (own.ndim - 1) + [(0, values - v.shape[-1])])
    keys = decay[..., -1, :, None] * k
    return ChunkTerms(
        own=own,
        read=read,
        queries=kept * q,
        scores=scores,
        keys=keys,
        stays=kept[..., -1:, :],
    )


def _take_chunk(state: jax.Array, chunk: ChunkTerms) -> tuple[jax.Array, jax.Array]:
    """Returns the state after a chunk, and what its queries read, (…, H, C, W)."""
    new = chunk.own - product("...cd,...dw->...cw", chunk.read, state)  # (…, H, C, W)
    out = product("...cd,...dw->...cw", chunk.queries, state)
    out += product("...ij,...jw->...iw", chunk.scores, new)
    state = chunk.stays * state + product("...cd,...cw->...dw", chunk.keys, new)
    return state, out


def after(later: jax.Array, earlier: jax.Array) -> jax.Array:
    """Applies an affine map of states to states, or to the columns of an earlier map.

    later: the map S -> A S + B as (…, D, V + D), B and then A. The rule makes it of a
      state of V columns of zeros, and then the identity.
    earlier: states (…, D, V), or a map (…, D, V + D).
    """
    depth, width = later.shape[-2:]
    linear = product("...de,...ew->...dw", later[..., width - depth :], earlier)
    widths = [(0, 0)] * (later.ndim - 1) + [(0, earlier.shape[-1] - (width - depth))]
    return linear + jnp.pad(later[..., : width - depth], widths)


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
        # Further back lies another document, in a row or on the device before.
        is_here = (positions >= back)[..., None, None]
        out += jnp.where(is_here, seen * kernel[first].astype(jnp.float32), 0)
    return jax.nn.silu(out)
