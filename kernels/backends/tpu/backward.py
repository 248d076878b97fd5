"""Computes dq, dk and dv on a TPU, in one pass: the backward kernel.

A program owns key tile j and loops over its live query tiles i in order, with five
matmuls a tile (FlashAttention-2, 2307.08691, algorithm 2; see `backward_tile`). Q, dO,
(lse, delta) and bounds are double-buffered by hand, as docs/kernels/tpu.md draws it: in
iteration n those of the next tile come into buffers (n + 1) & 1, and its float32 dQ
where `backward_dq` says. Pallas double-buffers K, V, dK and dV, a block a program.

The next tile is i + 1 or, in a program's last iteration, the first one of the next
program of the head. n counts the iterations so chained. Only the copies of a chain's
first tile are waited for with nothing to compute: once a head, if no key tile is empty.

Scores are transposed, [keys, rows], so that lse and delta, one number a row, lie along
the lanes and are broadcast over the sublanes for nothing.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .backward_dq import STREAMED, VISITED, Resident, Streamed
from .backward_tile import BackwardTile, KeyTileRefs, QueryTileRefs
from .block_sizes import TpuBlocks
from .bounds import Neighbours, TileNumbers
from .dma import DoubleBuffer, HbmTiles, StackedTiles
from .tile_config import TileConfig
from .vector import UPRIGHT, Orientation, buffer_bytes, flat_index


class BackwardOperands(NamedTuple):
    """Arrays that the backward kernel reads.

    numbers: `TileNumbers` of the query tiles of key tiles, SMEM.
    k, v: [M, X, key tiles, block_k, D].
    q, do: [M, X, G, query tiles * block_q, D], left in HBM, and so the next three.
    lse_delta: lse, base 2, and delta: [M, X, query tiles, 2, R].
    row_bounds: k_start and k_end: int32 [M, query tiles, 2, R].
    dq: float32 accumulators, as q or the last two axes swapped, left in HBM.
    dkv: dk and dv so far, float32 [M, X, key tiles * block_k, D] or the last two axes
      swapped, as the kernel returns them; () for zeros.
    """

    numbers: jax.Array
    k: jax.Array
    v: jax.Array
    q: jax.Array
    do: jax.Array
    lse_delta: jax.Array
    row_bounds: jax.Array
    dq: jax.Array
    dkv: tuple[jax.Array, ...] = ()


class BackwardScratch(NamedTuple):
    """VMEM of a program, and the semaphores of its copies."""

    queries: tuple[jax.Ref, ...]  # q, do [2, R, D]; lse_delta, row_bounds [2, 2, R]
    semaphores: jax.Ref  # [these four, 2]
    dq: jax.Ref  # [query tiles or STREAMED, R, D], or the last two swapped
    dq_semaphores: jax.Ref  # [in and out, STREAMED]
    counts: jax.Ref  # [2], SMEM: see `backward_dq`
    dkv: tuple[jax.Ref, ...]  # [block_k, D] or swapped, where results are rounded

    @classmethod
    def shapes(
        cls,
        rows: int,
        depth: int,
        dtype: jnp.dtype,
        dq_tiles: int,
        orientation: Orientation = UPRIGHT,
    ) -> "BackwardScratch":
        """Returns the scratch to allocate. rows: R. depth: D."""
        q = pltpu.VMEM((2, rows, depth), dtype)
        lse_delta = pltpu.VMEM((2, 2, rows), jnp.float32)
        row_bounds = pltpu.VMEM((2, 2, rows), jnp.int32)
        return cls(
            queries=(q, q, lse_delta, row_bounds),
            semaphores=pltpu.SemaphoreType.DMA((4, 2)),
            dq=pltpu.VMEM((dq_tiles, *orientation.ordered(rows, depth)), jnp.float32),
            dq_semaphores=pltpu.SemaphoreType.DMA((2, STREAMED)),
            counts=pltpu.SMEM((2,), jnp.int32),
            dkv=(),
        )


class Held(NamedTuple):
    """Bytes of VMEM that a program takes.

    memory: if dk and dv begin at 0. sums: what it takes besides to go on from others.
    is_dq_resident: whether dq of a head stays there.
    """

    memory: int
    sums: int
    is_dq_resident: bool


def held_bytes(
    blocks: TpuBlocks, row: jax.ShapeDtypeStruct, query_tiles: int, limit: int
) -> Held:
    """Returns the VMEM that a program takes.

    dq of a head stays there if it takes no more than half of what the rest leaves.

    row: of q, [D]. query_tiles: of a head. limit: in bytes.
    """
    (depth,) = row.shape
    scratch = BackwardScratch.shapes(blocks.stacked_rows, depth, row.dtype, STREAMED)
    k = pltpu.VMEM((blocks.block_k, depth), row.dtype)
    dk = pltpu.VMEM((blocks.block_k, depth), jnp.float32)
    scores = blocks.rows * blocks.block_k * 6  # S, and dS in 2 bytes
    # Pallas has two buffers for each block of K, V, dK and dV.
    sums = 2 * buffer_bytes((dk, dk))
    held = 2 * buffer_bytes((k, k)) + sums + scores
    held += buffer_bytes(scratch.queries[:2])
    streamed = buffer_bytes(scratch.dq)
    resident = streamed // STREAMED * query_tiles
    is_resident = resident <= (limit - held) // 2
    held += resident if is_resident else streamed
    return Held(held, sums, is_resident)


def backward_call(
    config: TileConfig,
    operands: BackwardOperands,
    is_dq_resident: bool,
    dk_scale: float | None,
    **options: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the kernel. options: of `pl.pallas_call`.

    is_dq_resident: whether dq of a head stays in VMEM.
    dk_scale: factor on dk where dk and dv are results, in the operands' type; None
      where they are sums in float32.

    Returns:
      dq, dk and dv, dq in the place of the operand, and sums dk and dv if there are
      some.
    """
    batch, heads, key_tiles, block_k, depth = operands.k.shape
    query_tiles, _, rows = operands.lse_delta.shape[2:]
    dq_type = Resident if is_dq_resident else Streamed
    k_block = pl.BlockSpec(  # [block_k, D]
        (None, None, None, block_k, depth), lambda b, x, j, *_: (b, x, j, 0, 0)
    )
    orientation = config.orientation
    dk = jax.ShapeDtypeStruct(
        (batch, heads, *orientation.ordered(key_tiles * block_k, depth)),
        jnp.float32 if dk_scale is None else operands.k.dtype,
    )
    dk_block = pl.BlockSpec(  # [block_k, D], or swapped
        (None, None, *orientation.ordered(block_k, depth)),
        lambda b, x, j, *_: (b, x, *orientation.ordered(j, 0)),
    )
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    dq_tiles = query_tiles if is_dq_resident else STREAMED
    scratch = BackwardScratch.shapes(
        rows, depth, operands.q.dtype, dq_tiles, orientation
    )
    if dk_scale is not None:
        # In the place of the second buffers that Pallas has for blocks of float32.
        sums = pltpu.VMEM(orientation.ordered(block_k, depth), jnp.float32)
        scratch = scratch._replace(dkv=(sums, sums))
    dkv_blocks = (dk_block,) * len(operands.dkv)
    # In place: HBM keeps the sums of query tiles that no program visits. A block of dk
    # and dv is read before its program writes it.
    aliases = {flat_index(operands, "dq"): 0}
    if operands.dkv:
        first_sum = flat_index(operands, "dkv")
        aliases |= {first_sum: 1, first_sum + 1: 2}
    call = pl.pallas_call(
        functools.partial(_kernel, config, dq_type, dk_scale, batch * key_tiles),
        name="flash_backward",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, heads, key_tiles),
            # Of all queries the kernel itself copies the tiles that are live.
            in_specs=[k_block, k_block, *[hbm] * 5, dkv_blocks],
            out_specs=(hbm, dk_block, dk_block),
            scratch_shapes=[scratch],
        ),
        out_shape=(jax.ShapeDtypeStruct(operands.dq.shape, jnp.float32), dk, dk),
        input_output_aliases=aliases,
        **options,
    )
    return call(*operands)


def _kernel(
    config: TileConfig,
    dq_type: type[Resident] | type[Streamed],
    dk_scale: float | None,
    key_tiles: int,  # of all M
    numbers_ref: jax.Ref,  # SMEM, as in `BackwardOperands`
    k_ref: jax.Ref,  # [block_k, D]
    v_ref: jax.Ref,  # [block_k, D]
    q_hbm_ref: jax.Ref,  # [M, X, G, query tiles * block_q, D]
    do_hbm_ref: jax.Ref,  # [M, X, G, query tiles * block_q, D]
    lse_delta_hbm_ref: jax.Ref,  # [M, X, query tiles, 2, R]
    row_bounds_hbm_ref: jax.Ref,  # [M, query tiles, 2, R]
    dq_in_hbm_ref: jax.Ref,  # as q; the same memory as dq_hbm_ref
    dkv_in_refs: tuple[jax.Ref, ...],  # as dk_ref and dv_ref, or ()
    dq_hbm_ref: jax.Ref,
    dk_ref: jax.Ref,  # [block_k, D]
    dv_ref: jax.Ref,  # [block_k, D]
    scratch: BackwardScratch,
) -> None:
    """Computes the gradients of one key tile: program (batch, head, key tile)."""
    batch = pl.program_id(0)
    head = pl.program_id(1)
    j = pl.program_id(2)
    key_tile = batch * pl.num_programs(2) + j
    bound_rows, query_tiles, _, rows = row_bounds_hbm_ref.shape
    tiles = bound_rows * query_tiles
    sub_blocks = rows // config.blocks.exact_rows
    numbers = TileNumbers.read(numbers_ref, key_tiles, tiles, sub_blocks)
    ranges = numbers.ranges.line(key_tile)
    near = Neighbours.of(numbers.ranges, key_tile - j)
    before, here, after = near
    copies = DoubleBuffer(
        sources=(
            StackedTiles(q_hbm_ref.at[batch, head]),
            StackedTiles(do_hbm_ref.at[batch, head]),
            HbmTiles(lse_delta_hbm_ref.at[batch, head]),
            HbmTiles(row_bounds_hbm_ref.at[batch]),
        ),
        buffers=scratch.queries,
        semaphores=scratch.semaphores,
    )
    dq = dq_type(
        near=near,
        buffer=scratch.dq,
        source=StackedTiles(dq_in_hbm_ref.at[batch, head], config.orientation),
        target=StackedTiles(dq_hbm_ref.at[batch, head], config.orientation),
        semaphores=scratch.dq_semaphores,
        counts=scratch.counts,
    )
    dk_sum_ref, dv_sum_ref = scratch.dkv or (dk_ref, dv_ref)
    keys = KeyTileRefs(k_ref, v_ref, dk_sum_ref, dv_sum_ref)
    block_q = q_hbm_ref.shape[3] // query_tiles
    # Staircases with a base of their own are computed by sub-blocks: code for them
    # would be longer, and not faster.
    diagonals = numbers.diagonals(config.blocks, block_q, with_staircases=False)
    goes_on = dq.chains(before, here)
    visited = jnp.where(goes_on, scratch.counts[VISITED], 0)  # in this chain before

    def prefetch(i: jax.Array, n: jax.Array, is_first: jax.Array) -> None:
        copies.start(i, n & 1)
        dq.prefetch(i, n, is_first)

    @pl.when(here.is_live & ~goes_on)
    def _():
        prefetch(here.begin, jnp.int32(0), jnp.bool(True))

    # Here, and not at the first visit: keys that no query sees keep their gradients.
    if dkv_in_refs:
        dk_in_ref, dv_in_ref = dkv_in_refs
        dk_ref[...] = dk_in_ref[...]  # [block_k, D], or swapped
        dv_ref[...] = dv_in_ref[...]
    else:
        dk_sum_ref[...] = jnp.zeros_like(dk_sum_ref)
        dv_sum_ref[...] = jnp.zeros_like(dv_sum_ref)

    @pl.loop(here.begin, here.end)
    def _(i):
        n = visited + i - here.begin
        is_last = i + 1 == here.end
        following = jnp.where(is_last, after.begin, i + 1)
        # End of the query tiles that key tiles before the following visit's have seen.
        seen_end = jnp.where(is_last, here.end, before.end)

        # Into the buffers that visit n - 1 has read.
        @pl.when(~is_last | dq.chains(here, after))
        def _():
            prefetch(following, n + 1, following >= seen_end)

        # Drains tile i, started by the last visit, or before the loop.
        q, do, lse_delta, row_bounds = copies.wait(i, n & 1)
        queries = QueryTileRefs(q, do, lse_delta, row_bounds, dq.wait(i, n))
        query_tile = batch * query_tiles + i
        bounds = numbers.sub_blocks(query_tile * sub_blocks)
        first_key = j * k_ref.shape[0]
        tile = BackwardTile(keys, queries, first_key, bounds, diagonals, config)
        is_full = (ranges.full_begin <= i) & (i < ranges.full_end)
        tile.add_gradients(is_full, numbers.first_end(query_tile) - first_key)
        dq.store(i, n)

    if dk_scale is not None:
        dk_ref[...] = (dk_sum_ref[...] * dk_scale).astype(dk_ref.dtype)
        dv_ref[...] = dv_sum_ref[...].astype(dv_ref.dtype)

    # The head's next program goes on from here in the buffers' order.
    visits = visited + here.end - here.begin
    scratch.counts[VISITED] = visits
    dq.end(visits)
