"""Blockwise attention in XLA: flash attention as loops over the live tiles.

Runs everywhere. Loop bounds come from `tiles`, so empty tiles are never visited, and
full tiles are computed by a body without a mask. Memory is linear in the length: one
tile of scores at a time, forward and backward.

Inside, rows of the query heads that share a key/value head are stacked (R = G·block_q
rows), and batch rows that share their bounds are folded into the heads (X heads).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels.block_sizes import BlockSizes
from kernels.merge import Partial, merge
from kernels.product import accumulator_type, product
from kernels.tiles import TileRanges, key_ranges, query_ranges

DEFAULT_BLOCK_SIZES = BlockSizes(block_q=256, block_k=256)


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    *,
    scale: float,
    block_sizes: BlockSizes | None = None,
    carry: Partial | None = None,
) -> Partial:
    """Attention of every query to the key slots [start, stop): see `reference`."""
    tiling = _Tiling.of(q, k, start, block_sizes)
    q_tiles = tiling.split_queries(q)
    k_tiles, v_tiles = tiling.split_keys(k), tiling.split_keys(v)
    starts, stops = tiling.split_bounds(start), tiling.split_bounds(stop)
    ranges = key_ranges(start, stop, tiling.block_q, tiling.block_k)

    def query_tile(place):
        row, tile = place
        q_i = q_tiles[row, tile]
        bounds = starts[row, tile], stops[row, tile]

        def step(masked, j, state):
            m, l, acc = state
            s = scale * product("xrd,xsd->xrs", q_i, k_tiles[row, j])
            if masked:
                s = jnp.where(tiling.seen(bounds, j), s, -jnp.inf)
            m_new = jnp.maximum(m, s.max(axis=-1))
            # A row that has seen nothing yet has m = -inf: any finite one will do.
            m_safe = jnp.where(m_new == -jnp.inf, 0, m_new) if masked else m_new
            p = jnp.exp(s - m_safe[..., None])
            decay = jnp.exp(m - m_safe)
            l = l * decay + p.sum(axis=-1)
            pv = product("xrs,xsd->xrd", p.astype(v.dtype), v_tiles[row, j])
            return m_new, l, acc * decay[..., None] + pv

        empty = jnp.zeros(q_i.shape[:2], tiling.dtype)
        state = (empty - jnp.inf, empty, jnp.zeros(q_i.shape, tiling.dtype))
        m, l, acc = _visit(ranges, (row, tile), step, state)
        seen = l > 0
        total = jnp.where(seen, l, 1)
        out = acc / total[..., None]
        return out, jnp.where(seen, m + jnp.log(total), -jnp.inf)

    out, lse = lax.map(query_tile, tiling.places(tiling.query_tiles))
    result = tiling.join_queries(out), tiling.join_rows(lse)
    return result if carry is None else merge(carry, result)


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    d_out: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    *,
    scale: float,
    block_sizes: BlockSizes | None = None,
    dq: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of the attention to these keys, in one pass: see `reference`."""
    tiling = _Tiling.of(q, k, start, block_sizes)
    q_tiles, d_out_tiles = tiling.split_queries(q), tiling.split_queries(d_out)
    k_tiles, v_tiles = tiling.split_keys(k), tiling.split_keys(v)
    lse_tiles, delta_tiles = tiling.split_rows(lse), tiling.split_rows(delta)
    starts, stops = tiling.split_bounds(start), tiling.split_bounds(stop)
    ranges = query_ranges(start, stop, tiling.block_q, tiling.block_k, k.shape[1])

    def key_tile(dq_tiles, place):
        row, j = place
        k_j, v_j = k_tiles[row, j], v_tiles[row, j]

        def step(masked, i, state):
            dq_tiles, dk, dv = state
            q_i, d_out_i = q_tiles[row, i], d_out_tiles[row, i]
            s = scale * product("xrd,xsd->xrs", q_i, k_j)
            p = jnp.exp(s - lse_tiles[row, i][..., None])
            if masked:
                p = jnp.where(tiling.seen((starts[row, i], stops[row, i]), j), p, 0)
            dv += product("xrs,xrd->xsd", p.astype(q.dtype), d_out_i)
            dp = product("xrd,xsd->xrs", d_out_i, v_j)
            ds = p * (dp - delta_tiles[row, i][..., None])
            ds = (scale * ds).astype(q.dtype)
            dk += product("xrs,xrd->xsd", ds, q_i)
            share = product("xrs,xsd->xrd", ds, k_j)
            return dq_tiles.at[row, i].add(share), dk, dv

        zero = jnp.zeros(k_j.shape, tiling.dtype)
        dq_tiles, dk, dv = _visit(ranges, (row, j), step, (dq_tiles, zero, zero))
        return dq_tiles, (dk, dv)

    dq_tiles, (dk, dv) = lax.scan(
        key_tile, tiling.split_queries(dq), tiling.places(tiling.key_tiles)
    )
    dq = tiling.join_queries(dq_tiles.reshape(-1, *dq_tiles.shape[2:]))
    return dq, tiling.join_keys(dk), tiling.join_keys(dv)


def _visit(ranges: TileRanges, place, step, state):
    """Runs `step(masked, tile, state)` over the live tiles of one line of tiles."""
    live_begin, full_begin, full_end, live_end = (bound[place] for bound in ranges)
    masked, unmasked = functools.partial(step, True), functools.partial(step, False)
    state = lax.fori_loop(live_begin, full_begin, masked, state)
    state = lax.fori_loop(full_begin, full_end, unmasked, state)
    return lax.fori_loop(full_end, live_end, masked, state)


class _Tiling(NamedTuple):
    """How (B, T, H, D) arrays are cut: M rows of bounds, X heads, R stacked rows."""

    block_q: int
    block_k: int
    batch: int
    length: int
    keys: int
    kv_heads: int
    group: int  # query heads of a key/value head
    bound_rows: int  # M: 1 where the batch shares its bounds, else the batch
    dtype: jnp.dtype  # of scores and sums

    @classmethod
    def of(
        cls,
        q: jax.Array,
        k: jax.Array,
        start: jax.Array,
        block_sizes: BlockSizes | None,
    ) -> "_Tiling":
        sizes = block_sizes or DEFAULT_BLOCK_SIZES
        batch, length, heads, _ = q.shape
        keys, kv_heads = k.shape[1:3]
        return cls(
            block_q=min(sizes.block_q, length),
            block_k=min(sizes.block_k, keys),
            batch=batch,
            length=length,
            keys=keys,
            kv_heads=kv_heads,
            group=heads // kv_heads,
            bound_rows=start.shape[0],
            dtype=accumulator_type(q.dtype),
        )

    @property
    def query_tiles(self) -> int:
        return -(-self.length // self.block_q)

    @property
    def key_tiles(self) -> int:
        return -(-self.keys // self.block_k)

    def places(self, tiles: int) -> tuple[jax.Array, jax.Array]:
        """Every (row of bounds, tile), in order."""
        place = jnp.arange(self.bound_rows * tiles)
        return place // tiles, place % tiles

    def seen(self, bounds: tuple[jax.Array, jax.Array], j: jax.Array) -> jax.Array:
        """Mask of one tile, (R, block_k), from the bounds of its rows, (R,) each."""
        slot = j * self.block_k + jnp.arange(self.block_k, dtype=bounds[0].dtype)
        return (bounds[0][:, None] <= slot) & (slot < bounds[1][:, None])

    def split_queries(self, x: jax.Array) -> jax.Array:
        """(B, T, H, D) -> (M, query tiles, X, R, D), zeros after the end."""
        x = _pad(x, 1, self.query_tiles * self.block_q)
        m, tiles, depth = self.bound_rows, self.query_tiles, x.shape[-1]
        x = x.reshape(m, -1, tiles, self.block_q, self.kv_heads, self.group, depth)
        x = x.transpose(0, 2, 1, 4, 5, 3, 6)  # (M, tiles, B/M, K, G, block_q, D)
        return x.reshape(m, tiles, -1, self.group * self.block_q, depth)

    def join_queries(self, x: jax.Array) -> jax.Array:
        """(M * query tiles, X, R, D) -> (B, T, H, D)."""
        m, tiles, depth = self.bound_rows, self.query_tiles, x.shape[-1]
        x = x.reshape(m, tiles, -1, self.kv_heads, self.group, self.block_q, depth)
        x = x.transpose(0, 2, 1, 5, 3, 4, 6)  # (M, B/M, tiles, block_q, K, G, D)
        x = x.reshape(self.batch, -1, self.kv_heads * self.group, depth)
        return x[:, : self.length]

    def split_rows(self, x: jax.Array) -> jax.Array:
        """(B, H, T) -> (M, query tiles, X, R)."""
        return self.split_queries(x.transpose(0, 2, 1)[..., None])[..., 0]

    def join_rows(self, x: jax.Array) -> jax.Array:
        """(M * query tiles, X, R) -> (B, H, T)."""
        return self.join_queries(x[..., None])[..., 0].transpose(0, 2, 1)

    def split_keys(self, x: jax.Array) -> jax.Array:
        """(B, S, K, D) -> (M, key tiles, X, block_k, D), zeros after the end."""
        x = _pad(x, 1, self.key_tiles * self.block_k)
        m, tiles, depth = self.bound_rows, self.key_tiles, x.shape[-1]
        x = x.reshape(m, -1, tiles, self.block_k, self.kv_heads, depth)
        x = x.transpose(0, 2, 1, 4, 3, 5)  # (M, tiles, B/M, K, block_k, D)
        return x.reshape(m, tiles, -1, self.block_k, depth)

    def join_keys(self, x: jax.Array) -> jax.Array:
        """(M * key tiles, X, block_k, D) -> (B, S, K, D)."""
        m, tiles, depth = self.bound_rows, self.key_tiles, x.shape[-1]
        x = x.reshape(m, tiles, -1, self.kv_heads, self.block_k, depth)
        x = x.transpose(0, 2, 1, 4, 3, 5)  # (M, B/M, tiles, block_k, K, D)
        x = x.reshape(self.batch, -1, self.kv_heads, depth)
        return x[:, : self.keys]

    def split_bounds(self, bound: jax.Array) -> jax.Array:
        """(M, T) -> (M, query tiles, R), the bounds of the stacked rows."""
        bound = _pad(bound, 1, self.query_tiles * self.block_q)
        bound = bound.reshape(self.bound_rows, self.query_tiles, self.block_q)
        return jnp.tile(bound, (1, 1, self.group))


def _pad(x: jax.Array, axis: int, length: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, widths)
