"""Visible keys [k_start, k_end) of the TPU kernels: live tiles, diagonals, and masks.

In causal attention the last live tile of each query tile is a diagonal one: each row
sees one key more than the row before. In stripes as wide as a granule, a tile of a
visiting shard is a staircase: all rows of a granule end at the same key, and those of
the next granule of rows a granule of keys further. Tiles of 4 x 4 granules, rows
downwards, keys to the right; █ full, ◣ masked, ▣ masked but all visible, · skipped:

    diagonal     staircase    staircase of a
    base 0       base 0       later shard, base -1
    ◣ · · ·      ▣ · · ·      · · · ·
    █ ◣ · ·      █ ▣ · ·      ▣ · · ·
    █ █ ◣ ·      █ █ ▣ ·      █ ▣ · ·
    █ █ █ ◣      █ █ █ ▣      █ █ ▣ ·

`base` is the number of full granules in the first row. It alone says which granules are
full, masked and skipped, so both kernels have straight-line code for each base, as for
a full tile. A staircase runs the code of the diagonal with its base: only the first
row's end differs, which makes the mask show everything.
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

# A tile's first key, below 2**29, is taken off: the result must be below all bases, and
# not wrap around.
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
    bases: full granules of keys in a tile's first row, of each tile there is code for;
      -1: the first granule of rows sees nothing.
    """

    granule: int
    block_q: int
    block_k: int
    bases: tuple[int, ...]

    @classmethod
    def of(cls, blocks: TpuBlocks, block_q: int, with_staircases: bool) -> "Diagonals":
        """Returns none where rows and keys are not cut alike.

        with_staircases: also bases that no diagonal of the own keys has, but staircases
          of visiting shards have. Each base is a copy of the code.
        """
        granule, block_k = blocks.live_columns, blocks.block_k
        steps = max(1, block_q // granule)  # granules of rows
        rest = block_q % granule
        # A strip's rows are of one head, or of whole heads: where a head begins within
        # a strip, its rows end in two granules of keys.
        if blocks.exact_rows != granule or (rest and granule % block_q):
            return cls(granule, block_q, block_k, ())
        # Own keys: a query tile begins a whole number of query tiles into the key tile,
        # and its last row must end within that.
        last = block_k // granule - steps
        bases = range(0, last + 1, steps)
        if with_staircases:
            # With one granule of rows, base -1 is an empty tile, which is not live.
            bases = range(-1 if steps > 1 else 0, last + 1)
        return cls(granule, block_q, block_k, tuple(bases))

    def hold(self, first_end: jax.Array) -> jax.Array:
        """Returns whether there is code for a tile, by its first row.

        first_end: of `first_ends`, less the tile's first key, as in `attend`.
        """
        base = whole(first_end, self.granule)
        is_base = [base == known for known in self.bases]
        return functools.reduce(operator.or_, is_base, jnp.bool(False))

    def attend(
        self, first_end: jax.Array, attend: Callable[[int, jax.Array], None]
    ) -> None:
        """Calls attend(base, end of the first row in `mask`) for a tile's base."""
        # granule - 1 of staircases alone, whose end is less 1: see `first_ends`.
        remainder = first_end & (self.granule - 1)
        end = first_end + whole(remainder + 1, self.granule)
        for base in self.bases:
            is_base = whole(first_end, self.granule) == base
            pl.when(is_base)(functools.partial(attend, base, end))

    def strips(self, blocks: TpuBlocks, base: int) -> list[Strip]:
        """Returns the strips of a diagonal tile; one that sees nothing has no columns.

        The longest comes first: what is left to finish after the last one is short.
        """
        size = self.granule
        width = min(size, blocks.columns)
        strips = []
        for first in range(0, blocks.stacked_rows, blocks.exact_rows):
            # Stacked heads have a diagonal each: rows count from their head's first.
            full = (base + first % self.block_q // size) * size
            masked = range(max(0, full), full + size, width)
            # The masked ones first: m may come from them, and is needed by the others.
            columns = *masked, *range(0, full, width)
            rows = pl.ds(first, blocks.exact_rows)
            strips.append(Strip(rows, columns, width, len(masked)))
        return strips[::-1]

    def mask(
        self, x: jax.Array, end: jax.Array, first: int, axis: int, masked: float
    ) -> jax.Array:
        """Masks numbers of rows and keys: row r sees the keys before end + r.

        end: for the first row of a head, less the number of the first key.
        first: number of the first row in the tile. axis: of the rows.
        """
        row = lax.broadcasted_iota(jnp.int32, x.shape, axis)  # as x
        key = lax.broadcasted_iota(jnp.int32, x.shape, 1 - axis)  # as x
        if self.block_q < x.shape[axis]:
            row = row % self.block_q  # as x
        # `end` is the only traced number: one scalar decides for all rows, where
        # `RowBounds.mask` loads two bounds for each of them.
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
        granule = self.granule
        rows = np.arange(self.block_q, dtype=np.int32)  # [block_q]
        first_key = ranges.full_end * self.block_k  # (M, tiles)
        end = k_end[..., 0]  # (M, tiles), of the first row
        remainder = end % granule  # (M, tiles)
        growth = k_end - k_end[..., :1]  # (M, tiles, block_q), since the first row
        is_staircase = (growth == rows // granule * granule).all(axis=-1)
        is_staircase &= remainder == 0
        is_diagonal = (growth == rows).all(axis=-1)
        # The rows of a granule end in one granule of keys, which is the masked one.
        is_diagonal &= remainder + min(self.block_q, granule) <= granule + 1
        first_end = jnp.where(is_staircase, end - 1, end)  # (M, tiles)
        is_known = (
            (is_diagonal | is_staircase)
            # Of all rows, as the last one begins last: the mask knows only ends.
            & (k_start[..., -1] <= first_key)
            # It must be the last live tile, which comes first: it reads the carry.
            & (ranges.full_end + 1 == ranges.live_end)
            & self.hold(first_end - first_key)
        )
        return jnp.where(is_known, first_end, NONE)


@dataclass(frozen=True)
class SmemSlice:
    """Numbers in SMEM behind `begin` others."""

    ref: jax.Ref
    begin: int

    def __getitem__(self, number: jax.Array) -> jax.Array:
        return self.ref[self.begin + number]


class TileNumbers(NamedTuple):
    """Numbers that drive a kernel's loops over tiles: int32 arrays, or slices of SMEM.

    XLA concatenates the arrays, in this order; a kernel reads them from one in SMEM.

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
        """Returns the slices. lines, tiles: of all M. sub_blocks: of a tile."""
        ranges = TileRanges(*(SmemSlice(ref, n * lines) for n in range(4)))
        ranges_end = 4 * lines  # as `Setup.prepare` concatenates them
        # From the end: only the array's size says whether there are `first_ends`.
        min_k_start = ref.shape[0] - 2 * tiles * sub_blocks
        has_first_ends = ranges_end < min_k_start
        return cls(
            ranges=ranges,
            first_ends=SmemSlice(ref, ranges_end) if has_first_ends else None,
            min_k_start=SmemSlice(ref, min_k_start),
            max_k_end=SmemSlice(ref, min_k_start + tiles * sub_blocks),
        )

    def sub_blocks(self, offset: jax.Array) -> "SubBlockBounds":
        """Returns those of a query tile. offset: the number of its first sub-block."""
        return SubBlockBounds(self.min_k_start, self.max_k_end, offset)

    def first_end(self, tile: jax.Array) -> jax.Array:
        """Returns that of a query tile."""
        return jnp.int32(NONE) if self.first_ends is None else self.first_ends[tile]

    def diagonals(
        self, blocks: TpuBlocks, block_q: int, with_staircases: bool
    ) -> Diagonals:
        """Returns `Diagonals.of` these, without a base where numbers are missing."""
        diagonals = Diagonals.of(blocks, block_q, with_staircases)
        return diagonals._replace(bases=()) if self.first_ends is None else diagonals


class LiveTiles(NamedTuple):
    """The live tiles [begin, end) of a program."""

    begin: jax.Array
    end: jax.Array

    @classmethod
    def of(cls, ranges: TileRanges, first: jax.Array, j: jax.Array) -> "LiveTiles":
        """Reads those of program j of a head, whose first one has number `first`."""
        return cls(ranges.live_begin[first + j], ranges.live_end[first + j])

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
        j = pl.program_id(2)
        last = pl.num_programs(2) - 1
        previous = jnp.maximum(j - 1, 0)
        following = jnp.minimum(j + 1, last)
        before = LiveTiles.of(ranges, first, previous)
        here = LiveTiles.of(ranges, first, j)
        after = LiveTiles.of(ranges, first, following)
        # Nothing is live before the first or after the last: their neighbour, clamped,
        # is themselves, and they would wait for copies that nobody has started.
        return cls(
            before._replace(end=jnp.where(j == 0, before.begin, before.end)),
            here,
            after._replace(begin=jnp.where(j == last, after.end, after.begin)),
        )


class SubBlockBounds(NamedTuple):
    """Keys that each sub-block of a query tile attends to.

    offset: the number of the query tile's first sub-block.
    """

    min_k_start: SmemSlice
    max_k_end: SmemSlice
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
            count = end - begin  # of granules; below 1 if no row sees any of these keys
            attend_to = attend(rows, pl.multiple_of(begin * granule, granule))
            # Shapes are static: one branch for each number of live granules.
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

    def load(self, bounds_ref: jax.Ref, orientation: Orientation) -> None:
        """Fills both, for each stacked head again, from numbers in [0, 2**29].

        bounds_ref: `TpuBounds.bounds` of the query tile, [2, P].
        """
        period = bounds_ref.shape[1]
        for number, bound_ref in enumerate(self):
            for _, source in strips(period):
                row = bounds_ref[pl.ds(number, 1), source]  # [1, 128]
                bound = orientation.unpack(row)
                for first in range(0, bound_ref.shape[orientation.axis], period):
                    rows = pl.ds(first + source.start, source.size)
                    orientation.at(bound_ref, rows)[...] = bound

    def mask(
        self,
        s: jax.Array,
        column: int,
        *,
        rows: pl.Slice,
        first_key: jax.Array,
        orientation: Orientation,
    ) -> jax.Array:
        """Returns scores of some rows, -inf if masked.

        s: of the keys from first_key + column on, [rows, keys] or swapped.
        """
        axis = orientation.keys_axis
        first = first_key + column
        key = lax.broadcasted_iota(jnp.int32, s.shape, axis) + first  # as s
        k_start = orientation.at(self.k_start, rows)[...]  # numbers of rows
        k_start = orientation.widen(k_start, s.shape[axis])  # meets s
        k_end = orientation.at(self.k_end, rows)[...]  # numbers of rows
        k_end = orientation.widen(k_end, s.shape[axis])  # meets s
        return jnp.where(in_interval(k_start, key, k_end), s, -jnp.inf)
