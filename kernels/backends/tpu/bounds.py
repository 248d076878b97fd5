"""Visible keys [k_start, k_end) of the TPU kernels: live tiles, diagonals, and masks.

In causal attention the last live tile of each query tile is a diagonal: every row
attends to one key more than the row before. Which pieces of it are full, masked and
empty is known while tracing, so both kernels have straight-line code for it, as for a
full tile.

In stripes as wide as a granule, visiting tiles are staircases: all rows of a granule
end at the same key, and those of the next one a granule further. They are diagonals
whose mask shows everything.
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ...masks import Array, in_interval
from ..tile_ranges import TileRanges
from .block_sizes import TpuBlocks
from .vector import Orientation, strips, whole

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


@dataclass(frozen=True)
class Part:
    """Numbers in SMEM behind `begin` others."""

    ref: jax.Ref
    begin: int

    def __getitem__(self, number: jax.Array) -> jax.Array:
        return self.ref[self.begin + number]


class TileNumbers(NamedTuple):
    """Numbers that drive a kernel's loops over tiles: int32 arrays, or their parts.

    The kernels read them from one array in SMEM, which holds one after the other.

    ranges: of a line's tiles, 4 x [M * lines].
    first_ends: None, or of `Diagonals.first_ends`, [M * query tiles].
    min_k_start, max_k_end: of sub-blocks, [M * query tiles * sub-blocks].
    """

    ranges: TileRanges
    first_ends: Any
    min_k_start: Any
    max_k_end: Any

    @classmethod
    def read(
        cls, ref: jax.Ref, lines: int, tiles: int, sub_blocks: int
    ) -> "TileNumbers":
        """Returns the parts. lines, tiles: of all M. sub_blocks: of a tile."""
        ends = 4 * lines, ref.shape[0] - 2 * tiles * sub_blocks
        live_begin, full_begin, full_end, live_end = (
            Part(ref, n * lines) for n in range(4)
        )
        return cls(
            TileRanges(live_begin, full_begin, full_end, live_end),
            Part(ref, ends[0]) if ends[0] < ends[1] else None,
            Part(ref, ends[1]),
            Part(ref, ends[1] + tiles * sub_blocks),
        )

    def sub_blocks(self, offset: jax.Array) -> "SubBlockBounds":
        """Returns those of a query tile. offset: the number of its first sub-block."""
        return SubBlockBounds(self.min_k_start, self.max_k_end, offset)

    def first_end(self, tile: jax.Array) -> jax.Array:
        """Returns that of a query tile."""
        return jnp.int32(NONE) if self.first_ends is None else self.first_ends[tile]

    def diagonals(self, blocks: TpuBlocks, block_q: int, has_all: bool) -> Diagonals:
        """Returns `Diagonals.of` these, without a base where numbers are missing."""
        found = Diagonals.of(blocks, block_q, has_all)
        return found._replace(bases=()) if self.first_ends is None else found


class LiveTiles(NamedTuple):
    """The live tiles [begin, end) of a program."""

    begin: jax.Array
    end: jax.Array

    @property
    def is_live(self) -> jax.Array:
        return self.begin < self.end


class Neighbours(NamedTuple):
    """Live tiles of a program, and of those before and after it in its head.

    These run one after the other on a core: the last iteration of one starts the copies
    for the first iteration of the next.

    Neither begin nor end decreases from one to the next: the programs that visit some
    tile are consecutive.
    """

    before: LiveTiles
    here: LiveTiles
    after: LiveTiles

    @classmethod
    def of(cls, ranges: TileRanges, first: jax.Array) -> "Neighbours":
        """Reads those of this program. first: the number of the head's first one."""
        j, last = pl.program_id(2), pl.num_programs(2) - 1

        def live(j: jax.Array) -> LiveTiles:
            return LiveTiles(ranges.live_begin[first + j], ranges.live_end[first + j])

        before, here, after = (
            live(near) for near in (jnp.maximum(j - 1, 0), j, jnp.minimum(j + 1, last))
        )
        # Nothing is live before the first or after the last.
        return cls(
            before._replace(end=jnp.where(j == 0, before.begin, before.end)),
            here,
            after._replace(begin=jnp.where(j == last, after.end, after.begin)),
        )


class SubBlockBounds(NamedTuple):
    """Keys that each sub-block of a query tile attends to.

    offset: the number of the query tile's first sub-block.
    """

    min_k_start: Part
    max_k_end: Part
    offset: jax.Array

    def for_each(
        self,
        blocks: TpuBlocks,
        first_key: jax.Array,
        attend: Callable[[pl.Slice, jax.Array], Callable[[int], None]],
    ) -> None:
        """Calls attend(rows, begin)(width) for each sub-block and its live granules.

        These are the ones, of a tile's keys from `first_key` on, that some of its rows
        attend to: `width` keys, of which `begin` is the first.
        """
        granule, block_k = blocks.live_columns, blocks.block_k

        def step(block: jax.Array, rows: pl.Slice) -> None:
            k_start = self.min_k_start[self.offset + block]
            k_end = self.max_k_end[self.offset + block]
            begin = whole(jnp.clip(k_start - first_key, 0, block_k), granule)
            end = whole(jnp.clip(k_end - first_key, 0, block_k) + granule - 1, granule)
            count, begin = end - begin, pl.multiple_of(begin * granule, granule)
            # Shapes are static: one branch for each number of live granules.
            attend_to = attend(rows, begin)
            for live in range(1, block_k // granule + 1):
                pl.when(count == live)(functools.partial(attend_to, live * granule))

        for_each_sub_block(blocks, step)


def for_each_sub_block(
    blocks: TpuBlocks, step: Callable[[jax.Array, pl.Slice], None]
) -> None:
    """Calls step(block, rows) for each sub-block of `exact_rows` query rows."""
    rows = blocks.exact_rows

    @pl.loop(0, blocks.stacked_rows // rows)
    def _(block):
        step(block, pl.ds(pl.multiple_of(block * rows, rows), rows))


class RowBounds(NamedTuple):
    """Keys that each row of a query tile attends to: int32, numbers of rows."""

    k_start: jax.Ref
    k_end: jax.Ref

    def load(self, packed_ref: jax.Ref, orientation: Orientation) -> None:
        """Fills both from `Orientation.packed` numbers in [0, 2**29]: [2, ...]."""
        for number, bound_ref in enumerate(self):
            for strip, rows in strips(bound_ref.shape[orientation.axis]):
                row = packed_ref.at[number][orientation.strip(strip)]  # [1, 128]
                orientation.at(bound_ref, rows)[...] = orientation.unpack(row)

    def mask(
        self,
        rows: pl.Slice,
        first_key: jax.Array,
        s: jax.Array,
        orientation: Orientation,
    ) -> jax.Array:
        """Returns scores of keys from `first_key` on, -inf if masked."""
        axis = orientation.keys_axis
        key = lax.broadcasted_iota(jnp.int32, s.shape, axis) + first_key
        k_start, k_end = (
            orientation.widen(orientation.at(bound, rows)[...], s.shape[axis])
            for bound in self
        )
        return jnp.where(in_interval(k_start, key, k_end), s, -jnp.inf)
