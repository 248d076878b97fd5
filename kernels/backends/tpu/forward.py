"""Computes out and lse on a TPU: the forward kernel.

A program owns a query tile and loops over its live key tiles j, from the last to the
first (see `softmax`). K and V are double-buffered by hand, as docs/kernels/tpu.md draws
it: in iteration n those of the next tile come into buffer (n + 1) & 1.

The next tile is j - 1 or, in a program's last iteration, the first one of the next
program of the head; n counts the iterations so chained. Pallas itself double-buffers
q, the bounds, the carry, out and lse, a block a program.

In causal attention the last live key tile holds each row's own key, so every row
attends to some key in the first iteration, and has an m for the others.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .block_sizes import Cut, TpuBlocks
from .bounds import Neighbours, RowBounds, TileNumbers
from .dma import DoubleBuffer, HbmTiles
from .query_tile import VISITED, ForwardQueryTile, stack_heads
from .softmax import Carry, SoftmaxState
from .tile_config import TileConfig
from .vector import Orientation, buffer_bytes, flat_index


class ForwardOperands(NamedTuple):
    """Arrays that the forward kernel reads.

    numbers: `TileNumbers` of the key tiles of query tiles, SMEM.
    row_bounds: `TpuBounds.bounds`, [M, query tiles, 2, P].
    q: [M, X, G, query tiles * block_q, D].
    k, v: [M, X, key tiles, block_k, D], left in HBM.
    """

    numbers: jax.Array
    row_bounds: jax.Array
    q: jax.Array
    k: jax.Array
    v: jax.Array
    carry: Carry | tuple[()]


class ForwardScratch(NamedTuple):
    """VMEM of a program, and the semaphores of its copies."""

    kv: tuple[jax.Ref, jax.Ref]  # [2, block_k, D] each
    semaphores: jax.Ref  # [k and v, 2]
    state: SoftmaxState
    counts: jax.Ref  # [2], SMEM: see `query_tile`
    bounds: RowBounds
    q: jax.Ref | tuple[()]  # [R, D], where several heads are stacked

    @classmethod
    def shapes(
        cls,
        group: int,
        blocks: TpuBlocks,
        depth: int,
        dtype: jnp.dtype,
        orientation: Orientation,
    ) -> "ForwardScratch":
        """Returns the scratch to allocate. depth: D."""
        rows = blocks.stacked_rows
        keys = 2, blocks.block_k, depth
        numbers = orientation.ordered(rows, orientation.number_width)
        bound = pltpu.VMEM(numbers, jnp.int32)
        return cls(
            kv=(pltpu.VMEM(keys, dtype), pltpu.VMEM(keys, dtype)),
            semaphores=pltpu.SemaphoreType.DMA((2, 2)),
            state=SoftmaxState.shapes(rows, depth, orientation),
            counts=pltpu.SMEM((2,), jnp.int32),
            bounds=RowBounds(k_start=bound, k_end=bound),
            q=pltpu.VMEM((rows, depth), dtype) if group > 1 else (),
        )


class ForwardBlocks(NamedTuple):
    """Blocks of program (batch, head, query tile) that Pallas copies."""

    q: pl.BlockSpec  # [G, block_q, D]
    out: pl.BlockSpec  # [G, block_q, D], or the last two swapped
    lse: pl.BlockSpec  # packed
    row_bounds: pl.BlockSpec  # [2, P]

    @classmethod
    def of(
        cls, config: TileConfig, group: int, depth: int, period: int
    ) -> "ForwardBlocks":
        """Returns the blocks. group: G. depth: D. period: P."""
        orientation = config.orientation
        rows = config.blocks.stacked_rows
        block_q = rows // group
        accumulator = orientation.ordered(block_q, depth)
        packed = orientation.packed(rows)
        # Index maps of (batch, head, query tile) get the prefetched numbers too.
        return cls(
            q=pl.BlockSpec(
                (None, None, group, block_q, depth),
                lambda b, x, i, *_: (b, x, 0, i, 0),
            ),
            out=pl.BlockSpec(
                (None, None, group, *accumulator),
                lambda b, x, i, *_: (b, x, 0, *orientation.ordered(i, 0)),
            ),
            lse=pl.BlockSpec(
                (None, None, None, *packed), lambda b, x, i, *_: (b, x, i, 0, 0)
            ),
            row_bounds=pl.BlockSpec(
                (None, None, 2, period), lambda b, x, i, *_: (b, i, 0, 0)
            ),
        )


def held_bytes(row: jax.ShapeDtypeStruct, cut: Cut) -> int:
    """Returns the VMEM that a program takes, with a carry. row: of q, [D]."""
    blocks = cut.blocks
    rows = blocks.stacked_rows
    (depth,) = row.shape
    q = pltpu.VMEM((rows, depth), row.dtype)
    out = pltpu.VMEM((rows, depth), jnp.float32)
    pipelined = {"q": q, "out": out, "carry": out}
    scratch = ForwardScratch.shapes(
        cut.heads, blocks, depth, row.dtype, cut.orientation
    )
    in_flight = blocks.ahead + blocks.behind + 2  # sub-tiles of S and P
    scores = in_flight * blocks.rows * blocks.columns * 4
    # Pallas has two buffers for a block: one is copied while the other is used.
    return 2 * buffer_bytes(pipelined) + buffer_bytes(scratch) + scores


def forward_call(
    config: TileConfig,
    operands: ForwardOperands,
    is_in_order: bool,
    out_type: jnp.dtype,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel. options: of `pl.pallas_call`.

    is_in_order: whether the programs of a head run one after the other, on one core:
      then each starts the first copies of the next one.
    out_type: of out; in a narrower one than float32 it is no carry.

    Returns:
      out and lse, shaped like a `Carry`: of empty rows 0 and NOTHING.
    """
    batch, heads, group, tokens, depth = operands.q.shape
    query_tiles, _, period = operands.row_bounds.shape[1:]
    orientation = config.orientation
    packed = orientation.packed(config.blocks.stacked_rows)
    out = batch, heads, group, *orientation.ordered(tokens, depth)
    lse = batch, heads, query_tiles, *packed
    blocks = ForwardBlocks.of(config, group, depth, period)
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    scratch = ForwardScratch.shapes(
        group, config.blocks, depth, operands.q.dtype, orientation
    )
    carry_blocks = ()
    aliases = {}
    if operands.carry:
        carry_blocks = Carry(blocks.out, blocks.lse)
        # A block of the carry is read before its result is written in its place.
        first = flat_index(operands, "carry")
        aliases = {first + 1: 1}
        if out_type == jnp.float32:
            aliases[first] = 0
    call = pl.pallas_call(
        functools.partial(_kernel, config, is_in_order, batch * query_tiles),
        name="flash_forward",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, heads, query_tiles),
            # Of k and v the kernel itself copies the tiles that are live.
            in_specs=[blocks.row_bounds, blocks.q, hbm, hbm, carry_blocks],
            out_specs=(blocks.out, blocks.lse),
            scratch_shapes=[scratch],
        ),
        out_shape=(
            jax.ShapeDtypeStruct(out, out_type),
            jax.ShapeDtypeStruct(lse, jnp.float32),
        ),
        input_output_aliases=aliases,
        **options,
    )
    return call(*operands)


def _kernel(
    config: TileConfig,
    is_in_order: bool,
    tiles: int,  # query tiles of all M
    numbers_ref: jax.Ref,  # SMEM, as in `ForwardOperands`
    bounds_ref: jax.Ref,  # [2, P]
    q_ref: jax.Ref,  # [G, block_q, D]
    k_hbm_ref: jax.Ref,  # [M, X, key tiles, block_k, D]
    v_hbm_ref: jax.Ref,  # [M, X, key tiles, block_k, D]
    carry_ref: Carry | tuple[()],
    out_ref: jax.Ref,  # [G, block_q, D], or the last two swapped
    lse_ref: jax.Ref,  # packed
    scratch: ForwardScratch,
) -> None:
    """Attends to all keys with one query tile: program (batch, head, query tile)."""
    batch = pl.program_id(0)
    head = pl.program_id(1)
    i = pl.program_id(2)
    query_tile = batch * pl.num_programs(2) + i

    sub_blocks = config.blocks.stacked_rows // config.blocks.exact_rows
    numbers = TileNumbers.read(numbers_ref, tiles, tiles, sub_blocks)
    before, here, after = Neighbours.of(numbers.ranges, query_tile - i)
    # The program before has started this one's first copies, into the slot that
    # follows its own last one: hence the count that SMEM keeps from program to program.
    is_prefetched = before.is_live & here.is_live & is_in_order
    goes_on = here.is_live & after.is_live & is_in_order
    visited = jnp.where(is_prefetched, scratch.counts[VISITED], 0)
    kv = DoubleBuffer(
        sources=(
            HbmTiles(k_hbm_ref.at[batch, head]),
            HbmTiles(v_hbm_ref.at[batch, head]),
        ),
        buffers=scratch.kv,
        semaphores=scratch.semaphores,
    )

    # Nobody has: this is the head's first live tile, or one behind an empty one, or the
    # one before is another core's.
    @pl.when(here.is_live & ~is_prefetched)
    def _():
        kv.start(here.end - 1, jnp.int32(0))

    q = stack_heads(q_ref, scratch.q)  # [R, D]
    ranges = numbers.ranges.line(query_tile)
    first_end = numbers.first_end(query_tile) - ranges.full_end * config.blocks.block_k
    # With a carry the keys may come from another shard, where staircase tiles occur:
    # compile code for those too.
    diagonals = numbers.diagonals(
        config.blocks, block_q=q_ref.shape[1], with_staircases=bool(carry_ref)
    )
    work = ForwardQueryTile(
        config=config,
        ranges=ranges,
        diagonals=diagonals,
        first_end=first_end,
        q=q,
        carry=carry_ref,
        state=scratch.state,
        counts=scratch.counts,
        bounds_ref=bounds_ref,
        bounds=scratch.bounds,
        sub_blocks=numbers.sub_blocks(query_tile * sub_blocks),
    )
    work.begin()

    @pl.loop(0, here.end - here.begin)
    def _(step):
        j = here.end - 1 - step
        slot = (visited + step) & 1
        is_inside = j > here.begin

        @pl.when(is_inside | goes_on)
        def _():
            # Into the buffers that the iteration before has read.
            kv.start(jnp.where(is_inside, j, after.end) - 1, 1 - slot)

        # Drains K(j), V(j), started by the last iteration, or before the loop.
        k_ref, v_ref = kv.wait(j, slot)
        work.attend(j, k_ref, v_ref)

    # The next program reads it only where this one has started its first copies.
    scratch.counts[VISITED] = visited + here.end - here.begin
    work.finish(out_ref, lse_ref)
