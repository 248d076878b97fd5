"""Diagonal tiles: partial ones of a known shape, for which both kernels have code.

In causal attention the last live tile of each query tile is one: every row attends to
one key more than the row before. Which pieces of it are full, masked and empty is known
while tracing, so it can be straight-line code, as a full tile.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ...masks import Array
from ..tile_ranges import TileRanges
from .block_sizes import TpuBlocks
from .vector import whole


class Strip(NamedTuple):
    """Query rows of a tile, and the sub-tiles of keys that they attend to.

    rows: of the tile. columns: the first key of each sub-tile, in order of work.
    width: keys of a sub-tile. masked: how many, the first ones, have a mask.
    """

    rows: pl.Slice
    columns: tuple[int, ...]
    width: int
    masked: int = 0


def granule(blocks: TpuBlocks) -> int | None:
    """Returns the rows and keys of the pieces that diagonal tiles are made of.

    None where rows and keys are not cut alike.
    """
    is_alike = blocks.exact_rows == blocks.live_columns
    return blocks.live_columns if is_alike else None


def bases(granule: int | None, block_q: int, block_k: int) -> tuple[int, ...]:
    """Returns how many granules of keys may be full in a diagonal tile's first row.

    block_q: rows of a head.
    """
    if not granule or (block_q % granule and granule % block_q):
        return ()
    step = max(1, block_q // granule)
    return tuple(range(0, block_k // granule - step + 1, step))


def has_base(
    known: tuple[int, ...], granule: int, first_end: jax.Array, base: int
) -> jax.Array:
    """Says whether a diagonal tile has this base, by its first row's k_end.

    known: all `bases`. first_end: of `first_ends`, less the tile's first key.
    """
    is_only = len(known) == 1
    return jnp.bool(True) if is_only else whole(first_end, granule) == base


def strips(blocks: TpuBlocks, block_q: int, base: int) -> list[Strip]:
    """Returns the strips of a diagonal tile; base: one of `bases`.

    The longest comes first: what is left to finish after the last one is short.
    """
    size = blocks.live_columns
    width = min(size, blocks.columns)

    def strip(first: int) -> Strip:
        full = (base + first % block_q // size) * size
        masked = range(full, full + size, width)
        columns = *masked, *range(0, full, width)
        rows = pl.ds(first, blocks.exact_rows)
        return Strip(rows, columns, width, len(masked))

    return [strip(r) for r in range(0, blocks.stacked_rows, blocks.exact_rows)][::-1]


def mask(
    x: jax.Array, first_end: jax.Array, rows: tuple[int, int], axis: int, masked: float
) -> jax.Array:
    """Masks numbers of rows and keys: row r sees the keys before first_end + r.

    first_end: of the first row of a head, less the number of the first key.
    rows: the number of the first row in the tile, and block_q. axis: of the rows.
    """
    first, block_q = rows
    row, key = (
        lax.broadcasted_iota(jnp.int32, x.shape, one) for one in (axis, 1 - axis)
    )  # as x
    if block_q < x.shape[axis]:
        row = row % block_q
    return jnp.where(key - row < first_end + first % block_q, x, masked)


def first_ends(
    granule: int | None,
    block_k: int,
    ranges: TileRanges,
    bounds: tuple[Array, Array],
    rows: np.ndarray,
) -> Array:
    """Returns k_end of the first row of each query tile, -1 without a diagonal.

    The diagonal tile is the last live one, right behind the full ones. Each row attends
    to one key more than the row before, from the tile's first key on; rows of a
    granule end in one granule, and there is code for the first row's.

    ranges: of key tiles, (M, tiles).
    bounds: k_start and k_end, (M, tiles, n), of n rows of the block_q that a head has
      in a tile. rows: their numbers, (n,), the first and the last row among them.
    """
    k_start, k_end = bounds
    block_q = int(rows[-1]) + 1
    known = bases(granule, block_q, block_k)
    if not granule or not known:
        return ranges.full_end * 0 - 1
    first_key = ranges.full_end * block_k
    first_end = k_end[..., 0] - first_key
    base, more = first_end // granule, first_end % granule
    is_diagonal = (
        (k_end == k_end[..., :1] + rows).all(axis=-1)
        & (k_start[..., -1] <= first_key)
        & (ranges.full_end + 1 == ranges.live_end)
        & (known[0] <= base)
        & (base <= known[-1])
        & (base % max(1, block_q // granule) == 0)
        & (more + min(block_q, granule) <= granule + 1)
    )
    xp = jnp if isinstance(k_end, jax.Array) else np
    return xp.where(is_diagonal, k_end[..., 0], -1)
