"""Diagonal tiles: partial ones of a known shape, for which both kernels have code.

In causal attention the last live tile of each query tile is one: every row attends to
one key more than the row before. Which pieces of it are full, masked and empty is known
while tracing, so it can be straight-line code, as a full tile.

In stripes as wide as a granule, visiting tiles are staircases: all rows of a granule
end at the same key, and those of the next one a granule further. They are diagonals
whose mask shows everything.
"""

import functools
import operator
from collections.abc import Callable
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

NONE = -(2**30)
"""Number of a query tile without a diagonal: see `Diagonals.first_ends`."""


class Strip(NamedTuple):
    """Query rows of a tile, and the sub-tiles of keys that they attend to.

    rows: of the tile. columns: the first key of each sub-tile, in order of work.
    width: keys of a sub-tile. masked: how many, the first ones, have a mask.
    """

    rows: pl.Slice
    columns: tuple[int, ...]
    width: int
    masked: int = 0


class Diagonals(NamedTuple):
    """Diagonal tiles that a kernel has code for.

    granule: rows and keys of the pieces that they are made of.
    block_q: rows of a head. block_k: keys of a tile.
    bases: how many granules of keys may be full in a tile's first row. -1: its first
      granule of rows sees nothing.
    """

    granule: int
    block_q: int
    block_k: int
    bases: tuple[int, ...]

    @classmethod
    def of(cls, blocks: TpuBlocks, block_q: int, has_all: bool) -> "Diagonals":
        """Returns none where rows and keys are not cut alike.

        has_all: also bases that only staircases have: each is a copy of the code.
        """
        granule, block_k = blocks.live_columns, blocks.block_k
        steps, rest = max(1, block_q // granule), block_q % granule
        first, stride = (-(steps > 1), 1) if has_all else (0, steps)
        bases = range(first, block_k // granule - steps + 1, stride)
        if blocks.exact_rows != granule or (rest and granule % block_q):
            bases = ()
        return cls(granule, block_q, block_k, tuple(bases))

    def hold(self, first_end: jax.Array) -> jax.Array:
        """Says whether there is code for a tile, by its first row.

        first_end: of `first_ends`, less the tile's first key, as in `attend`.
        """
        base = whole(first_end, self.granule)
        found = [base == known for known in self.bases]
        return functools.reduce(operator.or_, found, jnp.bool(False))

    def attend(
        self, first_end: jax.Array, attend: Callable[[int, jax.Array], None]
    ) -> None:
        """Calls attend(base, end of the first row in `mask`) for a tile's base."""
        more = first_end & (self.granule - 1)
        end = first_end + whole(more + 1, self.granule)  # of a staircase one more
        for base in self.bases:
            is_base = whole(first_end, self.granule) == base
            pl.when(is_base)(functools.partial(attend, base, end))

    def strips(self, blocks: TpuBlocks, base: int) -> list[Strip]:
        """Returns the strips of a diagonal tile; one that sees nothing has no columns.

        The longest comes first: what is left to finish after the last one is short.
        """
        size = self.granule
        width = min(size, blocks.columns)

        def strip(first: int) -> Strip:
            full = (base + first % self.block_q // size) * size
            masked = range(max(0, full), full + size, width)
            columns = *masked, *range(0, full, width)
            rows = pl.ds(first, blocks.exact_rows)
            return Strip(rows, columns, width, len(masked))

        starts = range(0, blocks.stacked_rows, blocks.exact_rows)
        return [strip(first) for first in starts][::-1]

    def mask(
        self, x: jax.Array, end: jax.Array, first: int, axis: int, masked: float
    ) -> jax.Array:
        """Masks numbers of rows and keys: row r sees the keys before end + r.

        end: for the first row of a head, less the number of the first key.
        first: number of the first row in the tile. axis: of the rows.
        """
        row, key = (
            lax.broadcasted_iota(jnp.int32, x.shape, one) for one in (axis, 1 - axis)
        )  # as x
        if self.block_q < x.shape[axis]:
            row = row % self.block_q
        return jnp.where(key - row < end + first % self.block_q, x, masked)

    def first_ends(self, ranges: TileRanges, k_start: Array, k_end: Array) -> Array:
        """Returns where the first row of each query tile ends, NONE without a diagonal.

        The diagonal tile is the last live one, right behind the full ones. Each row
        attends to one key more than the row before, from the tile's first key on; rows
        of a granule end in one granule, and there is code for the first row's. Or it is
        a staircase, whose rows end with granules: of these it is k_end less 1, a key
        that is the last of its granule, where no row of another diagonal ends.

        ranges: of key tiles, (M, tiles). k_start, k_end: of rows, (M, tiles, block_q).
        """
        granule, rows = self.granule, np.arange(self.block_q, dtype=np.int32)
        first_key, first = ranges.full_end * self.block_k, k_end[..., 0]
        more, steps = first % granule, k_end - k_end[..., :1]
        is_staircase = (steps == rows // granule * granule).all(axis=-1) & (more == 0)
        is_diagonal = (steps == rows).all(axis=-1)
        is_diagonal &= more + min(self.block_q, granule) <= granule + 1
        first_end = jnp.where(is_staircase, first - 1, first)
        is_known = (
            (is_diagonal | is_staircase)
            & (k_start[..., -1] <= first_key)
            & (ranges.full_end + 1 == ranges.live_end)
            & self.hold(first_end - first_key)
        )
        return jnp.where(is_known, first_end, NONE)
