"""Visible keys [k_start, k_end) of the TPU kernels: live tiles, granules, and masks."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ...masks import in_interval
from ..tile_ranges import TileRanges
from .block_sizes import TpuBlocks
from .diagonal import NONE, Diagonals
from .orientation import Orientation, strips
from .vector import whole


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

    def live_granules(
        self, block: jax.Array, first_key: jax.Array, keys: int, granule: int
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (first, number) of the granules that some row of a block attends to.

        Of the keys from `first_key` on, of which `granule` make one granule.
        """
        k_start = self.min_k_start[self.offset + block]
        k_end = self.max_k_end[self.offset + block]
        begin = whole(jnp.clip(k_start - first_key, 0, keys), granule)
        end = whole(jnp.clip(k_end - first_key, 0, keys) + granule - 1, granule)
        return begin, end - begin


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
