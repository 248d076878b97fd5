"""The baseline of the attention benchmark: `blockwise` with nothing skipped.

A backend for `kernels.ring.Ring` that runs the loops of `kernels.blockwise` over all
tiles, each with its mask: what a ring does that finds hidden scores only after it has
computed them.
"""

import jax
import jax.numpy as jnp

from kernels.block_sizes import BlockSizes
from kernels.blockwise import backward_tiles, default_block_sizes, forward_tiles
from kernels.merge import Partial, merge
from kernels.tile_layout import Tiling
from kernels.tile_ranges import TileRanges


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_start: jax.Array,
    k_end: jax.Array,
    *,
    scale: float,
    block_sizes: BlockSizes | None = None,
    carry: Partial | None = None,
) -> Partial:
    """Attention of every query to the key slots [k_start, k_end): see `reference`."""
    tiling = Tiling.of(q, k, k_start, block_sizes or default_block_sizes(q.shape[1]))
    ranges = _everything(tiling, tiling.query_tiles, tiling.key_tiles)
    result = forward_tiles(tiling, ranges, (q, k, v), (k_start, k_end), scale)
    return result if carry is None else merge(carry, result)


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
    block_sizes: BlockSizes | None = None,
    dq: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of the attention to these keys: see `reference`."""
    tiling = Tiling.of(q, k, k_start, block_sizes or default_block_sizes(q.shape[1]))
    ranges = _everything(tiling, tiling.key_tiles, tiling.query_tiles)
    queries = q, do, lse, delta
    return backward_tiles(tiling, ranges, queries, (k, v), (k_start, k_end), scale, dq)


def _everything(tiling: Tiling, lines: int, tiles: int) -> TileRanges:
    """Ranges, (M, lines), in which all the tiles of every line are partial."""
    none = jnp.zeros((tiling.bound_rows, lines), jnp.int32)
    return TileRanges(none, none + tiles, none + tiles, none + tiles)
