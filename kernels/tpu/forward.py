"""Computes out and lse on a TPU: the forward kernel.

A program owns a query tile and loops over its live key tiles j, from the last to the
first, with K and V double-buffered by hand:

    HBM    K, V of tile j - 1        (empty tiles are never copied)
             | DMA, started before tile j is computed
    VMEM   K, V buffer (j - 1) & 1 fills, while the units read buffer j & 1
             | drained by `DoubleBuffer.wait` at the start of iteration j
    MXU    S = Q K^T       acc += P V            of sub-tiles, pipelined:
    VPU         P = exp2(S - m), l += P          see `softmax.full_tile`

Pallas itself double-buffers q, the bounds, the carry, out and lse, a block a program.
In causal attention the last live key tile holds each row's own key, so every row
attends to some key in the first iteration, and has an m for the others.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..tile_ranges import TileRanges
from .block_sizes import TpuBlocks
from .bounds import RowBounds, SubBlockBounds
from .dma import DoubleBuffer, Tiles, stacked_rows
from .softmax import NOTHING, SUM_LIMIT, SoftmaxState, exact_tile, full_tile
from .vector import (
    LANES,
    TileConfig,
    broadcast_lanes,
    buffer_bytes,
    column_to_row,
    flat_index,
    reciprocal,
    row_to_column,
)


class Carry(NamedTuple):
    """A partial result over other keys: rows that have attended to none have NOTHING.

    out: float32, as `Operands.q`.
    lse: [M, X, query tiles, R / 128, 128], base 2.
    """

    out: jax.Array
    lse: jax.Array


class Operands(NamedTuple):
    """Arrays that the forward kernel reads.

    key_tile_ranges: 4 x [M * query tiles], SMEM.
    min_k_start, max_k_end: of sub-blocks, [M * query tiles * sub-blocks], SMEM.
    row_bounds: k_start and k_end as `int_to_float_bits`, [M, query tiles, 2, R / 128,
      128].
    q: [M, X, G, query tiles * block_q, D].
    k, v: [M, X, key tiles, block_k, D], left in HBM.
    """

    key_tile_ranges: TileRanges
    min_k_start: jax.Array
    max_k_end: jax.Array
    row_bounds: jax.Array
    q: jax.Array
    k: jax.Array
    v: jax.Array
    carry: Carry | tuple[()]


class Scratch(NamedTuple):
    """VMEM of a program, and the semaphores of its copies."""

    k: jax.Ref  # [2, block_k, D]
    v: jax.Ref  # [2, block_k, D]
    semaphores: jax.Ref  # [k and v, 2]
    state: SoftmaxState
    bounds: RowBounds  # 2 x [R, 128]
    q: jax.Ref | tuple[()]  # [R, D], where several heads are stacked

    @classmethod
    def shapes(cls, group: int, rows: int, block_k: int, depth: int, dtype: jnp.dtype):
        """Returns the scratch to allocate. rows: R. depth: D."""
        bound = pltpu.VMEM((rows, LANES), jnp.int32)
        return cls(
            k=pltpu.VMEM((2, block_k, depth), dtype),
            v=pltpu.VMEM((2, block_k, depth), dtype),
            semaphores=pltpu.SemaphoreType.DMA((2, 2)),
            state=SoftmaxState(
                m=pltpu.VMEM((rows, LANES), jnp.float32),
                l=pltpu.VMEM((2, rows, LANES), jnp.float32),
                acc=pltpu.VMEM((2, rows, depth), jnp.float32),
            ),
            bounds=RowBounds(k_start=bound, k_end=bound),
            q=pltpu.VMEM((rows, depth), dtype) if group > 1 else (),
        )


def held_bytes(
    blocks: TpuBlocks, group: int, row: jax.ShapeDtypeStruct, has_carry: bool
) -> int:
    """Returns the VMEM that a program takes. group: heads stacked. row: of q, [D]."""
    rows, (depth,) = blocks.stacked_rows, row.shape
    q = pltpu.VMEM((rows, depth), row.dtype)
    out = pltpu.VMEM((rows, depth), jnp.float32)
    pipelined = {"q": q, "out": out, "carry": out if has_carry else ()}
    scratch = Scratch.shapes(group, rows, blocks.block_k, depth, row.dtype)
    in_flight = blocks.ahead + blocks.behind + 2  # sub-tiles of S and P
    scores = in_flight * blocks.rows * blocks.columns * 4
    return 2 * buffer_bytes(pipelined) + buffer_bytes(scratch) + scores


def forward_call(
    config: TileConfig, operands: Operands, **options
) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel. options: of `pl.pallas_call`.

    Returns:
      out and lse, shaped like a `Carry`; lse in base 2, -inf for empty rows.
    """
    batch, heads, group, _, depth = operands.q.shape
    query_tiles, strips = operands.row_bounds.shape[1], operands.row_bounds.shape[3]
    rows, block_k = strips * LANES, operands.k.shape[3]
    q_block = pl.BlockSpec(  # [G, block_q, D]
        (None, None, group, rows // group, depth), lambda b, x, i, *_: (b, x, 0, i, 0)
    )
    lse_block = pl.BlockSpec(  # [R / 128, 128]
        (None, None, None, strips, LANES), lambda b, x, i, *_: (b, x, i, 0, 0)
    )
    bounds_block = pl.BlockSpec(  # [2, R / 128, 128]
        (None, None, 2, strips, LANES), lambda b, x, i, *_: (b, i, 0, 0, 0)
    )
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    carry_blocks = Carry(out=q_block, lse=lse_block) if operands.carry else ()
    # A block of the carry is read before its result is written in its place.
    first = flat_index(operands, "carry")
    aliases = {first: 0, first + 1: 1} if operands.carry else {}
    call = pl.pallas_call(
        functools.partial(_kernel, config),
        name="flash_forward",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, heads, query_tiles),
            in_specs=[bounds_block, q_block, hbm, hbm, carry_blocks],
            out_specs=(q_block, lse_block),
            scratch_shapes=[
                Scratch.shapes(group, rows, block_k, depth, operands.q.dtype)
            ],
        ),
        out_shape=(
            jax.ShapeDtypeStruct(operands.q.shape, jnp.float32),
            jax.ShapeDtypeStruct(
                (batch, heads, query_tiles, strips, LANES), jnp.float32
            ),
        ),
        input_output_aliases=aliases,
        **options,
    )
    return call(*operands)


def _kernel(
    config: TileConfig,
    ranges_ref: TileRanges,  # SMEM, as in `Operands`, and so the next two
    min_k_start_ref: jax.Ref,
    max_k_end_ref: jax.Ref,
    bounds_ref: jax.Ref,  # [2, R / 128, 128]
    q_ref: jax.Ref,  # [G, block_q, D]
    k_hbm_ref: jax.Ref,  # [M, X, key tiles, block_k, D]
    v_hbm_ref: jax.Ref,  # [M, X, key tiles, block_k, D]
    carry_ref: Carry | tuple[()],  # out [G, block_q, D], lse [R / 128, 128]
    out_ref: jax.Ref,  # [G, block_q, D]
    lse_ref: jax.Ref,  # [R / 128, 128]
    scratch: Scratch,
) -> None:
    """Attends to all keys with one query tile: program (batch, head, query tile)."""
    batch, head, i = (pl.program_id(axis) for axis in range(3))
    query_tile = batch * pl.num_programs(2) + i
    ranges = jax.tree.map(lambda bound_ref: bound_ref[query_tile], ranges_ref)
    stacked_q_ref = stack_heads(q_ref, scratch.q)  # [R, D]
    sub_blocks = stacked_q_ref.shape[0] // config.blocks.exact_rows
    work = QueryTile(
        config=config,
        ranges=ranges,
        has_carry=bool(carry_ref),
        q=stacked_q_ref,
        state=scratch.state,
        bounds=scratch.bounds,
        sub_blocks=SubBlockBounds(
            min_k_start=min_k_start_ref,
            max_k_end=max_k_end_ref,
            offset=query_tile * sub_blocks,
        ),
    )
    kv = DoubleBuffer(
        sources=(Tiles(k_hbm_ref.at[batch, head]), Tiles(v_hbm_ref.at[batch, head])),
        buffers=(scratch.k, scratch.v),
        semaphores=scratch.semaphores,
    )
    work.init(carry_ref)
    has_partial = (ranges.live_begin < ranges.full_begin) | (
        ranges.full_end < ranges.live_end
    )
    pl.when(has_partial)(lambda: work.bounds.load(bounds_ref))

    @pl.when(ranges.live_begin < ranges.live_end)
    def _():
        kv.start(ranges.live_end - 1)

    @pl.loop(0, ranges.live_end - ranges.live_begin)
    def _(step):
        j = ranges.live_end - 1 - step

        @pl.when(j > ranges.live_begin)
        def _():
            kv.start(j - 1)  # into the buffers that iteration j + 1 has read

        # Drains K(j), V(j), started by the last iteration, or before the loop.
        k_ref, v_ref = kv.wait(j)  # [block_k, D]
        work.attend(j, k_ref, v_ref)

    work.finish(out_ref, lse_ref)


def stack_heads(x_ref: jax.Ref, buffer_ref: jax.Ref | tuple[()]) -> jax.Ref:
    """Returns [G, block_q, D] as [R, D]: itself where G is 1, else in the buffer."""
    if x_ref.shape[0] == 1:
        return x_ref.at[0]
    for head, rows in enumerate(stacked_rows(x_ref.shape[0], buffer_ref.shape[0])):
        buffer_ref[rows, :] = x_ref[head]  # [block_q, D]
    return buffer_ref


class QueryTile(NamedTuple):
    """A query tile in VMEM, and its softmax so far."""

    config: TileConfig
    ranges: TileRanges  # of this query tile
    has_carry: bool  # then nearly all rows have an m already
    q: jax.Ref  # [R, D]
    state: SoftmaxState  # m [R, 128], l [2, R, 128], acc [2, R, D]
    bounds: RowBounds  # 2 x [R, 128], filled where there are partial tiles
    sub_blocks: SubBlockBounds

    def init(self, carry_ref: Carry | tuple[()]) -> None:
        """Sets m, l and acc: to nothing, or to a carry, as of one key with P = 1."""
        state = self.state
        if not carry_ref:
            state.m[...] = jnp.full_like(state.m, NOTHING)  # [R, 128]
            state.l[0] = jnp.zeros(state.l.shape[1:], jnp.float32)  # [R, 128]
            state.acc[0] = jnp.zeros(state.acc.shape[1:], jnp.float32)  # [R, D]
            return
        for head, rows in enumerate(self._rows_of_heads(carry_ref.out)):
            state.acc[0, rows, :] = carry_ref.out[head]  # [block_q, D]
        for strip in range(carry_ref.lse.shape[0]):
            rows = pl.ds(strip * LANES, LANES)
            m = row_to_column(carry_ref.lse[pl.ds(strip, 1), :])  # [128, 128]
            state.m[rows, :] = m
            # The sum over the lanes is 1.
            state.l[0, rows, :] = jnp.where(m > NOTHING, 1 / LANES, 0.0)  # [128, 128]

    def attend(self, j: jax.Array, k_ref: jax.Ref, v_ref: jax.Ref) -> None:
        """Adds key tile j to the softmax. k_ref, v_ref: [block_k, D]."""
        is_full = (self.ranges.full_begin <= j) & (j < self.ranges.full_end)
        pl.when(is_full)(lambda: self._attend_full(j, k_ref, v_ref))
        pl.when(~is_full)(lambda: self._attend_partial(j, k_ref, v_ref))

    def finish(self, out_ref: jax.Ref, lse_ref: jax.Ref) -> None:
        """Writes out = acc / l and lse = m + log2(l)."""
        src = self._version(self.ranges.full_begin - 1)
        is_stacked = out_ref.shape[0] > 1
        normalised_ref = self.state.acc.at[src] if is_stacked else out_ref.at[0]
        for strip in range(lse_ref.shape[0]):
            rows = pl.ds(strip * LANES, LANES)
            state = self.state.at(src, rows)
            l = state.l[...].sum(axis=1, keepdims=True)  # [128, 1]
            has_keys = l != 0  # also where it is nan, which must show
            l = jnp.where(has_keys, l, 1.0)  # [128, 1]
            l = jnp.broadcast_to(l, (LANES, LANES))  # [128, 128]
            inverse = broadcast_lanes(reciprocal(l), out_ref.shape[-1])  # [128, D]
            normalised_ref[rows, :] = state.acc[...] * inverse
            lse = jnp.where(has_keys, state.m[...] + jnp.log2(l), -jnp.inf)
            lse_ref[pl.ds(strip, 1), :] = column_to_row(lse)  # [1, 128]
        if is_stacked:
            for head, rows in enumerate(self._rows_of_heads(out_ref)):
                out_ref[head] = normalised_ref[rows, :]  # [block_q, D]

    def _rows_of_heads(self, tile_ref: jax.Ref) -> list[pl.Slice]:
        """Returns the stacked rows of each head of a [G, block_q, D] tile."""
        return stacked_rows(tile_ref.shape[0], self.q.shape[0])

    def _version(self, j: jax.Array) -> jax.Array:
        """Returns the version of l, acc that key tile j reads; full tiles flip it."""
        full_begin, full_end = self.ranges.full_begin, self.ranges.full_end
        return jnp.clip(full_end - 1 - j, 0, full_end - full_begin) & 1

    def _attend_full(self, j: jax.Array, k_ref: jax.Ref, v_ref: jax.Ref) -> None:
        src = self._version(j)
        if not self.has_carry:
            is_first = j == self.ranges.live_end - 1
            pl.when(is_first)(lambda: self._init_max(src, k_ref))
        max_l = full_tile(self.q, k_ref, v_ref, self.state, src, self.config)

        @pl.when(max_l > SUM_LIMIT)
        def _():
            for x in self.state.l, self.state.acc:
                x[1 - src] = x[src]

            def step(_: jax.Array, rows: pl.Slice) -> None:
                state = self.state.at(1 - src, rows)
                q = self.q[rows, :]  # [exact_rows, D]
                exact_tile(q, k_ref, v_ref, state, lambda s, c: s, self.config)

            self._for_each_sub_block(step)

    def _init_max(self, src: jax.Array, k_ref: jax.Ref) -> None:
        """Sets m to the maxima over the first 128 keys of a tile."""

        def step(_: jax.Array, rows: pl.Slice) -> None:
            q, k = (
                self.q[rows, :],
                k_ref[pl.ds(0, LANES), :],
            )  # [exact_rows, D], [128, D]
            s = self.config.scores(q, k)  # [exact_rows, 128]
            self.state.at(src, rows).update_max([s])

        self._for_each_sub_block(step)

    def _attend_partial(self, j: jax.Array, k_ref: jax.Ref, v_ref: jax.Ref) -> None:
        src = self._version(j)  # partial tiles write the version that they read
        block_k, granule = k_ref.shape[0], self.config.blocks.live_columns

        def step(block: jax.Array, rows: pl.Slice) -> None:
            begin, count = self.sub_blocks.live_granules(
                block, j * block_k, block_k, granule
            )
            begin = pl.multiple_of(begin * granule, granule)
            first_key = j * block_k + begin

            def mask(s: jax.Array, c: int) -> jax.Array:
                return self.bounds.mask(rows, first_key + c, s)

            def attend(width: int) -> None:
                keys = pl.ds(begin, width)
                k, v = k_ref.at[keys, :], v_ref.at[keys, :]  # [width, D]
                state, q = self.state.at(src, rows), self.q[rows, :]
                exact_tile(q, k, v, state, mask, self.config)

            # Shapes are static: one branch for each number of live granules.
            for live in range(1, block_k // granule + 1):
                pl.when(count == live)(functools.partial(attend, live * granule))

        self._for_each_sub_block(step)

    def _for_each_sub_block(self, step: Callable) -> None:
        """Calls step(block, rows) for each sub-block of `exact_rows` query rows."""
        rows = self.config.blocks.exact_rows

        @pl.loop(0, self.q.shape[0] // rows)
        def _(block):
            step(block, pl.ds(pl.multiple_of(block * rows, rows), rows))
