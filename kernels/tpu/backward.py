"""The Pallas TPU kernel of the backward step: dq, dk and dv in one pass.

A program owns one key tile and visits its live query tiles in order (FlashAttention-2,
2307.08691, algorithm 2, with five products a tile). Scores are transposed, keys by
queries, so that what belongs to a query lies along the lanes and is never spread.

dq is added up in float32. It stays in VMEM for all key tiles of a head where it fits
there, and otherwise moves to HBM and back with the query tiles, behind their work.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..tile_ranges import TileRanges
from .backward_dq import STREAMED, Resident, Streamed
from .block_sizes import TpuBlocks
from .tile import (
    INNER,
    OUTER,
    TRANSPOSED,
    Edges,
    StackedTiles,
    TileCopies,
    Tiles,
    buffer_bytes,
    dot,
)


class BackwardTile(NamedTuple):
    """How a program computes its tiles.

    rows: query rows of a sub-block of a full tile.
    exact_rows: query rows of a sub-block of a partial tile.
    live_columns: granule in which such a sub-block skips keys that no row sees.
    scale: factor on the products of queries and keys, for exponents of 2.
    precision: of the matrix products.
    """

    rows: int
    exact_rows: int
    live_columns: int
    scale: float
    precision: lax.Precision


class Operands(NamedTuple):
    """What the backward kernel reads.

    ranges: of query tiles, (M * key tiles,) each, in SMEM.
    first, last: least start and largest stop of each sub-block, (M * query tiles *
      sub-blocks,), in SMEM.
    keys, values: (M, X, key tiles, block_k, D).
    q, d_out: (M, X, G, query tiles * block_q, D): rows are stacked in VMEM.
    rows: lse, in powers of 2, and delta: (M, X, query tiles, 2, R). With an lse smaller
      by the logarithm of a factor, weights, dq, dk and dv come out times that factor.
    bounds: start and stop: int32 (M, query tiles, 2, R).
    dq: float32, like q, what is there already.
    """

    ranges: TileRanges
    first: jax.Array
    last: jax.Array
    keys: jax.Array
    values: jax.Array
    q: jax.Array
    d_out: jax.Array
    rows: jax.Array
    bounds: jax.Array
    dq: jax.Array


class Scratch(NamedTuple):
    """VMEM of a program, and the semaphores of its copies."""

    q: jax.Ref  # (2, R, D)
    d_out: jax.Ref
    rows: jax.Ref  # (2, 2, R)
    bounds: jax.Ref
    semaphores: jax.Ref  # (4, 2)
    dq: jax.Ref  # (query tiles or STREAMED, R, D)
    dq_semaphores: jax.Ref  # (2, STREAMED): in, out

    @classmethod
    def shapes(cls, rows: int, depth: int, dtype: jnp.dtype, dq_tiles: int):
        return cls(
            pltpu.VMEM((2, rows, depth), dtype),
            pltpu.VMEM((2, rows, depth), dtype),
            pltpu.VMEM((2, 2, rows), jnp.float32),
            pltpu.VMEM((2, 2, rows), jnp.int32),
            pltpu.SemaphoreType.DMA((4, 2)),
            pltpu.VMEM((dq_tiles, rows, depth), jnp.float32),
            pltpu.SemaphoreType.DMA((2, STREAMED)),
        )


class Memory(NamedTuple):
    """Vector memory of a program, in bytes, and whether dq of a head stays there.

    It does if it takes no more than half of what the rest leaves.
    """

    held: int
    is_dq_resident: bool

    @classmethod
    def of(
        cls, blocks: TpuBlocks, row: jax.ShapeDtypeStruct, query_tiles: int, limit: int
    ) -> "Memory":
        """row: of q."""
        (depth,) = row.shape
        scratch = Scratch.shapes(blocks.stacked_rows, depth, row.dtype, STREAMED)
        keys = pltpu.VMEM((blocks.block_k, depth), row.dtype)
        gradient = pltpu.VMEM(keys.shape, jnp.float32)
        held = buffer_bytes(*[keys] * 4, *[gradient] * 4, scratch.q, scratch.d_out)
        held += blocks.rows * blocks.block_k * 6  # scores and their gradients
        streamed = buffer_bytes(scratch.dq)
        resident = streamed // STREAMED * query_tiles
        is_resident = resident <= (limit - held) // 2
        return cls(held + (resident if is_resident else streamed), is_resident)


def backward_call(
    tile: BackwardTile, operands: Operands, is_resident: bool, **options
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the kernel. options: of `pl.pallas_call`.

    is_resident: whether dq of a head stays in VMEM.

    Returns:
      dq, in the place of the operand, and dk and dv, float32, cut like the keys.
    """
    m, heads, tiles, block_k, depth = operands.keys.shape
    query_tiles, _, rows = operands.rows.shape[2:]
    per_tile = pl.BlockSpec(
        (None, None, None, block_k, depth), lambda m, x, j, *_: (m, x, j, 0, 0)
    )
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    dq_tiles = query_tiles if is_resident else STREAMED
    scratch = Scratch.shapes(rows, depth, operands.q.dtype, dq_tiles)
    share = jax.ShapeDtypeStruct(operands.keys.shape, jnp.float32)
    call = pl.pallas_call(
        functools.partial(_kernel, tile, Resident if is_resident else Streamed),
        name="flash_backward",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(m, heads, tiles),
            in_specs=[per_tile, per_tile, hbm, hbm, hbm, hbm, hbm],
            out_specs=(hbm, per_tile, per_tile),
            scratch_shapes=[scratch],
        ),
        out_shape=(
            jax.ShapeDtypeStruct(operands.dq.shape, jnp.float32),
            share,
            share,
        ),
        # Operands are counted leaf by leaf.
        input_output_aliases={len(jax.tree.leaves(operands)) - 1: 0},
        **options,
    )
    return call(*operands)


class Queries(NamedTuple):
    """A query tile in VMEM."""

    q: jax.Ref  # (R, D)
    d_out: jax.Ref
    rows: jax.Ref  # (2, R): lse, delta
    bounds: jax.Ref  # (2, R): start, stop
    dq: jax.Ref  # (R, D)


class Keys(NamedTuple):
    """A key tile in VMEM, or some of its slots, and their gradients so far."""

    keys: jax.Ref  # (slots, D)
    values: jax.Ref
    dk: jax.Ref
    dv: jax.Ref

    def at(self, slots: pl.Slice) -> "Keys":
        return Keys(*(x.at[slots, :] for x in self))


def _kernel(
    tile: BackwardTile,
    dq_type: type[Resident] | type[Streamed],
    ranges: TileRanges,
    first: jax.Ref,
    last: jax.Ref,
    keys: jax.Ref,
    values: jax.Ref,
    q: jax.Ref,
    d_out: jax.Ref,
    rows: jax.Ref,
    bounds: jax.Ref,
    dq_in: jax.Ref,
    dq_out: jax.Ref,
    dk: jax.Ref,
    dv: jax.Ref,
    scratch: Scratch,
) -> None:
    """One key tile of one head: program (row of bounds, head, key tile)."""
    row, head, j = (pl.program_id(axis) for axis in range(3))
    live_begin, full_begin, full_end, live_end = (
        bound[row * pl.num_programs(2) + j] for bound in ranges
    )
    copies = TileCopies(
        (
            StackedTiles(q.at[row, head]),
            StackedTiles(d_out.at[row, head]),
            Tiles(rows.at[row, head]),
            Tiles(bounds.at[row]),
        ),
        (scratch.q, scratch.d_out, scratch.rows, scratch.bounds),
        scratch.semaphores,
    )
    dq = dq_type(
        scratch.dq,
        *(StackedTiles(x.at[row, head]) for x in (dq_in, dq_out)),
        scratch.dq_semaphores,
    )
    here = Keys(keys, values, dk, dv)
    for gradient in dk, dv:
        gradient[...] = jnp.zeros_like(gradient)

    def start(i: jax.Array) -> None:
        copies.start(i)
        dq.start(i, live_begin)

    dq.open()
    pl.when(live_begin < live_end)(lambda: start(live_begin))

    @pl.loop(live_begin, live_end)
    def _(i):
        pl.when(i + 1 < live_end)(lambda: start(i + 1))
        queries = Queries(*copies.wait(i), dq.wait(i))
        is_full = (full_begin <= i) & (i < full_end)
        pl.when(is_full)(lambda: full_tile(here, queries, tile))
        query_tile = row * bounds.shape[1] + i
        sub_blocks = bounds.shape[3] // tile.exact_rows
        edges = Edges(first, last, query_tile * sub_blocks)
        slot = j * keys.shape[0]
        pl.when(~is_full)(lambda: partial_tile(here, queries, slot, edges, tile))
        dq.put(i)

    dq.close(live_begin, live_end)


def full_tile(keys: Keys, queries: Queries, tile: BackwardTile) -> None:
    """Adds the gradients of a tile that all rows see."""
    for r in range(0, queries.q.shape[0], tile.rows):
        _add_gradients(keys, queries, pl.ds(r, tile.rows), None, tile)


def partial_tile(
    keys: Keys,
    queries: Queries,
    slot: jax.Array,
    edges: Edges,
    tile: BackwardTile,
) -> None:
    """Adds the gradients of a tile that some rows see some of.

    slot: first slot of the keys. edges: of the query tile.
    """
    granule, block_k = tile.live_columns, keys.keys.shape[0]

    @pl.loop(0, queries.q.shape[0] // tile.exact_rows)
    def _(block):
        rows = pl.ds(
            pl.multiple_of(block * tile.exact_rows, tile.exact_rows), tile.exact_rows
        )
        begin, count = edges.live(block, slot, block_k, granule)
        begin = pl.multiple_of(begin * granule, granule)

        def narrowed(width: int) -> None:
            some = keys.at(pl.ds(begin, width))
            _add_gradients(some, queries, rows, slot + begin, tile)

        for live in range(1, block_k // granule + 1):
            pl.when(count == live)(functools.partial(narrowed, live * granule))


def _add_gradients(
    keys: Keys,
    queries: Queries,
    rows: pl.Slice,
    slot: jax.Array | None,
    tile: BackwardTile,
) -> None:
    """Adds what some rows and keys contribute, masked if their first slot is given.

    Each product is issued once its operands are there: issued any earlier, more of
    them wait in registers and spill.
    """
    product = functools.partial(dot, precision=tile.precision)
    q, d_out = queries.q[rows, :], queries.d_out[rows, :]
    lse, delta = (queries.rows[pl.ds(n, 1), rows] for n in range(2))
    scores = tile.scale * product(keys.keys[...], q, OUTER)  # (slots, rows)
    p = jnp.exp2(scores - lse)
    if slot is not None:
        start, stop = (queries.bounds[pl.ds(n, 1), rows] for n in range(2))
        slots = slot + lax.broadcasted_iota(jnp.int32, p.shape, 0)
        p = jnp.where((start <= slots) & (slots < stop), p, 0.0)
    keys.dv[...] += product(p.astype(q.dtype), d_out, INNER)
    ds = (p * (product(keys.values[...], d_out, OUTER) - delta)).astype(q.dtype)
    queries.dq[rows, :] += product(ds, keys.keys[...], TRANSPOSED)
    keys.dk[...] += product(ds, q, INNER)
