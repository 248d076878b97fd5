"""The Mosaic GPU kernel of the backward step, for Hopper GPUs (H100, H200).

A program owns one key tile of one key/value head and visits the live query tiles of
each of its query heads. Two warpgroups compute, a third one copies. Scores are
transposed, keys by queries: so weights and their gradients are operands in registers
of the products for dv and dk, which are added up in registers as well
(FlashAttention-3, 2407.08608, appendix B.1).

The gradients of the scores go through shared memory, for dq: what both warpgroups found
is multiplied and added to dq in global memory, by TMA. This is done one tile late, so
that no warpgroup waits for the other as long as they are not a tile apart.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from . import shared as gpu
from .backward_tile import (
    COMPUTING,
    ROWS,
    BackwardTile,
    Operands,
    Part,
    Scratch,
    Visits,
)


def backward_call(
    tile: BackwardTile,
    operands: Operands,
    dq: jax.Array,
    interpret: gpu.Interpreter | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the kernel.

    dq: float32 (B, T, H, D), which is added to in its place, in no certain order.

    Returns:
      dq, and dk and dv, float32, shaped like the keys.
    """
    tiles = operands.keys.shape[1] // tile.block_k
    total = tile.products.shared_sum(dq, tiles)
    dk, dv = _call(tile, operands, (total,), interpret)
    return tile.products.total(total), dk, dv


def key_gradients_call(
    tile: BackwardTile, operands: Operands, interpret: gpu.Interpreter | None
) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel without dq: dk and dv, which come out the same each time."""
    return _call(tile, operands, (), interpret)


def _call(
    tile: BackwardTile,
    operands: Operands,
    dq: tuple[jax.Ref, ...],
    interpret: gpu.Interpreter | None,
) -> tuple[jax.Array, jax.Array]:
    batch, length, heads, _ = operands.keys.shape
    tree = jax.tree.structure((operands, dq))
    count = tree.num_leaves

    def kernel(*refs):
        inputs, dq = jax.tree.unflatten(tree, refs[:count])
        dk, dv, scratch = refs[count:]
        _kernel(tile, inputs, dq, (dk, dv), scratch)

    share = jax.ShapeDtypeStruct(operands.keys.shape, jnp.float32)
    call = gpu.kernel(
        kernel,
        name="flash_backward" if dq else "flash_backward_keys",
        out_type=(share, share),
        scratch_types=[Scratch.shapes(tile, operands.q.dtype, bool(dq))],
        # The last axis is the fastest: the tiles of a head read the same queries.
        grid={"batch": batch, "head": heads, "tile": length // tile.block_k},
        warpgroups=COMPUTING + 1,
        interpret=interpret,
    )
    return call(*jax.tree.leaves((operands, dq)))


def _kernel(
    tile: BackwardTile,
    operands: Operands,
    dq: tuple[jax.Ref, ...],
    gradients: tuple[jax.Ref, jax.Ref],
    scratch: Scratch,
) -> None:
    """One key tile of one key/value head."""
    batch, head = lax.axis_index("batch"), lax.axis_index("head")
    key_tile = lax.axis_index("tile")
    row = batch if operands.live.shape[0] > 1 else 0
    group = operands.q.shape[2] // operands.keys.shape[2]
    visits = Visits(
        operands.live[row, key_tile, 0],
        operands.live[row, key_tile, 1],
        head * group,
        group,
    )
    is_live = visits.begin < visits.end
    warpgroup = lax.axis_index(gpu.WARPGROUP)

    @pl.when(warpgroup < COMPUTING)
    def _():
        gpu.set_max_registers(240, action="increase")
        part = Part.of(tile, warpgroup)
        first = key_tile * tile.block_k
        slots = pl.ds(first + part.first_key, ROWS)
        work = Slots(
            tile,
            scratch,
            visits,
            first,
            operands.full.at[row],
            [tile.products.share_of(x, key_tile).at[batch] for x in dq],
            tuple(x.at[batch, slots, head, part.columns] for x in gradients),
        )
        pl.when(is_live)(work.add_up)
        pl.when(~is_live)(work.pass_on)

    @pl.when(warpgroup == COMPUTING)
    def _():
        gpu.set_max_registers(24, action="decrease")
        slots = pl.ds(key_tile * tile.block_k, tile.block_k)
        source = operands._replace(
            keys=operands.keys.at[batch, slots, head],
            values=operands.values.at[batch, slots, head],
            q=operands.q.at[batch],
            d_out=operands.d_out.at[batch],
            rows=operands.rows.at[batch],
            bounds=operands.bounds.at[row],
        )
        pl.when(is_live)(lambda: _copy(tile, scratch, source, visits))


def _copy(
    tile: BackwardTile, scratch: Scratch, source: Operands, visits: Visits
) -> None:
    """What the copying warpgroup does, in the order in which it is needed."""
    count = visits.count()
    gpu.copy_in(source.keys, scratch.keys, scratch.keys_here)

    def when_free(step, stages: int, free: jax.Ref) -> jax.Array:
        slot = lax.rem(step, jnp.int32(stages))
        pl.when(step >= stages)(lambda: gpu.wait(free.at[slot]))
        return slot

    def copy(step, visit):
        i, head = visit
        queries = pl.ds(i * tile.block_q, tile.block_q)
        slot = when_free(step, tile.q_stages, scratch.q_free)
        here = scratch.q_here.at[slot]
        gpu.copy_in(source.q.at[queries, head], scratch.q.at[slot], here)
        gpu.copy_in(source.rows.at[head, i], scratch.rows.at[slot], here)
        gpu.copy_in(source.bounds.at[i], scratch.bounds.at[slot], here)

        @pl.when(step == 0)
        def _():
            gpu.copy_in(source.values, scratch.values, scratch.values_here)

        slot = when_free(step, tile.d_out_stages, scratch.d_out_free)
        d_out = source.d_out.at[queries, head]
        gpu.copy_in(d_out, scratch.d_out.at[slot], scratch.d_out_here.at[slot])
        return visits.after(visit)

    lax.fori_loop(0, count, copy, visits.first())
    gpu.drain(scratch.q_free, count, tile.q_stages)
    gpu.drain(scratch.d_out_free, count, tile.d_out_stages)


class Slots(NamedTuple):
    """The key slots of a computing warpgroup.

    first: of the key tile. full: ranges of full query tiles, (S / ROWS, 2).
    dq: [(T, H, D)], or []. gradients: dk and dv, (ROWS, columns) each.
    """

    tile: BackwardTile
    scratch: Scratch
    visits: Visits
    first: jax.Array
    full: jax.Ref
    dq: list[jax.Ref]
    gradients: tuple[jax.Ref, jax.Ref]

    def add_up(self) -> None:
        """Computes the gradients; there is one live query tile at least."""
        scratch, products = self.scratch, self.tile.products
        warpgroup = lax.axis_index(gpu.WARPGROUP)
        shape = ROWS, self.tile.columns

        def with_dk(dk):
            with_dv = functools.partial(self._all_tiles, dk)
            products.run(scratch.dv_sum, warpgroup, shape, with_dv)

        products.run(scratch.dk_sum, warpgroup, shape, with_dk)

    def pass_on(self) -> None:
        """What no query sees has no gradients."""
        for gradient in self.gradients:
            gradient[...] = gpu.full_tile(gradient.shape, 0.0)

    def _all_tiles(self, dk: jax.Ref, dv: jax.Ref) -> None:
        scratch, visits = self.scratch, self.visits
        gpu.wait(scratch.keys_here)
        gpu.wait(scratch.values_here)
        if self.dq:
            gpu.arrive(scratch.ds_free)

        def step(number, visit):
            self._visit(number, visit, dk, dv)
            return visits.after(visit)

        end = lax.fori_loop(0, visits.count(), step, visits.first())
        gpu.wait_for_products(0)
        self._release(visits.count() - 1)
        if self.dq:
            gpu.wait(scratch.ds_free)
            part = Part.of(self.tile, lax.axis_index(gpu.WARPGROUP))
            self._add_to_dq(part, visits.count() - 1, visits.before(end), None)
        for gradient, total in zip(self.gradients, (dk, dv), strict=True):
            gradient[...] = total[...]
        if self.dq:
            gpu.wait_for_copies_out(0)

    def _visit(self, number, visit, dk, dv) -> None:
        """Adds what a query tile contributes to dk and dv, and the one before to dq."""
        tile, scratch = self.tile, self.scratch
        # Asked for in each step: else ptxas keeps, and spills, all addresses that
        # depend on it.
        part = Part.of(tile, lax.axis_index(gpu.WARPGROUP))
        q_slot = lax.rem(number, jnp.int32(tile.q_stages))
        gpu.wait(scratch.q_here.at[q_slot])
        ds = self._score_gradients(number, visit.i, part, dv)

        def add_to_dk() -> None:
            q = scratch.q.at[q_slot, :, part.columns]
            tile.products.add_product(dk, ds, q)

        if not self.dq:
            add_to_dk()
            gpu.wait_for_products(1)
        else:
            gpu.wait(scratch.ds_free)
            scratch.ds[lax.rem(number, jnp.int32(2)), part.ds] = ds
            gpu.commit_shared()
            self._add_to_dq(part, number - 1, self.visits.before(visit), add_to_dk)
        d_out_slot = lax.rem(number, jnp.int32(tile.d_out_stages))
        gpu.arrive(scratch.d_out_free.at[d_out_slot])

    def _release(self, number) -> None:
        """Gives back what a visit needed to its end."""
        slot = lax.rem(number, jnp.int32(self.tile.q_stages))
        gpu.arrive(self.scratch.q_free.at[slot])
        if self.dq:
            gpu.arrive(self.scratch.ds_free)

    def _score_gradients(self, number, i, part, dv) -> jax.Array:
        """Gradients of the scores (ROWS, block_q) of query tile i. Starts adding to dv.

        The visit before ends here: its last product runs until the scores are issued.
        """
        tile, scratch = self.tile, self.scratch
        dtype = scratch.q.dtype
        q_slot = lax.rem(number, jnp.int32(tile.q_stages))
        d_out_slot = lax.rem(number, jnp.int32(tile.d_out_stages))
        d_out = scratch.d_out.at[d_out_slot]

        def body(scores, dp):
            keys, values = (x.at[part.keys] for x in (scratch.keys, scratch.values))
            gpu.multiply(scores, keys, scratch.q.at[q_slot].transpose((1, 0)))
            gpu.wait_for_products(1)
            pl.when(number > 0)(lambda: self._release(number - 1))
            gpu.wait(scratch.d_out_here.at[d_out_slot])
            gpu.multiply(dp, values, d_out.transpose((1, 0)))
            p = self._weights(gpu.read_product(scores, wait_n=1), q_slot, i, part)
            columns = d_out.at[:, part.columns]
            tile.products.add_product(dv, p.astype(dtype), columns)
            dp = gpu.read_product(dp, wait_n=1)
            delta = gpu.over_rows(gpu.load_columns(scratch.rows.at[q_slot, 1]), ROWS)
            return (p * (dp * tile.scale - delta)).astype(dtype)

        return gpu.with_products((ROWS, tile.block_q), 2, body)

    def _weights(self, scores, slot, i, part) -> jax.Array:
        """Attention weights (ROWS, block_q) of query tile i."""
        tile, scratch = self.tile, self.scratch
        lse = gpu.over_rows(gpu.load_columns(scratch.rows.at[slot, 0]), ROWS)
        exponents = scores * tile.exponent_scale - lse
        first = self.first + part.first_key
        full = self.full.at[lax.div(first, jnp.int32(ROWS))]

        def hide(exponents):
            slots = first + gpu.row_numbers(ROWS, tile.block_q)
            start, stop = (
                gpu.over_rows(gpu.load_columns(scratch.bounds.at[slot, n]), ROWS)
                for n in range(2)
            )
            return jnp.where((start <= slots) & (slots < stop), exponents, -jnp.inf)

        is_full = (full[0] <= i) & (i < full[1])
        return jnp.exp2(lax.cond(is_full, lambda x: x, hide, exponents))

    def _add_to_dq(
        self, part, number, visit, meanwhile: Callable[[], None] | None
    ) -> None:
        """Adds what a visit found to dq, unless there was no such visit.

        meanwhile: issues another product, which runs while this one is stored.
        """
        tile, scratch = self.tile, self.scratch
        queries, columns = part.share()

        def put(found) -> None:
            buffer = scratch.dq.at[part.warpgroup]
            gpu.wait_for_copies_out(0, wait_read_only=True)
            buffer[...] = found
            gpu.commit_shared()
            rows = pl.ds(visit.i * tile.block_q + queries.start, ROWS)
            tile.products.add_out(buffer, self.dq[0].at[rows, visit.head, columns])

        def body(product):
            ds = scratch.ds.at[lax.rem(number + 2, jnp.int32(2)), :, queries]
            gpu.multiply(product, ds.transpose((1, 0)), scratch.keys.at[:, columns])
            if meanwhile is not None:
                meanwhile()
            found = gpu.read_product(product, wait_n=int(meanwhile is not None))
            pl.when(number >= 0)(lambda: put(found))

        gpu.with_product((ROWS, ROWS), body)
