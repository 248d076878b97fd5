"""The Mosaic GPU kernel of the forward step, for Hopper GPUs (H100, H200).

A program owns one query tile of one head: two warpgroups compute 64 rows each, and a
third one copies the live key and value tiles to shared memory, as early as there is
room. Each computing warpgroup issues the scores of a tile together with the product of
the weights and values of the tile before, and computes the softmax of the former while
the latter runs (FlashAttention-3, 2407.08608, alg. 2). The two take turns in issuing,
so that one multiplies while the other exponentiates (its section 3.1).
"""

import functools
import math
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

KEYS = 64
"""What key slots of a tile have to be a multiple of."""

COLUMNS = 64
"""Columns of a result that are finished at once, as registers are few."""

NOTHING = -0.7 * float(jnp.finfo(jnp.float32).max)
"""Maximum of a row that has seen nothing: finite, as -inf - -inf is nan."""

LN_2 = math.log(2)


class ForwardTile(NamedTuple):
    """How a program computes its tiles.

    block_k: key slots of a tile.
    stages: key and value tiles in shared memory.
    scale: positive factor on the products of queries and keys, for exponents of 2.
    products: what adds up the products with values.
    """

    block_k: int
    stages: int
    scale: float
    products: gpu.Registers | gpu.Emulated


class Operands(NamedTuple):
    """What the forward kernel reads. T and S are whole tiles.

    live: int32 (M, query tiles, 2), half-open range of key tiles that are not empty.
    full: int32 (M, query tiles * COMPUTING, 2), those that all rows of a warpgroup see.
    start, stop: int32 (M, T), visible keys of each row; M is B or 1.
    q: (B, T, H, D). keys, values: (B, S, K, D).
    carry: result (B, T, H, D) and natural-log lse (B, H, T) over other keys, or ().
    """

    live: jax.Array
    full: jax.Array
    start: jax.Array
    stop: jax.Array
    q: jax.Array
    keys: jax.Array
    values: jax.Array
    carry: tuple[jax.Array, ...]


class Scratch(NamedTuple):
    """Shared memory of a program, and the barriers of its copies.

    *_here: a copy has arrived. *_free: both warpgroups are done with a tile.
    turn: a warpgroup may issue its products.
    """

    q: jax.Ref  # (COMPUTING, ROWS, D)
    keys: jax.Ref  # (stages, block_k, D)
    values: jax.Ref
    result: tuple
    q_here: jax.Ref
    keys_here: jax.Ref
    values_here: jax.Ref
    keys_free: jax.Ref
    values_free: jax.Ref
    turn: jax.Ref

    @classmethod
    def shapes(cls, tile: ForwardTile, depth: int, dtype: jnp.dtype):
        kv = gpu.shared_tile((tile.stages, tile.block_k, depth), dtype)
        here = gpu.Barrier(num_barriers=tile.stages)
        free = gpu.Barrier(num_arrivals=COMPUTING, num_barriers=tile.stages)
        each = gpu.Barrier(num_barriers=COMPUTING)
        return cls(
            gpu.shared_tile((COMPUTING, ROWS, depth), dtype),
            kv,
            kv,
            tile.products.scratch(COMPUTING, ROWS, depth),
            each,
            here,
            here,
            free,
            free,
            each,
        )


def shared_bytes(block_k: int, stages: int, depth: int) -> int:
    """Shared memory of a program, with what its barriers take at most."""
    barriers = 8 * (2 * COMPUTING + 4 * stages)
    return 2 * depth * (BLOCK_Q + 2 * stages * block_k) + barriers


def forward_call(
    tile: ForwardTile, operands: Operands, interpret: gpu.Interpreter | None
) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel.

    Returns:
      out and natural-log lse, shaped like the carry; -inf for rows that saw nothing.
    """
    batch, length, heads, depth = operands.q.shape
    tree = jax.tree.structure(operands)
    count = tree.num_leaves

    def kernel(*refs):
        inputs = jax.tree.unflatten(tree, refs[:count])
        out, lse, scratch = refs[count:]
        _kernel(tile, inputs, out, lse, scratch)

    call = gpu.kernel(
        kernel,
        name="flash_forward",
        out_type=(
            jax.ShapeDtypeStruct(operands.q.shape, jnp.float32),
            jax.ShapeDtypeStruct((batch, heads, length), jnp.float32),
        ),
        scratch_types=[Scratch.shapes(tile, depth, operands.q.dtype)],
        # The last axis is the fastest: heads share keys, and long rows come first.
        grid={"tile": length // BLOCK_Q, "batch": batch, "head": heads},
        warpgroups=COMPUTING + 1,
        interpret=interpret,
    )
    return call(*jax.tree.leaves(operands))


def _kernel(
    tile: ForwardTile,
    operands: Operands,
    out: jax.Ref,
    lse: jax.Ref,
    scratch: Scratch,
) -> None:
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
            warpgroup,
            (operands.start.at[row, rows], operands.stop.at[row, rows]),
            operands.full.at[row, part],
            (out.at[batch, rows, head], lse.at[batch, head, rows]),
            tuple(
                x.at[i]
                for x, i in zip(
                    operands.carry,
                    ((batch, rows, head), (batch, head, rows)),
                    strict=False,
                )
            ),
        )
        pl.when(begin < end)(lambda: work.attend(begin, end))
        pl.when(begin >= end)(work.pass_on)

    @pl.when(warpgroup == COMPUTING)
    def _():
        gpu.set_max_registers(24, action="decrease")
        group = operands.q.shape[2] // operands.keys.shape[2]
        kv_head = lax.div(head, jnp.int32(group))
        keys, values = (
            x.at[batch, :, kv_head] for x in (operands.keys, operands.values)
        )
        q = operands.q.at[batch, pl.ds(query_tile * BLOCK_Q, BLOCK_Q), head]
        pl.when(begin < end)(lambda: _copy(tile, scratch, q, keys, values, begin, end))


def _copy(tile, scratch, q, keys, values, begin, end) -> None:
    """What the copying warpgroup does, in the order in which it is needed."""
    count = end - begin
    keys = keys, scratch.keys, scratch.keys_here, scratch.keys_free
    values = values, scratch.values, scratch.values_here, scratch.values_free

    def copy(source, buffer, here, free, step) -> None:
        slot = lax.rem(step, jnp.int32(tile.stages))
        slots = pl.ds((begin + step) * tile.block_k, tile.block_k)
        gpu.copy_in(source.at[slots], buffer.at[slot], here.at[slot])

    def copy_when_free(source, buffer, here, free, step) -> None:
        slot = lax.rem(step, jnp.int32(tile.stages))
        pl.when(step >= tile.stages)(lambda: gpu.wait(free.at[slot]))
        copy(source, buffer, here, free, step)

    copy(*keys, jnp.int32(0))
    for part in range(COMPUTING):
        rows = q.at[pl.ds(part * ROWS, ROWS)]
        gpu.copy_in(rows, scratch.q.at[part], scratch.q_here.at[part])

    @pl.loop(1, count)
    def _(step):
        copy_when_free(*keys, step)
        copy_when_free(*values, step - 1)

    copy_when_free(*values, count - 1)

    # Nobody needs these. But the interpreter wants to see every arrival waited for.
    @pl.loop(jnp.maximum(count - tile.stages, 0), count)
    def _(step):
        slot = lax.rem(step, jnp.int32(tile.stages))
        gpu.wait(scratch.keys_free.at[slot])
        gpu.wait(scratch.values_free.at[slot])


class Rows(NamedTuple):
    """The rows of one computing warpgroup.

    bounds: start and stop, (ROWS,) each. full: range of full key tiles, (2,).
    results: out (ROWS, D) and lse (ROWS,). carry: the same, or ().
    """

    tile: ForwardTile
    scratch: Scratch
    warpgroup: jax.Array
    bounds: tuple[jax.Ref, jax.Ref]
    full: jax.Ref
    results: tuple[jax.Ref, jax.Ref]
    carry: tuple[jax.Ref, ...]

    def attend(self, begin: jax.Array, end: jax.Array) -> None:
        """Computes the key tiles [begin, end), of which there is one at least."""
        depth = self.scratch.q.shape[-1]
        pl.when(self.warpgroup == 1)(lambda: gpu.arrive(self.scratch.turn.at[0]))
        gpu.wait(self.scratch.q_here.at[self.warpgroup])
        m, l, result = self.tile.products.run(
            self.scratch.result,
            self.warpgroup,
            (ROWS, depth),
            functools.partial(self._all_tiles, begin, end),
        )
        self._finish(m, l, result)
        pl.when(self.warpgroup == 0)(lambda: gpu.wait(self.scratch.turn.at[0]))

    def pass_on(self) -> None:
        """Writes what there was before."""
        out, lse = self.results
        if self.carry:
            out[...] = gpu.load_tile(self.carry[0])
            lse[...] = gpu.load_rows(self.carry[1])
        else:
            out[...] = gpu.full_tile(out.shape, 0.0)
            lse[...] = gpu.full_rows(ROWS, -jnp.inf)

    def _all_tiles(self, begin, end, result):
        scratch, products = self.scratch, self.tile.products
        bounds = tuple(gpu.load_rows(bound) for bound in self.bounds)
        full = self.full[0], self.full[1]
        m, l = gpu.full_rows(ROWS, NOTHING), gpu.full_rows(ROWS, 0.0)
        first = self._slot(0)
        gpu.wait(scratch.keys_here.at[first])
        s = gpu.scores(scratch.q.at[self.warpgroup], scratch.keys.at[first])
        gpu.arrive(scratch.keys_free.at[first])
        m, l, _, p = self._softmax(s, begin, bounds, full, m, l)

        def step(number, state):
            m, l, p = state
            slot, before = self._slot(number), self._slot(number - 1)
            gpu.wait(scratch.keys_here.at[slot])
            gpu.wait(scratch.turn.at[self.warpgroup])

            def issue(scores):
                keys = scratch.keys.at[slot].transpose((1, 0))
                gpu.multiply(scores, scratch.q.at[self.warpgroup], keys)
                gpu.wait(scratch.values_here.at[before])
                products.add_product(result, p, scratch.values.at[before])
                gpu.arrive(scratch.turn.at[1 - self.warpgroup])
                return gpu.read_product(scores, wait_n=1)

            s = gpu.with_product((ROWS, self.tile.block_k), issue)
            gpu.arrive(scratch.keys_free.at[slot])
            m, l, decay, p = self._softmax(s, begin + number, bounds, full, m, l)
            gpu.wait_for_products(0)
            gpu.arrive(scratch.values_free.at[before])
            products.scale(result, decay)
            return m, l, p

        m, l, p = lax.fori_loop(1, end - begin, step, (m, l, p))
        last = self._slot(end - begin - 1)
        gpu.wait(scratch.values_here.at[last])
        products.add_product(result, p, scratch.values.at[last])
        total = result[...]
        gpu.arrive(scratch.values_free.at[last])
        return m, l, total

    def _slot(self, number):
        return lax.rem(number, jnp.int32(self.tile.stages))

    def _softmax(self, s, j, bounds, full, m, l):
        """One step of the online softmax (FlashAttention, 2205.14135, alg. 1).

        s: (ROWS, block_k), products of queries and keys. j: number of the key tile.
        m, l: maximum of the scores so far, for exponents of 2, and the sum.

        Returns:
          m and l after this tile, by what the sums before it shrink, and the weights.
        """
        scale, block_k = self.tile.scale, self.tile.block_k
        is_full = (full[0] <= j) & (j < full[1])

        def hide(s):
            slot = j * block_k + gpu.column_numbers(ROWS, block_k)
            start, stop = (gpu.over_columns(bound, block_k) for bound in bounds)
            return jnp.where((start <= slot) & (slot < stop), s, -jnp.inf)

        s = lax.cond(is_full, lambda s: s, hide, s)
        highest = jnp.maximum(m, s.max(axis=1) * scale)
        decay = jnp.exp2(m - highest)
        p = jnp.exp2(s * scale - gpu.over_columns(highest, block_k))
        l = l * decay + p.sum(axis=1)
        return highest, l, decay, p.astype(self.scratch.q.dtype)

    def _finish(self, m, l, result):
        """Writes out and lse, with the carry merged in (see `merge`)."""
        weights = []
        if self.carry:
            before = gpu.load_rows(self.carry[1]) * (1 / LN_2)
            highest = jnp.maximum(m, before)
            weights = [jnp.exp2(m - highest), jnp.exp2(before - highest)]
            m, l = highest, l * weights[0] + weights[1]
        seen = l != 0  # also where it is nan, which must show
        l = jnp.where(seen, l, 1.0)
        shares = [w / l for w in weights] or [1 / l]
        out, lse = self.results
        lse[...] = jnp.where(seen, (m + jnp.log2(l)) * LN_2, -jnp.inf)
        for first in range(0, result.shape[1], COLUMNS):
            columns = pl.ds(first, COLUMNS)
            part = lax.slice(result, (0, first), (ROWS, first + COLUMNS))
            part *= gpu.over_columns(shares[0], COLUMNS)
            if self.carry:
                others = gpu.load_tile(self.carry[0].at[:, columns])
                part += others * gpu.over_columns(shares[1], COLUMNS)
            out[:, columns] = part
