"""Blockwise attention in XLA: flash attention as loops over the live tiles.

Runs everywhere. Loop bounds come from `tile_ranges`, so empty tiles are never computed,
and full tiles are computed by a body without a mask. Memory is linear in the length:
one tile of scores at a time, forward and backward.

Inside, arrays are cut as in `tile_layout`: X heads, R stacked rows of queries.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..merge import Partial
from ..precision import product, soft_capped
from .tile_layout import BlockSizes, Tiles, Tiling
from .tile_ranges import TileRanges, key_ranges, query_ranges


def default_block_sizes(length: int) -> BlockSizes:
    """Returns block sizes for a shard of this length.

    On a CPU 128 x 256 computes fastest; 128 x 128 wastes less on the diagonals of short
    shards.
    """
    return BlockSizes(128, 256 if length >= 512 else 128)


@functools.partial(jax.jit, static_argnames=("scale", "soft_cap", "block_sizes"))
def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_start: jax.Array,
    k_end: jax.Array,
    *,
    scale: float,
    soft_cap: float | None = None,
    block_sizes: BlockSizes | None = None,
    carry: Partial | None = None,
) -> Partial:
    """Computes attention to the key slots [k_start, k_end): see `reference`."""
    tiling = Tiling.of(q, k, k_start, block_sizes or default_block_sizes(q.shape[1]))
    ranges = key_ranges(k_start, k_end, tiling.block_q, tiling.block_k)
    k_starts = tiling.split_bounds(k_start)  # (M, query tiles, R)
    k_ends = tiling.split_bounds(k_end)  # (M, query tiles, R)
    shared = Shared(tiling, ranges, k_starts, k_ends, scale, soft_cap)
    q = tiling.split_queries(q)  # (M, X, query tiles, R, D)
    k = tiling.split_keys(k)  # (M, X, key tiles, block_k, D)
    v = tiling.split_keys(v)  # (M, X, key tiles, block_k, D)
    if carry is None:
        out = jnp.zeros_like(q, tiling.dtype)  # (M, X, query tiles, R, D)
        lse = jnp.full_like(out[..., 0], -jnp.inf)  # (M, X, query tiles, R)
    else:
        out = tiling.split_queries(carry[0])
        lse = tiling.split_rows(carry[1])
    attend = functools.partial(_attend_lines, shared)
    out, lse = _for_each_head(attend, q, k, v, out, lse)
    return tiling.join_queries(out), tiling.join_rows(lse)


@functools.partial(jax.jit, static_argnames=("scale", "soft_cap", "block_sizes"))
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
    block_sizes: BlockSizes | None = None,
    dq: jax.Array,
    dkv: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes gradients of the attention to these keys: see `reference`."""
    tiling = Tiling.of(q, k, k_start, block_sizes or default_block_sizes(q.shape[1]))
    ranges = query_ranges(k_start, k_end, tiling.block_q, tiling.block_k, k.shape[1])
    k_starts = tiling.split_bounds(k_start)  # (M, query tiles, R)
    k_ends = tiling.split_bounds(k_end)  # (M, query tiles, R)
    shared = Shared(tiling, ranges, k_starts, k_ends, scale, soft_cap)
    lse = tiling.split_rows(lse)  # (M, X, query tiles, R)
    delta = tiling.split_rows(delta)  # (M, X, query tiles, R)
    q = tiling.split_queries(q)  # (M, X, query tiles, R, D)
    do = tiling.split_queries(do)  # (M, X, query tiles, R, D)
    k = tiling.split_keys(k)  # (M, X, key tiles, block_k, D)
    v = tiling.split_keys(v)  # (M, X, key tiles, block_k, D)
    if dkv is None:
        dk = jnp.zeros_like(k, tiling.dtype)
        dv = jnp.zeros_like(v, tiling.dtype)
    else:
        dk = tiling.split_keys(dkv[0])
        dv = tiling.split_keys(dkv[1])
    # Its rows last, as `_add_tile` computes them: in another order each tile would be
    # transposed before it is added.
    dq = tiling.split_columns(dq)  # (M, X, D, query tiles, R)
    add = functools.partial(_add_lines, shared)
    dq, dk, dv = _for_each_head(add, dq, q, do, lse, delta, k, v, dk, dv)
    return tiling.join_columns(dq), tiling.join_keys(dk), tiling.join_keys(dv)


class Shared(NamedTuple):
    """What is the same for all heads: tiles, bounds and scores."""

    tiling: Tiling
    ranges: TileRanges
    k_starts: jax.Array  # (M, query tiles, R)
    k_ends: jax.Array  # (M, query tiles, R)
    scale: float
    soft_cap: float | None


class ForwardTiles(NamedTuple):
    """Tiles that the forward reads: q [R, D], k and v [block_k, D]."""

    q: Tiles
    k: Tiles
    v: Tiles


def _attend_lines(shared: Shared, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Attends with the query tiles of all lines.

    arrays: q, k, v, out and lse, (lines, tiles, …) each; the last two are returned.
    """
    q, k, v, out, lse = map(Tiles.of, arrays)
    attend = functools.partial(_attend_query_tile, shared, ForwardTiles(q, k, v))
    out, lse = _for_each_line(shared.ranges, q, attend, (out, lse))
    return out.joined(), lse.joined()


def _attend_query_tile(shared: Shared, tiles: ForwardTiles, line, i, sums):
    """Attends with query tile i of a line. sums: tiles of out and lse so far."""
    out, lse = sums
    q_i = tiles.q.read(line, i)  # (R, D)
    tile = line % shared.tiling.bound_rows, i
    bounds = shared.k_starts[tile], shared.k_ends[tile]  # (R,) each
    step = functools.partial(_attend_tile, shared, tiles, q_i, line, bounds)
    # As if the keys so far were one, whose score is their lse.
    acc = out.read(line, i)  # (R, D)
    m = lse.read(line, i)  # (R,)
    l = jnp.where(m == -jnp.inf, 0, jnp.ones_like(m))  # (R,)
    m, l, acc = _for_each_tile(shared.ranges, tile, step, (m, l, acc))
    has_keys = l != 0  # also where it is nan, which must show
    l = jnp.where(has_keys, l, 1)
    lse_i = jnp.where(has_keys, m + jnp.log(l), -jnp.inf)  # (R,)
    out_i = acc / l[:, None]  # (R, D)
    return out.write(line, i, out_i), lse.write(line, i, lse_i)


def _attend_tile(
    shared: Shared, tiles: ForwardTiles, q_i, line, bounds, masked: bool, j, state
):
    """Adds key tile j to the softmax. state: m (R,), l (R,), acc (R, D)."""
    scale, soft_cap = shared.scale, shared.soft_cap
    m, l, acc = state
    qk = product("rd,sd->rs", q_i, tiles.k.read(line, j))  # (R, block_k)
    s, _ = soft_capped(scale * qk, soft_cap)  # (R, block_k)
    if masked:
        s = jnp.where(shared.tiling.mask(bounds, j), s, -jnp.inf)
    if masked or soft_cap is not None:
        highest = s.max(axis=-1)  # (R,)
    else:  # the same numbers, and no scaled scores in memory
        highest = scale * (qk.max if scale > 0 else qk.min)(axis=-1)  # (R,)
    m_new = jnp.maximum(m, highest)  # (R,)
    # Rows without visible keys have m = -inf: any finite one will do.
    m_safe = jnp.where(m_new == -jnp.inf, 0, m_new) if masked else m_new
    p = jnp.exp(s - m_safe[:, None])  # (R, block_k)
    rescale = jnp.exp(m - m_safe)  # (R,)
    l = l * rescale + p.sum(axis=-1)
    v_j = tiles.v.read(line, j)  # (block_k, D)
    pv = product("rs,sd->rd", p.astype(v_j.dtype), v_j)  # (R, D)
    return m_new, l, acc * rescale[:, None] + pv


class BackwardTiles(NamedTuple):
    """Tiles that the backward reads: rows (R, D) or (R,), keys (block_k, D)."""

    q: Tiles
    do: Tiles
    lse: Tiles
    delta: Tiles
    k: Tiles
    v: Tiles


class KeyTile(NamedTuple):
    """Key tile j of a line, whose bounds are those of batch row `row`."""

    line: jax.Array
    row: jax.Array
    j: jax.Array
    k: jax.Array  # (block_k, D)
    k_t: jax.Array  # (D, block_k)
    v: jax.Array  # (block_k, D)


def _add_lines(
    shared: Shared, dq: jax.Array, *arrays: jax.Array
) -> tuple[jax.Array, ...]:
    """Adds to the gradients of all lines.

    dq: (lines, D, query tiles, R). arrays: those of `BackwardTiles`, dk and dv, (lines,
      tiles, …) each; dq, dk and dv are returned.
    """
    *operands, dk, dv = map(Tiles.of, arrays)
    tiles = BackwardTiles(*operands)
    add = functools.partial(_add_key_tile, shared, tiles)
    dq, dk, dv = _for_each_line(shared.ranges, tiles.k, add, (dq, dk, dv))
    return dq, dk.joined(), dv.joined()


def _add_key_tile(shared: Shared, tiles: BackwardTiles, line, j, sums):
    """Adds what key tile j of a line contributes to dq, dk and dv."""
    dq, dk, dv = sums
    row = line % shared.tiling.bound_rows
    k_j = tiles.k.read(line, j)  # (block_k, D)
    v_j = tiles.v.read(line, j)  # (block_k, D)
    # Scores, and the gradient of q, have their axes swapped: then no product sums over
    # the first axis of a large operand, at half the speed on a CPU. Without the barrier
    # XLA puts the swap back into the product.
    k_j_t = lax.optimization_barrier(k_j.T)  # (D, block_k)
    keys = KeyTile(line, row, j, k_j, k_j_t, v_j)
    step = functools.partial(_add_tile, shared, tiles, keys)
    state = dq, dk.read(line, j), dv.read(line, j)
    dq, dk_j, dv_j = _for_each_tile(shared.ranges, (row, j), step, state)
    return dq, dk.write(line, j, dk_j), dv.write(line, j, dv_j)


def _add_tile(
    shared: Shared, tiles: BackwardTiles, keys: KeyTile, masked: bool, i, state
):
    """Adds the gradients of query tile i. state: dq of all tiles, dk and dv of keys."""
    line = keys.line
    dq, dk, dv = state
    q_i = tiles.q.read(line, i)  # (R, D)
    do_i = tiles.do.read(line, i)  # (R, D)
    # Rows after the end have q, do, lse and delta of 0: also unmasked they add nothing.
    s = shared.scale * product("sd,rd->sr", keys.k, q_i)  # (block_k, R)
    s, slope = soft_capped(s, shared.soft_cap)  # (block_k, R)
    p = jnp.exp(s - tiles.lse.read(line, i))  # (block_k, R)
    if masked:
        tile = keys.row, i
        bounds = shared.k_starts[tile], shared.k_ends[tile]  # (R,) each
        p = jnp.where(shared.tiling.mask(bounds, keys.j).T, p, 0)
    dv += product("sr,rd->sd", p.astype(q_i.dtype), do_i)  # (block_k, D)
    dp = product("sd,rd->sr", keys.v, do_i)  # (block_k, R)
    ds = p * (dp - tiles.delta.read(line, i)) * slope  # (block_k, R)
    ds = ds.astype(q_i.dtype)
    dk += product("sr,rd->sd", ds, q_i)  # (block_k, D)
    partial = product("ds,sr->dr", keys.k_t, ds)  # (D, R)
    return _added_columns(dq, line, i, partial), dk, dv


def _added_columns(dq: jax.Array, line, i, partial: jax.Array) -> jax.Array:
    """Adds (D, R) to tile i of a line of dq, (lines, D, query tiles, R)."""
    zero = jnp.zeros_like(i)
    begin = line, zero, i, zero
    size = 1, dq.shape[1], 1, dq.shape[3]
    tile = lax.dynamic_slice(dq, begin, size) + partial.reshape(size)
    return lax.dynamic_update_slice(dq, tile, begin)


def _for_each_head(heads: Callable, *tiles: jax.Array) -> tuple[jax.Array, ...]:
    """Calls `heads` with lines of tiles, (lines, …) each, and returns its results.

    On a CPU with those of all heads, line % M of which is a row of bounds: one head
    after the other, so that its tiles stay in the caches. Elsewhere it is vectorized.

    tiles: (M, X, …) each, and the results too.
    """
    by_head = [jnp.moveaxis(x, 1, 0) for x in tiles]  # (X, M, …)

    def in_turn(*by_head):
        first = by_head[0].shape[:2]
        lines = [x.reshape(-1, *x.shape[2:]) for x in by_head]  # (X · M, …)
        results = heads(*lines)
        return tuple(x.reshape(*first, *x.shape[1:]) for x in results)  # (X, M, …)

    results = lax.platform_dependent(*by_head, cpu=in_turn, default=jax.vmap(heads))
    return tuple(jnp.moveaxis(x, 0, 1) for x in results)


def _for_each_line(ranges: TileRanges, tiles: Tiles, compute: Callable, state):
    """Runs `state = compute(line, tile, state)` for all of these tiles, in order.

    If there are no live tiles, for none: a ring step without work costs nothing.
    """
    is_live = jnp.any(ranges.live_begin < ranges.live_end)
    count = len(tiles.numbers)
    length = tiles.shape[0]

    def compute_tile(number, state):
        return compute(number // length, number % length, state)

    count = jnp.where(is_live, count, 0).astype(jnp.int32)
    return lax.fori_loop(0, count, compute_tile, state)


def _for_each_tile(ranges: TileRanges, index, step, state):
    """Runs `step(masked, tile, state)` over the live tiles of one line of tiles."""
    live_begin, full_begin, full_end, live_end = ranges.line(index)
    # Two bodies are compiled: only partial tiles, at both ends, pay for a mask.
    masked = functools.partial(step, True)
    unmasked = functools.partial(step, False)
    state = lax.fori_loop(live_begin, full_begin, masked, state)
    state = lax.fori_loop(full_begin, full_end, unmasked, state)
    return lax.fori_loop(full_end, live_end, masked, state)
