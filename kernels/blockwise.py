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

from .block_sizes import BlockSizes
from .merge import Partial, added, merge
from .precision import product, soft_capped
from .tile_layout import Tiling
from .tile_ranges import TileRanges, key_ranges, query_ranges


def default_block_sizes(length: int) -> BlockSizes:
    """Returns block sizes for a shard of this length.

    On a CPU 128 x 256 computes fastest; 128 x 128 wastes less on the diagonals of short
    shards.
    """
    return BlockSizes(128, 256 if length >= 2048 else 128)


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

    def compute() -> Partial:
        operands, bounds = (q, k, v), (k_start, k_end)
        return forward_tiles(tiling, ranges, operands, bounds, scale, soft_cap)

    if carry is None:
        return compute()
    return lax.cond(_any(ranges), lambda: merge(carry, compute()), lambda: carry)


def forward_tiles(
    tiling: Tiling,
    ranges: TileRanges,
    operands: tuple[jax.Array, jax.Array, jax.Array],
    bounds: tuple[jax.Array, jax.Array],
    scale: float,
    soft_cap: float | None,
) -> Partial:
    """Computes the forward pass over given key tiles of each query tile."""
    k_starts, k_ends = (tiling.split_bounds(bound) for bound in bounds)

    def one_head(q_tiles, k_tiles, v_tiles):
        def query_tile(place):
            row, i = place
            q_i = q_tiles[row, i]  # (R, D)
            bounds = k_starts[row, i], k_ends[row, i]  # (R,) each

            def step(masked, j, state):
                m, l, acc = state  # (R,), (R,), (R, D)
                s = scale * product("rd,sd->rs", q_i, k_tiles[row, j])
                s, _ = soft_capped(s, soft_cap)  # (R, block_k)
                if masked:
                    s = jnp.where(tiling.mask(bounds, j), s, -jnp.inf)
                m_new = jnp.maximum(m, s.max(axis=-1))
                # Rows without visible keys have m = -inf: any finite one will do.
                m_safe = jnp.where(m_new == -jnp.inf, 0, m_new) if masked else m_new
                p = jnp.exp(s - m_safe[:, None])  # (R, block_k)
                rescale = jnp.exp(m - m_safe)  # (R,)
                l = l * rescale + p.sum(axis=-1)
                pv = product("rs,sd->rd", p.astype(v_tiles.dtype), v_tiles[row, j])
                return m_new, l, acc * rescale[:, None] + pv

            zeros = jnp.zeros(q_i.shape[0], tiling.dtype)
            state = (zeros - jnp.inf, zeros, jnp.zeros(q_i.shape, tiling.dtype))
            m, l, acc = _for_each_tile(ranges, (row, i), step, state)
            has_keys = l != 0  # also where it is nan, which must show
            l = jnp.where(has_keys, l, 1)
            return acc / l[:, None], jnp.where(has_keys, m + jnp.log(l), -jnp.inf)

        return lax.map(query_tile, tiling.places(tiling.query_tiles))

    q, k, v = operands
    # (M, X, query tiles, R, D) and (M, X, key tiles, block_k, D)
    tiles = tiling.split_queries(q), tiling.split_keys(k), tiling.split_keys(v)
    out, lse = _for_each_head(one_head, *tiles)
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
    queries, bounds, scores = (q, do, lse, delta), (k_start, k_end), (scale, soft_cap)

    def compute() -> tuple[jax.Array, jax.Array, jax.Array]:
        gradients = backward_tiles(tiling, ranges, queries, (k, v), bounds, scores)
        return dq + gradients[0], *added(dkv, gradients[1:])

    def skip() -> tuple[jax.Array, jax.Array, jax.Array]:
        dk, dv = dkv or [jnp.zeros(x.shape, tiling.dtype) for x in (k, v)]
        return dq, dk, dv

    return lax.cond(_any(ranges), compute, skip)


def backward_tiles(
    tiling: Tiling,
    ranges: TileRanges,
    queries: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    keys: tuple[jax.Array, jax.Array],
    bounds: tuple[jax.Array, jax.Array],
    scores: tuple[float, float | None],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes dq, dk and dv over given query tiles of each key tile.

    queries: q, do, lse and delta. keys: k and v. scores: scale and soft_cap.
    """
    scale, soft_cap = scores
    k_starts, k_ends = (tiling.split_bounds(bound) for bound in bounds)

    def one_head(q_tiles, do_tiles, lse_tiles, delta_tiles, k_tiles, v_tiles):
        def key_tile(dq_tiles, place):
            row, j = place
            k_j, v_j = k_tiles[row, j], v_tiles[row, j]  # (block_k, D)
            # Scores, and the gradient of q, have their axes swapped: then no product
            # sums over the first axis of a large operand, at half the speed on a CPU.
            # Without the barrier XLA puts the swap back into the product.
            k_j_t = lax.optimization_barrier(k_j.T)  # (D, block_k)

            def step(masked, i, state):
                dq_tiles, dk, dv = state
                q_i, do_i = q_tiles[row, i], do_tiles[row, i]  # (R, D)
                s = scale * product("sd,rd->sr", k_j, q_i)
                s, slope = soft_capped(s, soft_cap)  # (block_k, R)
                p = jnp.exp(s - lse_tiles[row, i])
                if masked:
                    bounds = k_starts[row, i], k_ends[row, i]  # (R,) each
                    p = jnp.where(tiling.mask(bounds, j).T, p, 0)
                dv += product("sr,rd->sd", p.astype(q_i.dtype), do_i)  # (block_k, D)
                dp = product("sd,rd->sr", v_j, do_i)  # (block_k, R)
                ds = (p * (dp - delta_tiles[row, i]) * slope).astype(q_i.dtype)
                dk += product("sr,rd->sd", ds, q_i)  # (block_k, D)
                partial = product("ds,sr->dr", k_j_t, ds)  # (D, R)
                return dq_tiles.at[row, i].add(partial), dk, dv

            zero = jnp.zeros(k_j.shape, tiling.dtype)
            state = dq_tiles, zero, zero
            dq_tiles, dk, dv = _for_each_tile(ranges, (row, j), step, state)
            return dq_tiles, (dk, dv)

        # (M, query tiles, D, R)
        zeros = jnp.zeros(jnp.swapaxes(q_tiles, 2, 3).shape, tiling.dtype)
        places = tiling.places(tiling.key_tiles)
        dq_tiles, (dk, dv) = lax.scan(key_tile, zeros, places)
        dq_tiles = jnp.swapaxes(dq_tiles, 2, 3)
        return dq_tiles.reshape(-1, *dq_tiles.shape[2:]), dk, dv

    q, do, lse, delta = queries
    query_tiles = tiling.split_queries(q), tiling.split_queries(do)
    row_tiles = tiling.split_rows(lse), tiling.split_rows(delta)
    key_tiles = (tiling.split_keys(x) for x in keys)
    dq, dk, dv = _for_each_head(one_head, *query_tiles, *row_tiles, *key_tiles)
    return tiling.join_queries(dq), tiling.join_keys(dk), tiling.join_keys(dv)


def _for_each_head(one_head: Callable, *tiles: jax.Array) -> tuple[jax.Array, ...]:
    """Calls `one_head` with (M, tiles, …) of each head; its results are (lines, …).

    On a CPU one after the other, so that a head's tiles stay in its caches; elsewhere
    vectorized.

    tiles: (M, X, tiles, …) each.

    Returns:
      The results, (M, X, tiles, …) each.
    """
    m = tiles[0].shape[0]
    results = lax.platform_dependent(
        *(jnp.moveaxis(x, 1, 0) for x in tiles),
        cpu=lambda *heads: lax.map(lambda head: one_head(*head), heads),
        default=jax.vmap(one_head),
    )
    return tuple(
        jnp.moveaxis(x.reshape(x.shape[0], m, -1, *x.shape[2:]), 0, 1) for x in results
    )


def _any(ranges: TileRanges) -> jax.Array:
    """Returns whether any tile is live; if not, arrays need not be cut into tiles."""
    return jnp.any(ranges.live_begin < ranges.live_end)


def _for_each_tile(ranges: TileRanges, place, step, state):
    """Runs `step(masked, tile, state)` over the live tiles of one line of tiles."""
    live_begin, full_begin, full_end, live_end = (bound[place] for bound in ranges)
    masked, unmasked = functools.partial(step, True), functools.partial(step, False)
    state = lax.fori_loop(live_begin, full_begin, masked, state)
    state = lax.fori_loop(full_begin, full_end, unmasked, state)
    return lax.fori_loop(full_end, live_end, masked, state)
