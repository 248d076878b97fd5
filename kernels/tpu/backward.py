"""Computes dq, dk and dv on a TPU, in one pass: the backward kernel.

A program owns key tile j and loops over its live query tiles i in order, with five
matmuls a tile (FlashAttention-2, 2307.08691, algorithm 2):

    HBM    Q, dO, (lse, delta), bounds of tile i + 1, and its dQ if that is streamed
             | DMA, started before tile i is computed
    VMEM   buffers (i + 1) & 1 fill, while the units read buffers i & 1
             | drained by `DoubleBuffer.wait` at the start of iteration i
    MXU    S^T = K Q^T    dV += P^T dO    dP^T = V dO^T      dQ += dS K    dK += dS^T Q
    VPU         P^T = exp2(S^T - lse)         dS^T = P^T (dP^T - delta)
                                              times the slope of a soft cap, if any
    HBM    dK, dV of tile j: Pallas double-buffers them, as K and V, a block a program

Scores are transposed, [keys, rows], so that lse and delta, one number a row, lie along
the lanes and are broadcast over the sublanes for nothing.

dQ is accumulated in float32 in HBM, in place, or in VMEM where all tiles of a head fit
there: see `backward_dq`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..masks import in_interval
from ..tile_ranges import TileRanges
from .backward_dq import STREAMED, Resident, Streamed
from .block_sizes import TpuBlocks
from .bounds import SubBlockBounds
from .dma import DoubleBuffer, StackedTiles, Tiles
from .orientation import UPRIGHT, Orientation
from .tile_config import TileConfig
from .vector import NN, NT, TN, buffer_bytes, dot, flat_index


class Operands(NamedTuple):
    """Arrays that the backward kernel reads.

    query_tile_ranges: 4 x [M * key tiles], SMEM.
    min_k_start, max_k_end: of sub-blocks, [M * query tiles * sub-blocks], SMEM.
    k, v: [M, X, key tiles, block_k, D].
    q, do: [M, X, G, query tiles * block_q, D], left in HBM, and so the next three.
    lse_delta: lse, base 2, and delta: [M, X, query tiles, 2, R].
    row_bounds: k_start and k_end: int32 [M, query tiles, 2, R].
    dq: float32 accumulators, as q or the last two axes swapped, left in HBM.
    dkv: dk and dv so far, [M, X, key tiles * block_k, D] or swapped; or nothing.
    """

    query_tile_ranges: TileRanges
    min_k_start: jax.Array
    max_k_end: jax.Array
    k: jax.Array
    v: jax.Array
    q: jax.Array
    do: jax.Array
    lse_delta: jax.Array
    row_bounds: jax.Array
    dq: jax.Array
    dkv: tuple[jax.Array, jax.Array] | tuple[()]


class Scratch(NamedTuple):
    """VMEM of a program, and the semaphores of its copies."""

    q: jax.Ref  # [2, R, D]
    do: jax.Ref  # [2, R, D]
    lse_delta: jax.Ref  # [2, 2, R]
    row_bounds: jax.Ref  # [2, 2, R]
    semaphores: jax.Ref  # [q, do, lse_delta and row_bounds, 2]
    dq: jax.Ref  # [query tiles or STREAMED, R, D], or the last two swapped
    dq_semaphores: jax.Ref  # [in and out, STREAMED]

    @classmethod
    def shapes(
        cls,
        rows: int,
        depth: int,
        dtype: jnp.dtype,
        dq_tiles: int,
        orientation: Orientation = UPRIGHT,
    ):
        """Returns the scratch to allocate. rows: R. depth: D."""
        return cls(
            q=pltpu.VMEM((2, rows, depth), dtype),
            do=pltpu.VMEM((2, rows, depth), dtype),
            lse_delta=pltpu.VMEM((2, 2, rows), jnp.float32),
            row_bounds=pltpu.VMEM((2, 2, rows), jnp.int32),
            semaphores=pltpu.SemaphoreType.DMA((4, 2)),
            dq=pltpu.VMEM((dq_tiles, *orientation.ordered(rows, depth)), jnp.float32),
            dq_semaphores=pltpu.SemaphoreType.DMA((2, STREAMED)),
        )


class Memory(NamedTuple):
    """VMEM of a program, in bytes, and whether dq of a head stays there.

    It does if it takes no more than half of what the rest leaves.
    """

    held: int
    is_dq_resident: bool

    @classmethod
    def of(
        cls, blocks: TpuBlocks, row: jax.ShapeDtypeStruct, query_tiles: int, limit: int
    ) -> "Memory":
        """Plans for a limit in bytes. row: of q, [D]. query_tiles: of a head."""
        (depth,) = row.shape
        scratch = Scratch.shapes(blocks.stacked_rows, depth, row.dtype, STREAMED)
        k = pltpu.VMEM((blocks.block_k, depth), row.dtype)
        dk = pltpu.VMEM((blocks.block_k, depth), jnp.float32)
        pipelined = {"k": k, "v": k, "dkv": (dk, dk), "dkv so far": (dk, dk)}
        scores = blocks.rows * blocks.block_k * 6  # S, and dS in 2 bytes
        held = 2 * buffer_bytes(pipelined) + scores
        held += buffer_bytes((scratch.q, scratch.do))
        streamed = buffer_bytes(scratch.dq)
        resident = streamed // STREAMED * query_tiles
        is_resident = resident <= (limit - held) // 2
        return cls(held + (resident if is_resident else streamed), is_resident)


def backward_call(
    config: TileConfig, operands: Operands, is_dq_resident: bool, **options
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the kernel. options: of `pl.pallas_call`.

    is_dq_resident: whether dq of a head stays in VMEM.

    Returns:
      dq, in the place of the operand, and dk and dv, float32, shaped like k.
    """
    batch, heads, key_tiles, block_k, depth = operands.k.shape
    query_tiles, _, rows = operands.lse_delta.shape[2:]
    k_block = pl.BlockSpec(  # [block_k, D]
        (None, None, None, block_k, depth), lambda b, x, j, *_: (b, x, j, 0, 0)
    )
    orientation = config.orientation
    dk = jax.ShapeDtypeStruct(
        (batch, heads, *orientation.ordered(key_tiles * block_k, depth)), jnp.float32
    )
    dk_block = pl.BlockSpec(  # [block_k, D], or swapped
        (None, None, *orientation.ordered(block_k, depth)),
        lambda b, x, j, *_: (b, x, *orientation.ordered(j, 0)),
    )
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    dq_tiles = query_tiles if is_dq_resident else STREAMED
    call = pl.pallas_call(
        functools.partial(_kernel, config, Resident if is_dq_resident else Streamed),
        name="flash_backward",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, heads, key_tiles),
            in_specs=[
                k_block,
                k_block,
                *[hbm] * 5,
                (dk_block, dk_block) if operands.dkv else (),
            ],
            out_specs=(hbm, dk_block, dk_block),
            scratch_shapes=[
                Scratch.shapes(rows, depth, operands.q.dtype, dq_tiles, orientation)
            ],
        ),
        out_shape=(
            jax.ShapeDtypeStruct(operands.dq.shape, jnp.float32),
            dk,
            dk,
        ),
        # A block of dk or dv is read before its sum is written in its place.
        input_output_aliases={
            flat_index(operands, "dq") + number: number
            for number in range(1 + len(operands.dkv))
        },
        **options,
    )
    return call(*operands)


class QueryTile(NamedTuple):
    """A query tile in VMEM."""

    q: jax.Ref  # [R, D]
    do: jax.Ref  # [R, D]
    lse_delta: jax.Ref  # [2, R]
    row_bounds: jax.Ref  # [2, R]: k_start, k_end
    dq: jax.Ref  # [R, D], or swapped: accumulator


class KeyTile(NamedTuple):
    """A key tile in VMEM, or some keys of it."""

    k: jax.Ref  # [keys, D]
    v: jax.Ref  # [keys, D]
    dk: jax.Ref  # [keys, D], or swapped: accumulator, as the next
    dv: jax.Ref

    def at(self, keys: pl.Slice, orientation: Orientation) -> "KeyTile":
        """Returns some keys."""
        return KeyTile(
            k=self.k.at[keys, :],
            v=self.v.at[keys, :],
            dk=orientation.at(self.dk, keys),
            dv=orientation.at(self.dv, keys),
        )


def _kernel(
    config: TileConfig,
    dq_type: type[Resident] | type[Streamed],
    ranges_ref: TileRanges,  # SMEM, as in `Operands`, and so the next two
    min_k_start_ref: jax.Ref,
    max_k_end_ref: jax.Ref,
    k_ref: jax.Ref,  # [block_k, D]
    v_ref: jax.Ref,  # [block_k, D]
    q_hbm_ref: jax.Ref,  # [M, X, G, query tiles * block_q, D]
    do_hbm_ref: jax.Ref,  # [M, X, G, query tiles * block_q, D]
    lse_delta_hbm_ref: jax.Ref,  # [M, X, query tiles, 2, R]
    row_bounds_hbm_ref: jax.Ref,  # [M, query tiles, 2, R]
    dq_in_hbm_ref: jax.Ref,  # as q; the same memory as dq_hbm_ref
    dkv_ref: tuple[jax.Ref, jax.Ref] | tuple[()],  # as dk_ref
    dq_hbm_ref: jax.Ref,
    dk_ref: jax.Ref,  # [block_k, D]
    dv_ref: jax.Ref,  # [block_k, D]
    scratch: Scratch,
) -> None:
    """Adds the gradients of one key tile: program (batch, head, key tile)."""
    batch, head, j = (pl.program_id(axis) for axis in range(3))
    key_tile = batch * pl.num_programs(2) + j
    ranges = jax.tree.map(lambda bound_ref: bound_ref[key_tile], ranges_ref)
    live_begin, live_end = ranges.live_begin, ranges.live_end
    copies = DoubleBuffer(
        sources=(
            StackedTiles(q_hbm_ref.at[batch, head]),
            StackedTiles(do_hbm_ref.at[batch, head]),
            Tiles(lse_delta_hbm_ref.at[batch, head]),
            Tiles(row_bounds_hbm_ref.at[batch]),
        ),
        buffers=(scratch.q, scratch.do, scratch.lse_delta, scratch.row_bounds),
        semaphores=scratch.semaphores,
    )
    dq = dq_type(
        buffer=scratch.dq,
        source=StackedTiles(dq_in_hbm_ref.at[batch, head], config.orientation),
        target=StackedTiles(dq_hbm_ref.at[batch, head], config.orientation),
        semaphores=scratch.dq_semaphores,
    )
    keys = KeyTile(k=k_ref, v=v_ref, dk=dk_ref, dv=dv_ref)
    for number, sum_ref in enumerate((dk_ref, dv_ref)):
        so_far = dkv_ref[number][...] if dkv_ref else jnp.zeros_like(sum_ref)
        sum_ref[...] = so_far  # [block_k, D], or swapped

    def prefetch(i: jax.Array) -> None:
        copies.start(i)
        dq.prefetch(i, live_begin)

    dq.begin()
    pl.when(live_begin < live_end)(lambda: prefetch(live_begin))

    @pl.loop(live_begin, live_end)
    def _(i):
        # Into the buffers that iteration i - 1 has read.
        pl.when(i + 1 < live_end)(lambda: prefetch(i + 1))
        # Drains tile i, started by the last iteration, or before the loop.
        q_ref, do_ref, lse_delta_ref, row_bounds_ref = copies.wait(i)
        queries = QueryTile(
            q=q_ref,
            do=do_ref,
            lse_delta=lse_delta_ref,
            row_bounds=row_bounds_ref,
            dq=dq.wait(i),
        )
        is_full = (ranges.full_begin <= i) & (i < ranges.full_end)
        pl.when(is_full)(lambda: full_tile(keys, queries, config))
        query_tile = batch * row_bounds_hbm_ref.shape[1] + i
        sub_blocks = row_bounds_hbm_ref.shape[3] // config.blocks.exact_rows
        bounds = SubBlockBounds(
            min_k_start=min_k_start_ref,
            max_k_end=max_k_end_ref,
            offset=query_tile * sub_blocks,
        )
        first_key = j * k_ref.shape[0]
        pl.when(~is_full)(
            lambda: partial_tile(keys, queries, first_key, bounds, config)
        )
        dq.store(i)

    dq.end(live_begin, live_end)


def full_tile(keys: KeyTile, queries: QueryTile, config: TileConfig) -> None:
    """Adds the gradients of a tile without a mask."""
    rows = config.blocks.rows
    for r in range(0, queries.q.shape[0], rows):
        _add_gradients(keys, queries, pl.ds(r, rows), None, config)


def partial_tile(
    keys: KeyTile,
    queries: QueryTile,
    first_key: jax.Array,
    bounds: SubBlockBounds,
    config: TileConfig,
) -> None:
    """Adds the gradients of a masked tile, of the live granules of each sub-block.

    first_key: of the tile. bounds: of the query tile.
    """
    exact_rows, granule = config.blocks.exact_rows, config.blocks.live_columns
    block_k = keys.k.shape[0]

    @pl.loop(0, queries.q.shape[0] // exact_rows)
    def _(block):
        rows = pl.ds(pl.multiple_of(block * exact_rows, exact_rows), exact_rows)
        begin, count = bounds.live_granules(block, first_key, block_k, granule)
        begin = pl.multiple_of(begin * granule, granule)

        def add(width: int) -> None:
            live = keys.at(pl.ds(begin, width), config.orientation)
            _add_gradients(live, queries, rows, first_key + begin, config)

        # Shapes are static: one branch for each number of live granules.
        for live in range(1, block_k // granule + 1):
            pl.when(count == live)(functools.partial(add, live * granule))


def _add_gradients(
    keys: KeyTile,
    queries: QueryTile,
    rows: pl.Slice,
    first_key: jax.Array | None,
    config: TileConfig,
) -> None:
    """Adds the gradients of some rows and keys; masked if `first_key` is given.

    Each matmul is issued once its operands are there, and dQ before dK: issued any
    earlier, more of them wait in registers, and spill.
    """
    matmul = functools.partial(dot, precision=config.precision)
    q = queries.q[rows, :]  # [rows, D]
    do = queries.do[rows, :]  # [rows, D]
    lse = queries.lse_delta[pl.ds(0, 1), rows]  # [1, rows]
    delta = queries.lse_delta[pl.ds(1, 1), rows]  # [1, rows]
    s, slope = config.scores_and_slope(keys.k[...], q)  # S^T [keys, rows]
    p = jnp.exp2(s - lse)  # P^T [keys, rows]
    if first_key is not None:
        k_start = queries.row_bounds[pl.ds(0, 1), rows]  # [1, rows]
        k_end = queries.row_bounds[pl.ds(1, 1), rows]  # [1, rows]
        key = first_key + lax.broadcasted_iota(jnp.int32, p.shape, 0)  # [keys, rows]
        p = jnp.where(in_interval(k_start, key, k_end), p, 0.0)  # [keys, rows]
    keys.dv[...] += config.product(p.astype(q.dtype), do, NN)  # as dv, and so on
    dp = matmul(keys.v[...], do, NT)  # dP^T [keys, rows]
    if slope is not None:
        p *= slope  # [keys, rows]
    ds = (p * (dp - delta)).astype(q.dtype)  # dS^T [keys, rows]
    dq_ref = config.orientation.at(queries.dq, rows)
    dq_ref[...] += config.product(ds, keys.k[...], TN)
    keys.dk[...] += config.product(ds, q, NN)
