"""What the Pallas TPU kernels share: products, layouts of rows, copies of tiles."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
SUBLANES = 8

OUTER = (1, 1)  # (m, d) and (n, d) -> (m, n)
INNER = (1, 0)  # (m, n) and (n, d) -> (m, d)
TRANSPOSED = (0, 0)  # (n, m) and (n, d) -> (m, d)

_FLOAT_BITS = 0x40000000  # of 2.0


def dot(
    a: jax.Array,
    b: jax.Array,
    contracted: tuple[int, int],
    precision: lax.Precision,
) -> jax.Array:
    """The float32 matrix product over one dimension of a and one of b."""
    dimensions = ((contracted[:1], contracted[1:]), ((), ()))
    return lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


def vmem_limit(chip: pltpu.TpuInfo) -> int:
    """Bytes of vector memory that a kernel may take; the compiler keeps the rest."""
    return chip.vmem_capacity_bytes * 7 // 8


def buffer_bytes(*buffers) -> int:
    """What buffers with a shape and a type take."""
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in buffers)


def check_smem(chip: pltpu.TpuInfo, *bounds: jax.Array) -> None:
    """Refuses bounds of more tiles than scalar memory holds.

    Raises:
      NotImplementedError: the compiler, which takes 1 KiB, would not find room.
    """
    needed, limit = buffer_bytes(*bounds), chip.smem_capacity_bytes - 2**10
    if needed > limit:
        raise NotImplementedError(
            f"the bounds of all tiles take {needed / 2**10:.1f} KiB, more than the "
            f"{limit / 2**10:.1f} KiB of scalar memory that a kernel has on TPU "
            f"{chip.chip_version}: shard the sequence, or a batch of rows with bounds "
            "of their own, over more devices"
        )


def compiler_params(chip: pltpu.TpuInfo, tiles: str) -> pltpu.CompilerParams:
    """How a kernel with a grid of (row of bounds, head, tile) is compiled.

    tiles: "parallel", or "arbitrary" if those of a head come one after another on one
      core.
    """
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", tiles),
        vmem_limit_bytes=vmem_limit(chip),
    )


def spread(x: jax.Array, width: int) -> jax.Array:
    """(rows, LANES) of equal lanes -> (rows, width)."""
    return jnp.tile(x, (1, width // LANES))


def reciprocal(x: jax.Array) -> jax.Array:
    """1 / x of normal float32 numbers: Newton's steps from a guess of 8 bits or more.

    A division costs the vector unit twice as much, for numbers that are not normal.
    """
    guess = pltpu.reciprocal(x, approx=True)
    for _ in range(2):
        guess = guess * (2.0 - x * guess)
    return guess


def as_floats(x: jax.Array) -> jax.Array:
    """int32 numbers from 0 to 2**29 as float32 that `rows_to_lanes` keeps exactly.

    The vector unit adds up no integers over lanes. Bits of a float32 survive that, in
    a sum with zeros, if it is no denormal number: hence the offset.
    """
    return lax.bitcast_convert_type(x + _FLOAT_BITS, jnp.float32)


def as_integers(x: jax.Array) -> jax.Array:
    """Undoes `as_floats`."""
    return lax.bitcast_convert_type(x, jnp.int32) - _FLOAT_BITS


def rows_to_lanes(row: jax.Array) -> jax.Array:
    """(1, LANES), a float32 for each of 128 rows -> (LANES, LANES) of equal lanes."""
    picked = jnp.where(_diagonal(), row, 0.0).sum(axis=1, keepdims=True)
    return jnp.broadcast_to(picked, (LANES, LANES))


def lanes_to_rows(x: jax.Array) -> jax.Array:
    """(LANES, LANES) of equal lanes -> (1, LANES): undoes `rows_to_lanes`."""
    return jnp.where(_diagonal(), x, 0.0).sum(axis=0, keepdims=True)


def _diagonal() -> jax.Array:
    shape = LANES, LANES
    row, lane = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return row == lane


class Edges(NamedTuple):
    """The interval that each sub-block of a query tile touches, in SMEM.

    first, last: least start and largest stop of all sub-blocks of a problem. They have
      one dimension, as SMEM pads the last of several to 128 numbers.
    offset: the number of the tile's first sub-block.
    """

    first: jax.Ref
    last: jax.Ref
    offset: jax.Array

    def live(
        self, block: jax.Array, slot: jax.Array, width: int, granule: int
    ) -> tuple[jax.Array, jax.Array]:
        """What a sub-block touches of the `width` slots from `slot` on.

        Returns:
          The first granule, counted from `slot`, and their number.
        """
        first, last = (x[self.offset + block] for x in (self.first, self.last))
        begin = jnp.clip(first - slot, 0, width) // granule
        end = pl.cdiv(jnp.clip(last - slot, 0, width), granule)
        return begin, end - begin


class Tiles(NamedTuple):
    """Tiles in HBM, (tiles, …), one after the other."""

    ref: jax.Ref

    def pieces(self, tile: jax.Array, buffer: jax.Ref) -> list[tuple[jax.Ref, jax.Ref]]:
        """What of a tile lies where in a buffer for it."""
        return [(self.ref.at[tile], buffer)]


class StackedTiles(NamedTuple):
    """Rows of a group of heads in HBM, (G, T, D), which are stacked in VMEM: (R, D)."""

    ref: jax.Ref

    def pieces(self, tile: jax.Array, buffer: jax.Ref) -> list[tuple[jax.Ref, jax.Ref]]:
        """What of a tile lies where in a buffer for it."""
        places = stacked_rows(self.ref.shape[0], buffer.shape[0])
        block_q = places[0].size
        rows = pl.ds(pl.multiple_of(tile * block_q, block_q), block_q)
        return [
            (self.ref.at[head, rows, :], buffer.at[place, :])
            for head, place in enumerate(places)
        ]


def stacked_rows(group: int, rows: int) -> list[pl.Slice]:
    """Where the rows of each head of a group are among so many stacked ones."""
    block_q = rows // group
    return [pl.ds(head * block_q, block_q) for head in range(group)]


def copies_in(
    tiles: Tiles | StackedTiles, tile: jax.Array, buffer: jax.Ref, semaphore: jax.Ref
) -> list:
    """Of a tile, from HBM into a buffer: copies to start, and to wait for."""
    return [
        pltpu.make_async_copy(there, here, semaphore)
        for there, here in tiles.pieces(tile, buffer)
    ]


def copies_out(
    tiles: Tiles | StackedTiles, tile: jax.Array, buffer: jax.Ref, semaphore: jax.Ref
) -> list:
    """The other way round."""
    return [
        pltpu.make_async_copy(here, there, semaphore)
        for there, here in tiles.pieces(tile, buffer)
    ]


def start_all(copies: list) -> None:
    for copy in copies:
        copy.start()


def wait_for_all(copies: list) -> None:
    for copy in copies:
        copy.wait()


class TileCopies(NamedTuple):
    """Copies of numbered tiles from HBM into two VMEM buffers by turns.

    sources: tiles in HBM.
    buffers: refs (2, …) in VMEM, one for each source.
    semaphores: DMA semaphores (sources, 2).
    """

    sources: tuple[Tiles | StackedTiles, ...]
    buffers: tuple[jax.Ref, ...]
    semaphores: jax.Ref

    def start(self, tile: jax.Array) -> None:
        start_all(self._copies(tile))

    def wait(self, tile: jax.Array) -> tuple[jax.Ref, ...]:
        """Waits for a tile that was started, and gives its buffers."""
        wait_for_all(self._copies(tile))
        return tuple(buffer.at[tile & 1] for buffer in self.buffers)

    def _copies(self, tile: jax.Array) -> list:
        slot = tile & 1
        return [
            copy
            for number, (source, buffer) in enumerate(
                zip(self.sources, self.buffers, strict=True)
            )
            for copy in copies_in(
                source, tile, buffer.at[slot], self.semaphores.at[number, slot]
            )
        ]


def for_each_tile_down(begin, end, copies: TileCopies, compute) -> None:
    """Runs `compute(tile, *buffers)` from tile end - 1 to begin, copying one ahead."""

    @pl.when(begin < end)
    def _():
        copies.start(end - 1)

    @pl.loop(0, end - begin)
    def _(visited):
        tile = end - 1 - visited

        @pl.when(tile > begin)
        def _():
            copies.start(tile - 1)

        compute(tile, *copies.wait(tile))
