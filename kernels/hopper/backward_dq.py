"""The Mosaic GPU kernel of the gradient of queries alone, for Hopper GPUs (H100, H200).

`hopper_backward` adds to dq from all key tiles, in no certain order, so its last bits
change from run to run. Here a program owns one query tile of one head, visits the live
key tiles in order, and adds to dq once. That takes the scores and their gradients once
more: seven products a tile instead of five.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from . import shared as gpu

ROWS = 64
"""Query rows of a warpgroup: one WGMMA."""

COMPUTING = 2
"""Warpgroups that compute. One more copies."""

BLOCK_Q = COMPUTING * ROWS

COLUMNS = 64
"""Columns of dq that are finished at once, as registers are few."""


class QueryTile(NamedTuple):
    """How a program computes its tiles.

    block_k: key slots of a tile.
    key_stages, value_stages: tiles in shared memory.
    scale: factor on gradients of scores.
    exponent_scale: factor on the products of queries and keys, for exponents of 2.
    products: what adds up the products.
    """

    block_k: int
    key_stages: int
    value_stages: int
    scale: float
    exponent_scale: float
    products: gpu.Registers | gpu.Emulated


class Operands(NamedTuple):
    """What the kernel reads. T and S are whole tiles.

    live: int32 (M, query tiles, 2), half-open range of key tiles that are not empty.
    full: int32 (M, T / ROWS, 2), those that all of some rows see; M is B or 1.
    start, stop: int32 (M, T), visible keys of each row.
    lse, delta: float32 (B, H, T): for exponents of 2, and times `scale`.
    q, d_out: (B, T, H, D). keys, values: (B, S, K, D).
    """

    live: jax.Array
    full: jax.Array
    start: jax.Array
    stop: jax.Array
    lse: jax.Array
    delta: jax.Array
    q: jax.Array
    d_out: jax.Array
    keys: jax.Array
    values: jax.Array


class Scratch(NamedTuple):
    """Shared memory of a program, and its barriers.

    *_here: a copy has arrived. *_free: both warpgroups are done with a tile.
    """

    q: jax.Ref  # (COMPUTING, ROWS, D)
    d_out: jax.Ref
    keys: jax.Ref  # (stages, block_k, D)
    values: jax.Ref
    dq_sum: tuple
    q_here: jax.Ref
    d_out_here: jax.Ref
    keys_here: jax.Ref
    values_here: jax.Ref
    keys_free: jax.Ref
    values_free: jax.Ref

    @classmethod
    def shapes(cls, tile: QueryTile, depth: int, dtype: jnp.dtype):
        queries = gpu.shared_tile((COMPUTING, ROWS, depth), dtype)
        each = gpu.Barrier(num_barriers=COMPUTING)
        both = functools.partial(gpu.Barrier, num_arrivals=COMPUTING)
        return cls(
            queries,
            queries,
            gpu.shared_tile((tile.key_stages, tile.block_k, depth), dtype),
            gpu.shared_tile((tile.value_stages, tile.block_k, depth), dtype),
            tile.products.scratch(COMPUTING, ROWS, depth),
            each,
            each,
            gpu.Barrier(num_barriers=tile.key_stages),
            gpu.Barrier(num_barriers=tile.value_stages),
            both(num_barriers=tile.key_stages),
            both(num_barriers=tile.value_stages),
        )


def query_gradients_call(
    tile: QueryTile,
    operands: Operands,
    dq: jax.Array,
    interpret: gpu.Interpreter | None,
) -> jax.Array:
    """Adds to dq, float32 (B, T, H, D), in its place."""
    batch, length, heads, depth = operands.q.shape
    total = jax.new_ref(dq)
    tree = jax.tree.structure((operands, total))

    def kernel(*refs):
        *inputs, scratch = refs
        _kernel(tile, *jax.tree.unflatten(tree, inputs), scratch)

    call = gpu.kernel(
        kernel,
        name="flash_backward_queries",
        out_type=(),
        scratch_types=[Scratch.shapes(tile, depth, operands.q.dtype)],
        # The last axis is the fastest: heads share keys, and long rows come first.
        grid={"tile": length // BLOCK_Q, "batch": batch, "head": heads},
        warpgroups=COMPUTING + 1,
        interpret=interpret,
    )
    call(*jax.tree.leaves((operands, total)))
    return jax.freeze(total)


def _kernel(tile: QueryTile, operands: Operands, dq: jax.Ref, scratch: Scratch) -> None:
    """One query tile of one head."""
    batch, head = lax.axis_index("batch"), lax.axis_index("head")
    # Where queries see the past, the last tiles have most to do: they come first.
    query_tile = operands.live.shape[1] - 1 - lax.axis_index("tile")
    row = batch if operands.live.shape[0] > 1 else 0
    begin, end = (operands.live[row, query_tile, edge] for edge in range(2))
    warpgroup = lax.axis_index(gpu.WARPGROUP)

    @pl.when(warpgroup < COMPUTING)
    def _():
        gpu.set_max_registers(240, action="increase")
        part = query_tile * COMPUTING + warpgroup
        rows = pl.ds(part * ROWS, ROWS)
        work = Rows(
            tile,
            scratch,
            (operands.start.at[row, rows], operands.stop.at[row, rows]),
            operands.full.at[row, part],
            operands.lse.at[batch, head, rows],
            operands.delta.at[batch, head, rows],
            dq.at[batch, rows, head],
        )
        pl.when(begin < end)(lambda: work.add_up(begin, end))

    @pl.when(warpgroup == COMPUTING)
    def _():
        gpu.set_max_registers(24, action="decrease")
        group = operands.q.shape[2] // operands.keys.shape[2]
        kv_head = lax.div(head, jnp.int32(group))
        queries = pl.ds(query_tile * BLOCK_Q, BLOCK_Q)
        source = operands._replace(
            q=operands.q.at[batch, queries, head],
            d_out=operands.d_out.at[batch, queries, head],
            keys=operands.keys.at[batch, :, kv_head],
            values=operands.values.at[batch, :, kv_head],
        )
        pl.when(begin < end)(lambda: _copy(tile, scratch, source, begin, end))


def _copy(
    tile: QueryTile,
    scratch: Scratch,
    source: Operands,
    begin: jax.Array,
    end: jax.Array,
) -> None:
    """What the copying warpgroup does, in the order in which it is needed."""
    count = end - begin
    keys = source.keys, scratch.keys, scratch.keys_here, scratch.keys_free
    values = source.values, scratch.values, scratch.values_here, scratch.values_free

    def copy_rows(source, buffer, here) -> None:
        for part in range(COMPUTING):
            rows = source.at[pl.ds(part * ROWS, ROWS)]
            gpu.copy_in(rows, buffer.at[part], here.at[part])

    def copy(source, buffer, here, free, step) -> None:
        stages = buffer.shape[0]
        slot = lax.rem(step, jnp.int32(stages))
        pl.when(step >= stages)(lambda: gpu.wait(free.at[slot]))
        slots = pl.ds((begin + step) * tile.block_k, tile.block_k)
        gpu.copy_in(source.at[slots], buffer.at[slot], here.at[slot])

    copy_rows(source.q, scratch.q, scratch.q_here)
    copy(*keys, jnp.int32(0))
    copy_rows(source.d_out, scratch.d_out, scratch.d_out_here)
    copy(*values, jnp.int32(0))

    @pl.loop(1, count)
    def _(step):
        copy(*keys, step)
        copy(*values, step)

    for _, buffer, _, free in keys, values:
        gpu.drain(free, count, buffer.shape[0])


class Rows(NamedTuple):
    """The rows of one computing warpgroup.

    bounds: start and stop, (ROWS,) each. full: range of full key tiles, (2,).
    lse, delta: (ROWS,). dq: (ROWS, D).
    """

    tile: QueryTile
    scratch: Scratch
    bounds: tuple[jax.Ref, jax.Ref]
    full: jax.Ref
    lse: jax.Ref
    delta: jax.Ref
    dq: jax.Ref

    def add_up(self, begin: jax.Array, end: jax.Array) -> None:
        """Visits the key tiles [begin, end), of which there is one at least."""
        scratch, warpgroup = self.scratch, lax.axis_index(gpu.WARPGROUP)
        gpu.wait(scratch.q_here.at[warpgroup])
        gpu.wait(scratch.d_out_here.at[warpgroup])
        self.tile.products.run(
            scratch.dq_sum,
            warpgroup,
            self.dq.shape,
            functools.partial(self._all_tiles, begin, end),
        )

    def _all_tiles(self, begin, end, dq) -> None:
        tile, scratch = self.tile, self.scratch
        lse = gpu.load_rows(self.lse)

        def step(number, _):
            slot = lax.rem(number, jnp.int32(tile.key_stages))
            gpu.wait(scratch.keys_here.at[slot])
            ds = self._score_gradients(number, begin + number, lse)
            tile.products.add_product(dq, ds, scratch.keys.at[slot])

        lax.fori_loop(0, end - begin, step, None)
        gpu.wait_for_products(0)
        self._release(end - begin - 1)
        total = dq[...]
        for first in range(0, total.shape[1], COLUMNS):
            columns = pl.ds(first, COLUMNS)
            part = lax.slice(total, (0, first), (ROWS, first + COLUMNS))
            self.dq[:, columns] = part + gpu.load_tile(self.dq.at[:, columns])

    def _release(self, number) -> None:
        """Gives back the keys of a tile."""
        slot = lax.rem(number, jnp.int32(self.tile.key_stages))
        gpu.arrive(self.scratch.keys_free.at[slot])

    def _score_gradients(self, number, j, lse) -> jax.Array:
        """Gradients of the scores (ROWS, block_k) of key tile j.

        The tile before ends here: its last product runs until the scores are issued.
        """
        tile, scratch = self.tile, self.scratch
        # Asked for in each step: see `hopper_backward`.
        warpgroup = lax.axis_index(gpu.WARPGROUP)
        key_slot = lax.rem(number, jnp.int32(tile.key_stages))
        value_slot = lax.rem(number, jnp.int32(tile.value_stages))

        def body(scores, dp):
            keys = scratch.keys.at[key_slot].transpose((1, 0))
            gpu.multiply(scores, scratch.q.at[warpgroup], keys)
            gpu.wait_for_products(1)
            pl.when(number > 0)(lambda: self._release(number - 1))
            gpu.wait(scratch.values_here.at[value_slot])
            values = scratch.values.at[value_slot].transpose((1, 0))
            gpu.multiply(dp, scratch.d_out.at[warpgroup], values)
            p = self._weights(gpu.read_product(scores, wait_n=1), j, lse)
            # Loaded in each step, while products run: kept, it would spill others.
            delta = gpu.over_columns(gpu.load_rows(self.delta), tile.block_k)
            dp = gpu.read_product(dp, wait_n=0)
            gpu.arrive(scratch.values_free.at[value_slot])
            return (p * (dp * tile.scale - delta)).astype(scratch.q.dtype)

        return gpu.with_products((ROWS, tile.block_k), 2, body)

    def _weights(self, scores, j, lse) -> jax.Array:
        """Attention weights (ROWS, block_k) of key tile j."""
        block_k = self.tile.block_k
        exponents = scores * self.tile.exponent_scale - gpu.over_columns(lse, block_k)

        def hide(exponents):
            slot = j * block_k + gpu.column_numbers(ROWS, block_k)
            start, stop = (
                gpu.over_columns(gpu.load_rows(x), block_k) for x in self.bounds
            )
            return jnp.where((start <= slot) & (slot < stop), exponents, -jnp.inf)

        is_full = (self.full[0] <= j) & (j < self.full[1])
        return jnp.exp2(lax.cond(is_full, lambda x: x, hide, exponents))
