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
from .cut import Cut
from .dma import DoubleBuffer, Tiles, stacked_rows
from .orientation import Orientation, strips
from .softmax import NOTHING, SUM_LIMIT, SoftmaxState, exact_tile, full_tile
from .tile_config import TileConfig
from .vector import LANES, buffer_bytes, flat_index, reciprocal


class Carry(NamedTuple):
    """A partial result over other keys: rows that have attended to none have NOTHING.

    out: float32 accumulators: as `Operands.q`, or its last two axes swapped.
    lse: [M, X, query tiles, ...], base 2, `Orientation.packed`.
    """

    out: jax.Array
    lse: jax.Array


class Operands(NamedTuple):
    """Arrays that the forward kernel reads.

    key_tile_ranges: 4 x [M * query tiles], SMEM.
    min_k_start, max_k_end: of sub-blocks, [M * query tiles * sub-blocks], SMEM.
    row_bounds: k_start and k_end, `Orientation.packed`, [M, query tiles, 2, ...].
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
    ):
        """Returns the scratch to allocate. depth: D."""
        rows, keys = blocks.stacked_rows, (2, blocks.block_k, depth)
        numbers = orientation.ordered(rows, orientation.number_width)
        bound = pltpu.VMEM(numbers, jnp.int32)
        return cls(
            k=pltpu.VMEM(keys, dtype),
            v=pltpu.VMEM(keys, dtype),
            semaphores=pltpu.SemaphoreType.DMA((2, 2)),
            state=SoftmaxState.shapes(rows, depth, orientation),
            bounds=RowBounds(k_start=bound, k_end=bound),
            q=pltpu.VMEM((rows, depth), dtype) if group > 1 else (),
        )


def held_bytes(cut: Cut, row: jax.ShapeDtypeStruct, has_carry: bool) -> int:
    """Returns the VMEM that a program takes. row: of q, [D]."""
    blocks, (depth,) = cut.blocks, row.shape
    rows = blocks.stacked_rows
    q = pltpu.VMEM((rows, depth), row.dtype)
    out = pltpu.VMEM((rows, depth), jnp.float32)
    pipelined = {"q": q, "out": out, "carry": out if has_carry else ()}
    scratch = Scratch.shapes(cut.heads, blocks, depth, row.dtype, cut.orientation)
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
    batch, heads, group, tokens, depth = operands.q.shape
    query_tiles, orientation = operands.row_bounds.shape[1], config.orientation
    rows = config.blocks.stacked_rows
    accumulator = orientation.ordered(rows // group, depth)
    packed = orientation.packed(rows)

    def tile(*place: jax.Array) -> tuple[jax.Array, ...]:
        return *place, *(0 for _ in packed)

    q_block = pl.BlockSpec(  # [G, block_q, D]
        (None, None, group, rows // group, depth), lambda b, x, i, *_: (b, x, 0, i, 0)
    )
    out_block = pl.BlockSpec(  # [G, block_q, D], or the last two swapped
        (None, None, group, *accumulator),
        lambda b, x, i, *_: (b, x, 0, *orientation.ordered(i, 0)),
    )
    lse_block = pl.BlockSpec(
        (None, None, None, *packed), lambda b, x, i, *_: tile(b, x, i)
    )
    bounds_block = pl.BlockSpec(
        (None, None, 2, *packed), lambda b, x, i, *_: tile(b, i, 0)
    )
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    carry_blocks = Carry(out=out_block, lse=lse_block) if operands.carry else ()
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
            out_specs=(out_block, lse_block),
            scratch_shapes=[
                Scratch.shapes(
                    group, config.blocks, depth, operands.q.dtype, orientation
                )
            ],
        ),
        out_shape=(
            jax.ShapeDtypeStruct(
                (batch, heads, group, *orientation.ordered(tokens, depth)), jnp.float32
            ),
            jax.ShapeDtypeStruct((batch, heads, query_tiles, *packed), jnp.float32),
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
    bounds_ref: jax.Ref,  # [2, ...], packed
    q_ref: jax.Ref,  # [G, block_q, D]
    k_hbm_ref: jax.Ref,  # [M, X, key tiles, block_k, D]
    v_hbm_ref: jax.Ref,  # [M, X, key tiles, block_k, D]
    carry_ref: Carry | tuple[()],
    out_ref: jax.Ref,  # [G, block_q, D], or the last two swapped
    lse_ref: jax.Ref,  # packed
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
    pl.when(has_partial)(lambda: work.bounds.load(bounds_ref, config.orientation))

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
    state: SoftmaxState
    bounds: RowBounds  # filled where there are partial tiles
    sub_blocks: SubBlockBounds

    def init(self, carry_ref: Carry | tuple[()]) -> None:
        """Sets m, l and acc: to nothing, or to a carry, as of one key with P = 1."""
        orientation, state = self.config.orientation, self.state
        if not carry_ref:
            state.m[...] = jnp.full_like(state.m, NOTHING)
            state.l[0] = jnp.zeros(state.l.shape[1:], jnp.float32)
            state.acc[0] = jnp.zeros(state.acc.shape[1:], jnp.float32)
            return
        for head, rows in enumerate(self._rows_of_heads(carry_ref.out)):
            orientation.at(state.acc.at[0], rows)[...] = carry_ref.out[head]
        for strip, rows in strips(self.q.shape[0]):
            some = state.at(0, rows, orientation)
            m = orientation.unpack(carry_ref.lse[orientation.strip(strip)])
            some.m[...] = m
            one = jnp.where(m > NOTHING, 1 / orientation.sum_width, 0.0)
            some.l[...] = jnp.broadcast_to(one, some.l.shape)  # add up to 1

    def attend(self, j: jax.Array, k_ref: jax.Ref, v_ref: jax.Ref) -> None:
        """Adds key tile j to the softmax. k_ref, v_ref: [block_k, D]."""
        is_full = (self.ranges.full_begin <= j) & (j < self.ranges.full_end)
        pl.when(is_full)(lambda: self._attend_full(j, k_ref, v_ref))
        pl.when(~is_full)(lambda: self._attend_partial(j, k_ref, v_ref))

    def finish(self, out_ref: jax.Ref, lse_ref: jax.Ref) -> None:
        """Writes out = acc / l and lse = m + log2(l)."""
        orientation, src = (
            self.config.orientation,
            self._version(self.ranges.full_begin - 1),
        )
        is_stacked = out_ref.shape[0] > 1
        normalised_ref = self.state.acc.at[src] if is_stacked else out_ref.at[0]
        for strip, rows in strips(self.q.shape[0]):
            state = self.state.at(src, rows, orientation)
            l = state.l[...].sum(axis=orientation.keys_axis, keepdims=True)
            has_keys = l != 0  # also where it is nan, which must show
            l = jnp.where(has_keys, l, 1.0)
            l = jnp.broadcast_to(l, state.m.shape)  # numbers of rows
            inverse = orientation.widen(
                reciprocal(l), state.acc.shape[orientation.keys_axis]
            )
            orientation.at(normalised_ref, rows)[...] = state.acc[...] * inverse
            lse = jnp.where(has_keys, state.m[...] + jnp.log2(l), -jnp.inf)
            lse_ref[orientation.strip(strip)] = orientation.pack(lse)  # [1, 128]
        if is_stacked:
            for head, rows in enumerate(self._rows_of_heads(out_ref)):
                out_ref[head] = orientation.at(normalised_ref, rows)[...]

    def _rows_of_heads(self, tile_ref: jax.Ref) -> list[pl.Slice]:
        """Returns the stacked rows of each head of a tile [G, ...]."""
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
                state = self.state.at(1 - src, rows, self.config.orientation)
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
            orientation = self.config.orientation
            s = self.config.scores(*orientation.ordered(q, k))
            self.state.at(src, rows, orientation).update_max([s], orientation)

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
                return self.bounds.mask(rows, first_key + c, s, self.config.orientation)

            def attend(width: int) -> None:
                keys = pl.ds(begin, width)
                k, v = k_ref.at[keys, :], v_ref.at[keys, :]  # [width, D]
                state = self.state.at(src, rows, self.config.orientation)
                q = self.q[rows, :]  # [exact_rows, D]
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
