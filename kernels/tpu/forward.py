"""The Pallas TPU kernel of the forward step.

A program owns one query tile of R stacked rows (see `tiling`) and visits its live key
tiles from the last to the first: where queries see the past, the last one holds the
keys that every row sees, itself among them, and gives it a maximum to start from. It
copies them from HBM itself, one ahead of the one it computes, so that empty tiles cost
neither a grid step nor a transfer.
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
from .softmax import (
    NOTHING,
    SUM_LIMIT,
    Bounds,
    ForwardTile,
    Softmax,
    exact_step,
    full_tile,
)
from .tile import (
    LANES,
    Edges,
    TileCopies,
    Tiles,
    buffer_bytes,
    for_each_tile_down,
    lanes_to_rows,
    reciprocal,
    rows_to_lanes,
    spread,
    stacked_rows,
)


class Operands(NamedTuple):
    """What the forward kernel reads.

    ranges: of key tiles, (M * query tiles,) each, in SMEM.
    first, last: least start and largest stop of each sub-block, (M * query tiles *
      sub-blocks,), in SMEM.
    bounds: start and stop of the rows, `as_floats`, (M, query tiles, 2, R / LANES,
      LANES).
    q: (M, X, G, query tiles * block_q, D): rows are stacked in VMEM.
    keys, values: (M, X, key tiles, block_k, D), in HBM.
    carry: result like q and lse (M, X, query tiles, R / LANES, LANES) over other keys;
      lse in powers of 2, and NOTHING for rows that saw nothing; or ().
    """

    ranges: TileRanges
    first: jax.Array
    last: jax.Array
    bounds: jax.Array
    q: jax.Array
    keys: jax.Array
    values: jax.Array
    carry: tuple[jax.Array, ...]


class Scratch(NamedTuple):
    """VMEM of a program, and the semaphores of its copies."""

    keys: jax.Ref  # (2, block_k, D)
    values: jax.Ref
    semaphores: jax.Ref  # (2, 2)
    state: Softmax
    start: jax.Ref  # (R, LANES), equal lanes
    stop: jax.Ref
    q: jax.Ref | tuple[()]  # (R, D), where several heads are stacked

    @classmethod
    def shapes(cls, group: int, rows: int, block_k: int, depth: int, dtype: jnp.dtype):
        tile = pltpu.VMEM((2, block_k, depth), dtype)
        bound = pltpu.VMEM((rows, LANES), jnp.int32)
        state = Softmax(
            pltpu.VMEM((rows, LANES), jnp.float32),
            pltpu.VMEM((2, rows, LANES), jnp.float32),
            pltpu.VMEM((2, rows, depth), jnp.float32),
        )
        q = pltpu.VMEM((rows, depth), dtype) if group > 1 else ()
        semaphores = pltpu.SemaphoreType.DMA((2, 2))
        return cls(tile, tile, semaphores, state, bound, bound, q)


def held_bytes(
    blocks: TpuBlocks, group: int, row: jax.ShapeDtypeStruct, has_carry: bool
) -> int:
    """Vector memory that a program takes. group: heads that it stacks. row: of q."""
    rows, (depth,) = blocks.stacked_rows, row.shape
    scratch = Scratch.shapes(group, rows, blocks.block_k, depth, row.dtype)
    q_tile, wide = (
        jax.ShapeDtypeStruct((rows, depth), dtype) for dtype in (row.dtype, jnp.float32)
    )
    pieces = blocks.ahead + blocks.behind + 2
    scores = pieces * blocks.rows * blocks.columns * 4
    return scores + buffer_bytes(
        *[q_tile] * 2,
        *[wide] * (4 if has_carry else 2),
        *jax.tree.leaves(scratch._replace(semaphores=())),
    )


def forward_call(
    tile: ForwardTile, operands: Operands, **options
) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel. options: of `pl.pallas_call`.

    Returns:
      out and lse, cut like the carry; lse in powers of 2, -inf for empty rows.
    """
    m, heads, group, _, depth = operands.q.shape
    tiles, strips = operands.bounds.shape[1], operands.bounds.shape[3]
    rows = strips * LANES
    results = (
        pl.BlockSpec(
            (None, None, group, rows // group, depth),
            lambda m, x, i, *_: (m, x, 0, i, 0),
        ),
        pl.BlockSpec(
            (None, None, None, strips, LANES), lambda m, x, i, *_: (m, x, i, 0, 0)
        ),
    )
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    bounds = pl.BlockSpec(
        (None, None, 2, strips, LANES), lambda m, x, i, *_: (m, i, 0, 0, 0)
    )
    block_k = operands.keys.shape[3]
    scratch = Scratch.shapes(group, rows, block_k, depth, operands.q.dtype)
    # A tile of the carry is read before its result is written in its place. Operands
    # are counted leaf by leaf: the carry's come last.
    carried = len(jax.tree.leaves(operands)) - 2
    aliases = {carried: 0, carried + 1: 1} if operands.carry else {}
    call = pl.pallas_call(
        functools.partial(_kernel, tile),
        name="flash_forward",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(m, heads, tiles),
            in_specs=[bounds, results[0], hbm, hbm, results if operands.carry else ()],
            out_specs=results,
            scratch_shapes=[scratch],
        ),
        out_shape=(
            jax.ShapeDtypeStruct(operands.q.shape, jnp.float32),
            jax.ShapeDtypeStruct((m, heads, tiles, strips, LANES), jnp.float32),
        ),
        input_output_aliases=aliases,
        **options,
    )
    return call(*operands)


def _kernel(
    tile: ForwardTile,
    ranges: TileRanges,
    first: jax.Ref,
    last: jax.Ref,
    bounds: jax.Ref,
    q: jax.Ref,
    keys: jax.Ref,
    values: jax.Ref,
    carry: tuple[jax.Ref, ...],
    out: jax.Ref,
    lse: jax.Ref,
    scratch: Scratch,
) -> None:
    """One query tile of one head: program (row of bounds, head, query tile)."""
    row, head, query_tile = (pl.program_id(axis) for axis in range(3))
    line = row * pl.num_programs(2) + query_tile
    ranges = TileRanges(*(bound[line] for bound in ranges))
    rows = stacked(q, scratch.q)
    edges = Edges(first, last, line * (rows.shape[0] // tile.exact_rows))
    work = QueryTile(
        tile,
        ranges,
        bool(carry),
        rows,
        scratch.state,
        Bounds(scratch.start, scratch.stop, edges),
    )
    copies = TileCopies(
        tuple(Tiles(x.at[row, head]) for x in (keys, values)),
        (scratch.keys, scratch.values),
        scratch.semaphores,
    )
    work.begin(carry)
    has_partial = (ranges.live_begin < ranges.full_begin) | (
        ranges.full_end < ranges.live_end
    )
    pl.when(has_partial)(lambda: work.bounds.spread(bounds))
    for_each_tile_down(ranges.live_begin, ranges.live_end, copies, work.visit)
    work.finish(out, lse)


def stacked(x: jax.Ref, buffer: jax.Ref | tuple[()]) -> jax.Ref:
    """(G, block_q, D) -> (R, D): the same where G is 1, copied to a buffer else."""
    if x.shape[0] == 1:
        return x.at[0]
    for head, rows in enumerate(stacked_rows(x.shape[0], buffer.shape[0])):
        buffer[rows, :] = x[head]
    return buffer


class QueryTile(NamedTuple):
    """The work of one program, tile after tile."""

    tile: ForwardTile
    ranges: TileRanges  # of this query tile
    has_carry: bool  # then nearly all rows have a reference
    q: jax.Ref  # (R, D)
    state: Softmax
    bounds: Bounds

    def begin(self, carry: tuple[jax.Ref, ...]) -> None:
        """Starts from nothing, or from a carry: one key of weight 1."""
        state = self.state
        if not carry:
            state.reference[...] = jnp.full_like(state.reference, NOTHING)
            state.total[0] = jnp.zeros(state.total.shape[1:], jnp.float32)
            state.result[0] = jnp.zeros(state.result.shape[1:], jnp.float32)
            return
        result, lse = carry
        for head, rows in enumerate(self._rows_of_heads(result)):
            state.result[0, rows, :] = result[head]
        for strip in range(lse.shape[0]):
            rows = pl.ds(strip * LANES, LANES)
            reference = rows_to_lanes(lse[pl.ds(strip, 1), :])
            state.reference[rows, :] = reference
            state.total[0, rows, :] = jnp.where(reference > NOTHING, 1 / LANES, 0.0)

    def visit(self, j: jax.Array, k: jax.Ref, v: jax.Ref) -> None:
        """Takes key tile j into the state. k, v: (block_k, D)."""
        full_begin, full_end = self.ranges.full_begin, self.ranges.full_end
        is_full = (full_begin <= j) & (j < full_end)
        pl.when(is_full)(lambda: self._visit_full(j, k, v))
        pl.when(~is_full)(lambda: self._visit_partial(j, k, v))

    def finish(self, out: jax.Ref, lse: jax.Ref) -> None:
        """Writes what the state amounts to."""
        version = self._version(self.ranges.full_begin - 1)
        is_stacked = out.shape[0] > 1
        result = self.state.result.at[version] if is_stacked else out.at[0]
        for strip in range(lse.shape[0]):
            rows = pl.ds(strip * LANES, LANES)
            state = self.state.at(version, rows)
            total = state.total[...].sum(axis=1, keepdims=True)
            seen = total != 0  # also where it is nan, which must show
            total = jnp.broadcast_to(jnp.where(seen, total, 1.0), (LANES, LANES))
            share = spread(reciprocal(total), out.shape[-1])
            result[rows, :] = state.result[...] * share
            row_lse = jnp.where(seen, state.reference[...] + jnp.log2(total), -jnp.inf)
            lse[pl.ds(strip, 1), :] = lanes_to_rows(row_lse)
        if is_stacked:
            for head, rows in enumerate(self._rows_of_heads(out)):
                out[head] = result[rows, :]

    def _rows_of_heads(self, tile: jax.Ref) -> list[pl.Slice]:
        """Where those of (G, block_q, D) are among the stacked ones."""
        return stacked_rows(tile.shape[0], self.q.shape[0])

    def _version(self, j: jax.Array) -> jax.Array:
        """Which version of the state key tile j starts from: full tiles swap them."""
        full_begin, full_end = self.ranges.full_begin, self.ranges.full_end
        return jnp.clip(full_end - 1 - j, 0, full_end - full_begin) & 1

    def _visit_full(self, j: jax.Array, k: jax.Ref, v: jax.Ref) -> None:
        version = self._version(j)
        if not self.has_carry:
            is_first = j == self.ranges.live_end - 1
            pl.when(is_first)(lambda: self._first_look(version, k))
        worst = full_tile(self.q, k, v, self.state, version, self.tile)

        @pl.when(worst > SUM_LIMIT)
        def _():
            for x in self.state.total, self.state.result:
                x[1 - version] = x[version]

            def step(_: jax.Array, rows: pl.Slice) -> None:
                state = self.state.at(1 - version, rows)
                exact_step(self.q[rows, :], k, v, state, lambda s, c: s, self.tile)

            self._for_each_sub_block(step)

    def _first_look(self, version: jax.Array, k: jax.Ref) -> None:
        def step(_: jax.Array, rows: pl.Slice) -> None:
            scores = self.tile.scores(self.q[rows, :], k[pl.ds(0, LANES), :])
            self.state.at(version, rows).raise_reference([scores])

        self._for_each_sub_block(step)

    def _visit_partial(self, j: jax.Array, k: jax.Ref, v: jax.Ref) -> None:
        version = self._version(j)
        block_k, granule = k.shape[0], self.tile.live_columns

        def step(block: jax.Array, rows: pl.Slice) -> None:
            edges = self.bounds.edges
            begin, count = edges.live(block, j * block_k, block_k, granule)
            first = pl.multiple_of(begin * granule, granule)
            hide = functools.partial(self.bounds.hide, rows, j * block_k + first)

            def narrowed(width: int) -> None:
                columns = pl.ds(first, width)
                state = self.state.at(version, rows)
                some = k.at[columns, :], v.at[columns, :]
                exact_step(self.q[rows, :], *some, state, hide, self.tile)

            for live in range(1, block_k // granule + 1):
                pl.when(count == live)(functools.partial(narrowed, live * granule))

        self._for_each_sub_block(step)

    def _for_each_sub_block(self, step: Callable) -> None:
        rows = self.tile.exact_rows

        @pl.loop(0, self.q.shape[0] // rows)
        def _(block):
            step(block, pl.ds(pl.multiple_of(block * rows, rows), rows))
