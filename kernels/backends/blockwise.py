"""Blockwise attention in XLA: flash attention as loops over the live tiles.

Runs everywhere. Loop bounds come from `tile_ranges`, so empty tiles are never computed,
and full tiles are computed by a body without a mask. Memory is linear in the length:
one tile of scores at a time, forward and backward.

Inside, arrays are cut as in `tile_layout`: X heads, R stacked rows of queries.
"""

import functools
from collections.abc import Callable

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
    k_starts, k_ends = (tiling.split_bounds(bound) for bound in (k_start, k_end))
    operands = tiling.split_queries(q), tiling.split_keys(k), tiling.split_keys(v)
    if carry is None:
        out = jnp.zeros_like(operands[0], tiling.dtype)
        sums = out, jnp.full_like(out[..., 0], -jnp.inf)
    else:
        sums = tiling.split_queries(carry[0]), tiling.split_rows(carry[1])

    def heads(*tiles):
        q_tiles, k_tiles, v_tiles, *sums = map(Tiles.of, tiles)

        def query_tile(line, i, sums):
            q_i = q_tiles.read(line, i)  # (R, D)
            seen = line % tiling.bound_rows, i
            bounds = k_starts[seen], k_ends[seen]  # (R,) each

            def step(masked, j, state):
                m, l, acc = state  # (R,), (R,), (R, D)
                qk = product("rd,sd->rs", q_i, k_tiles.read(line, j))
                s, _ = soft_capped(scale * qk, soft_cap)  # (R, block_k)
                if masked:
                    s = jnp.where(tiling.mask(bounds, j), s, -jnp.inf)
                if masked or soft_cap is not None:
                    highest = s.max(axis=-1)
                else:  # the same numbers, and no scaled scores in memory
                    highest = scale * (qk.max if scale > 0 else qk.min)(axis=-1)
                m_new = jnp.maximum(m, highest)
                # Rows without visible keys have m = -inf: any finite one will do.
                m_safe = jnp.where(m_new == -jnp.inf, 0, m_new) if masked else m_new
                p = jnp.exp(s - m_safe[:, None])  # (R, block_k)
                rescale = jnp.exp(m - m_safe)  # (R,)
                l = l * rescale + p.sum(axis=-1)
                v_j = v_tiles.read(line, j)
                pv = product("rs,sd->rd", p.astype(v_j.dtype), v_j)
                return m_new, l, acc * rescale[:, None] + pv

            # As if the keys so far were one, whose score is their lse.
            acc, m = (x.read(line, i) for x in sums)
            l = jnp.where(m == -jnp.inf, 0, jnp.ones_like(m))
            m, l, acc = _for_each_tile(ranges, seen, step, (m, l, acc))
            has_keys = l != 0  # also where it is nan, which must show
            l = jnp.where(has_keys, l, 1)
            lse = jnp.where(has_keys, m + jnp.log(l), -jnp.inf)
            results = acc / l[:, None], lse
            return [x.write(line, i, y) for x, y in zip(sums, results, strict=True)]

        sums = _for_each_line(ranges, q_tiles, query_tile, sums)
        return tuple(x.joined() for x in sums)

    out, lse = _for_each_head(heads, *operands, *sums)
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
    k_starts, k_ends = (tiling.split_bounds(bound) for bound in (k_start, k_end))
    rows = tiling.split_rows(lse), tiling.split_rows(delta)
    queries = tiling.split_queries(q), tiling.split_queries(do), *rows
    keys = tiling.split_keys(k), tiling.split_keys(v)
    if dkv is None:
        dk, dv = (jnp.zeros_like(x, tiling.dtype) for x in keys)
    else:
        dk, dv = map(tiling.split_keys, dkv)

    def heads(dq, *tiles):
        *tiles, dk_tiles, dv_tiles = map(Tiles.of, tiles)
        q_tiles, do_tiles, lse_tiles, delta_tiles, k_tiles, v_tiles = tiles

        def key_tile(line, j, sums):
            seen = line % tiling.bound_rows
            k_j, v_j = k_tiles.read(line, j), v_tiles.read(line, j)  # (block_k, D)
            # Scores, and the gradient of q, have their axes swapped: then no product
            # sums over the first axis of a large operand, at half the speed on a CPU.
            # Without the barrier XLA puts the swap back into the product.
            k_j_t = lax.optimization_barrier(k_j.T)  # (D, block_k)

            def step(masked, i, state):
                dq, dk, dv = state
                q_i, do_i = q_tiles.read(line, i), do_tiles.read(line, i)  # (R, D)
                s = scale * product("sd,rd->sr", k_j, q_i)
                s, slope = soft_capped(s, soft_cap)  # (block_k, R)
                p = jnp.exp(s - lse_tiles.read(line, i))
                if masked:
                    bounds = k_starts[seen, i], k_ends[seen, i]  # (R,) each
                    p = jnp.where(tiling.mask(bounds, j).T, p, 0)
                dv += product("sr,rd->sd", p.astype(q_i.dtype), do_i)  # (block_k, D)
                dp = product("sd,rd->sr", v_j, do_i)  # (block_k, R)
                ds = p * (dp - delta_tiles.read(line, i)) * slope
                ds = ds.astype(q_i.dtype)
                dk += product("sr,rd->sd", ds, q_i)  # (block_k, D)
                partial = product("ds,sr->dr", k_j_t, ds)  # (D, R)
                return _added_columns(dq, line, i, partial), dk, dv

            dq, *dkv = sums
            state = dq, *(x.read(line, j) for x in dkv)
            dq, *results = _for_each_tile(ranges, (seen, j), step, state)
            return dq, *(x.write(line, j, y) for x, y in zip(dkv, results, strict=True))

        sums = dq, dk_tiles, dv_tiles
        dq, *dkv = _for_each_line(ranges, k_tiles, key_tile, sums)
        return dq, *(x.joined() for x in dkv)

    dq = tiling.split_columns(dq)  # (M, X, D, query tiles, R)
    dq, dk, dv = _for_each_head(heads, dq, *queries, *keys, dk, dv)
    return tiling.join_columns(dq), tiling.join_keys(dk), tiling.join_keys(dv)


def _added_columns(dq: jax.Array, line, i, partial: jax.Array) -> jax.Array:
    """Adds (D, R) to tile i of a line of dq, (lines, D, query tiles, R)."""
    first = jnp.zeros_like(i)
    place, size = (line, first, i, first), (1, dq.shape[1], 1, dq.shape[3])
    tile = lax.dynamic_slice(dq, place, size) + partial.reshape(size)
    return lax.dynamic_update_slice(dq, tile, place)


def _for_each_head(heads: Callable, *tiles: jax.Array) -> tuple[jax.Array, ...]:
    """Calls `heads` with lines of tiles, (lines, …) each, and returns its results.

    On a CPU with those of all heads, line % M of which is a row of bounds: one head
    after the other, so that its tiles stay in the caches. Elsewhere it is vectorized.

    tiles: (M, X, …) each, and the results too.
    """
    by_head = [jnp.moveaxis(x, 1, 0) for x in tiles]

    def in_turn(*by_head):
        first = by_head[0].shape[:2]
        results = heads(*(x.reshape(-1, *x.shape[2:]) for x in by_head))
        return tuple(x.reshape(*first, *x.shape[1:]) for x in results)

    results = lax.platform_dependent(*by_head, cpu=in_turn, default=jax.vmap(heads))
    return tuple(jnp.moveaxis(x, 0, 1) for x in results)


def _for_each_line(ranges: TileRanges, tiles: Tiles, compute: Callable, state):
    """Runs `state = compute(line, tile, state)` for all of these tiles, in order.

    If there are no live tiles, for none: a ring step without work costs nothing.
    """
    is_live = jnp.any(ranges.live_begin < ranges.live_end)
    count, length = len(tiles.numbers), tiles.shape[0]

    def one(place, state):
        return compute(place // length, place % length, state)

    return lax.fori_loop(0, jnp.where(is_live, count, 0).astype(jnp.int32), one, state)


def _for_each_tile(ranges: TileRanges, place, step, state):
    """Runs `step(masked, tile, state)` over the live tiles of one line of tiles."""
    live_begin, full_begin, full_end, live_end = (bound[place] for bound in ranges)
    masked, unmasked = functools.partial(step, True), functools.partial(step, False)
    state = lax.fori_loop(live_begin, full_begin, masked, state)
    state = lax.fori_loop(full_begin, full_end, unmasked, state)
    return lax.fori_loop(full_end, live_end, masked, state)
