"""Copies of tiles between HBM and VMEM, and the double buffers of the TPU kernels."""

from typing import NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .vector import UPRIGHT, Orientation


class HbmTiles(NamedTuple):
    """Tiles in HBM, one after the other: ref [tiles, ...]."""

    ref: jax.Ref

    def pairs(self, tile: jax.Array, buffer: jax.Ref) -> list[tuple[jax.Ref, jax.Ref]]:
        """Returns (in HBM, in VMEM) of each contiguous part of a tile."""
        return [(self.ref.at[tile], buffer)]  # [...] each


class StackedTiles(NamedTuple):
    """Query tiles of G heads in HBM, ref [G, T, D], stacked in VMEM as [R, D].

    orientation: of these, where they are accumulators.
    """

    ref: jax.Ref
    orientation: Orientation = UPRIGHT

    def pairs(self, tile: jax.Array, buffer: jax.Ref) -> list[tuple[jax.Ref, jax.Ref]]:
        """Returns (in HBM, in VMEM) of each contiguous part of a tile: of each head."""
        orientation = self.orientation
        stacked = stacked_rows(self.ref.shape[0], buffer.shape[orientation.axis])
        block_q = stacked[0].size
        # The compiler must know that copies begin at whole rows of registers.
        rows = pl.ds(pl.multiple_of(tile * block_q, block_q), block_q)
        pairs = []
        for head, rows_in_stack in enumerate(stacked):
            in_hbm = orientation.at(self.ref.at[head], rows)
            in_vmem = orientation.at(buffer, rows_in_stack)
            pairs.append((in_hbm, in_vmem))  # [block_q, D] each, or [D, block_q]
        return pairs


def stacked_rows(group: int, rows: int) -> list[pl.Slice]:
    """Returns the rows of each query head in a stacked tile [group * block_q, D]."""
    block_q = rows // group
    return [pl.ds(head * block_q, block_q) for head in range(group)]


def copies(
    tiles: HbmTiles | StackedTiles,
    tile: jax.Array,
    buffer: jax.Ref,
    semaphore: jax.Ref,
    is_out: bool = False,
) -> list:
    """Builds the copies of one tile, HBM -> VMEM or out; the caller starts them.

    To wait for copies that were started elsewhere, build the same ones again.
    """
    built = []
    for in_hbm, in_vmem in tiles.pairs(tile, buffer):
        source, target = (in_vmem, in_hbm) if is_out else (in_hbm, in_vmem)
        built.append(pltpu.make_async_copy(source, target, semaphore))
    return built


def start_all(copies: list) -> None:
    for copy in copies:
        copy.start()


def wait_all(copies: list) -> None:
    for copy in copies:
        copy.wait()


class DoubleBuffer(NamedTuple):
    """Two VMEM buffers, slots 0 and 1, for each array of which tiles are read.

    sources: tiles in HBM.
    buffers: [2, ...] in VMEM, one for each source.
    semaphores: DMA semaphores [sources, 2].
    """

    sources: tuple[HbmTiles | StackedTiles, ...]
    buffers: tuple[jax.Ref, ...]
    semaphores: jax.Ref

    def start(self, tile: jax.Array, slot: jax.Array) -> None:
        """Starts the copies of a tile; what is in the slot must be done with."""
        start_all(self._copies(tile, slot))

    def wait(self, tile: jax.Array, slot: jax.Array) -> tuple[jax.Ref, ...]:
        """Drains what `start(tile, slot)` started; returns the tile's buffers."""
        wait_all(self._copies(tile, slot))
        return tuple(buffer.at[slot] for buffer in self.buffers)

    def _copies(self, tile: jax.Array, slot: jax.Array) -> list:
        built = []  # one a source, or one a stacked head
        for number, source in enumerate(self.sources):
            buffer = self.buffers[number].at[slot]
            # One for all heads of a stack: a wait for each adds up to all their bytes.
            semaphore = self.semaphores.at[number, slot]
            built += copies(source, tile, buffer, semaphore)
        return built
