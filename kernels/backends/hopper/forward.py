"""Runs the forward step on a Hopper GPU (FlashAttention-3, 2407.08608, algorithm 2).

A program computes one query tile [128, d] of one head. The producer copies Q once, and
K(n) and V(n) of the live key tiles n = 0, 1, ... as stages become empty. Two consumers
own 64 queries each. In time, from left to right:

    producer    TMA    K(n+1)        V(n)            K(n+2)        V(n+1)
    consumer 0  WGMMA  S(n)  P(n-1) V(n-1)           S(n+1)  P(n) V(n)
                ALU          softmax S(n)  rescale           softmax S(n+1)  rescale
    consumer 1  WGMMA              S(n)  P(n-1) V(n-1)             S(n+1)  P(n) V(n)
                ALU       rescale        softmax S(n)  rescale            softmax S(n+1)

The softmax of S(n) = Q K(n)ᵀ, which gives m, l, P(n) and alpha, runs while the tensor
cores add P(n-1) V(n-1) to acc, which alpha then rescales (their section 3.2). By the
schedule barrier the consumers issue in alternation, so that one multiplies while the
other exponentiates (their section 3.1).

    barrier   waits              arrives, and what it means
    q_full    consumer           TMA: its 64 queries are in SMEM
    k_full    both consumers     TMA: K(n) is in its stage
    v_full    both consumers     TMA: V(n) is in its stage
    k_empty   producer           both consumers: S(n) is computed
    v_empty   producer           both consumers: P(n) V(n) is computed
    schedule  consumer           the other consumer: it has issued its WGMMAs
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...precision import LOG2_E
from .shared import (
    BLOCK_Q,
    CONSUMER_REGISTERS,
    CONSUMERS,
    EPILOGUE_COLUMNS,
    PRODUCER_REGISTERS,
    ROWS,
    WARPGROUP,
    WGMMA_ROW,
    NativeOps,
    broadcast_cols,
    constant,
    load,
    masked,
    one_plus_tanh,
    run_kernel,
    tiled_smem,
    wait_for_last_arrivals,
)

LN_2 = math.log(2)

M_INIT = -0.7 * float(jnp.finfo(jnp.float32).max)
"""Row maximum before any visible key: finite, as -inf - -inf is nan."""


class ForwardTile(NamedTuple):
    """Sizes and constants of a program.

    block_k: keys of a tile. stages: key and value tiles in SMEM.
    scale: positive factor on scores, for exponents of 2.
    tanh_scale: scores are 1 + tanh(tanh_scale Q Kᵀ), or Q Kᵀ if it is None.
    ops: of the GPU, or emulated.
    """

    block_k: int
    stages: int
    scale: float
    tanh_scale: float | None
    ops: NativeOps


class Operands(NamedTuple):
    """Arrays that the kernel reads, in GMEM. T and S are whole tiles.

    live: int32 (M, T / 128, 2), half-open range of key tiles that are not empty.
    full: int32 (M, T / 64, 2), those that need no mask; M is B or 1.
    k_start, k_end: int32 (M, T), visible keys of each query.
    q: (B, T, H, D). k, v: (B, S, K, D).
    carry: out (B, T, H, D) and natural-log lse (B, H, T) over other keys, or ().
    """

    live: jax.Array
    full: jax.Array
    k_start: jax.Array
    k_end: jax.Array
    q: jax.Array
    k: jax.Array
    v: jax.Array
    carry: tuple[jax.Array, ...]


class Smem(NamedTuple):
    """Shared memory and barriers of a program, the latter as in the table above."""

    q: jax.Ref  # [2, 64, d]
    k: jax.Ref  # [stages, block_k, d]
    v: jax.Ref  # [stages, block_k, d]
    acc: jax.Ref | None  # [2, 64, d] float32 where emulated
    q_full: jax.Ref  # [2]
    k_full: jax.Ref  # [stages], and so are the next three
    v_full: jax.Ref
    k_empty: jax.Ref
    v_empty: jax.Ref
    schedule: jax.Ref  # [2]

    @classmethod
    def types(cls, tile: ForwardTile, d: int, dtype: jnp.dtype) -> "Smem":
        kv = tiled_smem((tile.stages, tile.block_k, d), dtype)
        full = plgpu.Barrier(num_barriers=tile.stages)
        empty = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=tile.stages)
        return cls(
            q=tiled_smem((CONSUMERS, ROWS, d), dtype),
            k=kv,
            v=kv,
            acc=tile.ops.acc_smem(ROWS, d),
            q_full=plgpu.Barrier(num_barriers=CONSUMERS),
            k_full=full,
            v_full=full,
            k_empty=empty,
            v_empty=empty,
            schedule=plgpu.Barrier(num_barriers=CONSUMERS),
        )


def smem_bytes(block_k: int, stages: int, d: int) -> int:
    """Returns the shared memory of a program, its barriers at their largest."""
    barriers = 8 * (2 * CONSUMERS + 4 * stages)
    return 2 * d * (BLOCK_Q + 2 * stages * block_k) + barriers


def forward_call(
    tile: ForwardTile,
    operands: Operands,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel.

    Returns:
      out and natural-log lse, shaped like the carry; -inf for rows without any key.
    """
    batch, length, heads, d = operands.q.shape
    return run_kernel(
        functools.partial(_kernel, tile),
        operands,
        name="flash_forward",
        out_type=(
            jax.ShapeDtypeStruct(operands.q.shape, jnp.float32),
            jax.ShapeDtypeStruct((batch, heads, length), jnp.float32),
        ),
        smem=Smem.types(tile, d, operands.q.dtype),
        # The last axis is the fastest: heads share keys, and long rows come first.
        grid={"tile": length // BLOCK_Q, "batch": batch, "head": heads},
        interpret=interpret,
    )


def _kernel(
    tile: ForwardTile,
    operands: Operands,
    out_ref: jax.Ref,  # (B, T, H, D)
    lse_ref: jax.Ref,  # (B, H, T)
    smem: Smem,
) -> None:
    """Computes one query tile of one head."""
    batch, head = lax.axis_index("batch"), lax.axis_index("head")
    # Under a causal mask the last tiles have most live keys: they come first.
    q_tile = operands.live.shape[1] - 1 - lax.axis_index("tile")
    bound_row = batch if operands.live.shape[0] > 1 else 0
    begin = operands.live[bound_row, q_tile, 0]
    end = operands.live[bound_row, q_tile, 1]
    wg = lax.axis_index(WARPGROUP)

    @pl.when(wg < CONSUMERS)
    def _():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        rows_64 = q_tile * CONSUMERS + wg  # which 64 queries of the sequence
        rows = pl.ds(rows_64 * ROWS, ROWS)
        carry = None
        if operands.carry:
            carry_out, carry_lse = operands.carry
            carry = carry_out.at[batch, rows, head], carry_lse.at[batch, head, rows]
        consumer = Consumer(
            tile=tile,
            smem=smem,
            wg=wg,
            k_start=operands.k_start.at[bound_row, rows],
            k_end=operands.k_end.at[bound_row, rows],
            full=operands.full.at[bound_row, rows_64],
            out=out_ref.at[batch, rows, head],
            lse=lse_ref.at[batch, head, rows],
            carry=carry,
        )
        pl.when(begin < end)(lambda: consumer.attend(begin, end))
        pl.when(begin >= end)(consumer.copy_carry)

    @pl.when(wg == CONSUMERS)
    def _():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        group = operands.q.shape[2] // operands.k.shape[2]
        kv_head = lax.div(head, jnp.int32(group))
        source = operands._replace(
            q=operands.q.at[batch, pl.ds(q_tile * BLOCK_Q, BLOCK_Q), head],  # [128, d]
            k=operands.k.at[batch, :, kv_head],  # [S, d]
            v=operands.v.at[batch, :, kv_head],  # [S, d]
        )
        pl.when(begin < end)(lambda: _produce(tile, smem, source, begin, end))


def _produce(
    tile: ForwardTile, smem: Smem, source: Operands, begin: jax.Array, end: jax.Array
) -> None:
    """Copies Q and the key tiles [begin, end) to SMEM, in order of use."""
    count = end - begin
    k_copy = source.k, smem.k, smem.k_full, smem.k_empty
    v_copy = source.v, smem.v, smem.v_full, smem.v_empty

    def copy(source, buffer, full, empty, n) -> None:
        stage = lax.rem(n, jnp.int32(tile.stages))
        # Both consumers have arrived: they are done with tile n - stages.
        pl.when(n >= tile.stages)(lambda: plgpu.barrier_wait(empty.at[stage]))
        keys = pl.ds((begin + n) * tile.block_k, tile.block_k)
        plgpu.copy_gmem_to_smem(source.at[keys], buffer.at[stage], full.at[stage])

    copy(*k_copy, jnp.int32(0))
    for wg in range(CONSUMERS):
        rows = source.q.at[pl.ds(wg * ROWS, ROWS)]  # [64, d]
        plgpu.copy_gmem_to_smem(rows, smem.q.at[wg], smem.q_full.at[wg])

    @pl.loop(1, count)
    def _(n):
        copy(*k_copy, n)
        copy(*v_copy, n - 1)

    copy(*v_copy, count - 1)
    wait_for_last_arrivals(count, tile.stages, smem.k_empty, smem.v_empty)


class Consumer(NamedTuple):
    """A consumer warpgroup and the refs, in GMEM, of its 64 queries."""

    tile: ForwardTile
    smem: Smem
    wg: jax.Array
    k_start: jax.Ref  # [64]
    k_end: jax.Ref  # [64]
    full: jax.Ref  # [2], half-open range of key tiles that need no mask
    out: jax.Ref  # [64, d]
    lse: jax.Ref  # [64]
    carry: tuple[jax.Ref, jax.Ref] | None  # as out and lse

    def attend(self, begin: jax.Array, end: jax.Array) -> None:
        """Attends to the key tiles [begin, end), of which there is one at least."""
        smem, wg = self.smem, self.wg
        # Consumer 0 issues first: consumer 1 arrives as if it just had.
        pl.when(wg == 1)(lambda: plgpu.barrier_arrive(smem.schedule.at[0]))
        plgpu.barrier_wait(smem.q_full.at[wg])  # TMA: Q
        m, l, acc = self.tile.ops.run_with_acc(
            smem.acc,
            wg,
            (ROWS, smem.q.shape[-1]),
            functools.partial(self._attend_to_tiles, begin, end),
        )
        self._write(m, l, acc)
        # Consumer 1 arrives once more than consumer 0 issues.
        pl.when(wg == 0)(lambda: plgpu.barrier_wait(smem.schedule.at[0]))

    def copy_carry(self) -> None:
        """Copies the carry through, where no key is visible."""
        if self.carry:
            carry_out, carry_lse = self.carry
            self.out[...] = load(carry_out)  # [64, d]
            self.lse[...] = load(carry_lse, WGMMA_ROW)  # [64]
        else:
            self.out[...] = constant(self.out.shape, 0.0, plgpu.Layout.WGMMA)
            self.lse[...] = constant((ROWS,), -jnp.inf, WGMMA_ROW)

    def _attend_to_tiles(self, begin, end, acc_ref):
        """Returns m [64], l [64] and acc [64, d] over the key tiles [begin, end)."""
        smem, ops, block_k = self.smem, self.tile.ops, self.tile.block_k
        q = smem.q.at[self.wg]  # [64, d]
        bounds = load(self.k_start, WGMMA_ROW), load(self.k_end, WGMMA_ROW)  # [64]
        full = self.full[0], self.full[1]
        m = constant((ROWS,), M_INIT, WGMMA_ROW)  # [64]
        l = constant((ROWS,), 0.0, WGMMA_ROW)  # [64]

        stage = self._stage(0)
        plgpu.barrier_wait(smem.k_full.at[stage])  # TMA: K(0)

        def first_qk(s_acc):
            plgpu.wgmma(s_acc, q, smem.k.at[stage].transpose((1, 0)))
            return s_acc[...]  # drains S(0)

        s = pl.run_scoped(first_qk, plgpu.ACC((ROWS, block_k)))  # [64, block_k]
        plgpu.barrier_arrive(smem.k_empty.at[stage])
        m, l, _, p = self._softmax(s, begin, bounds, full, m, l)
        plgpu.barrier_wait(smem.v_full.at[stage])  # TMA: V(0)

        def step(n, state):
            m, l, p = state  # p is P(n-1) [64, block_k]
            stage, previous = self._stage(n), self._stage(n - 1)
            plgpu.barrier_wait(smem.k_full.at[stage])  # TMA: K(n)
            plgpu.barrier_wait(smem.schedule.at[self.wg])  # the other one has issued

            def qk(s_acc):
                # In flight on entry: nothing.
                k = smem.k.at[stage].transpose((1, 0))  # [d, block_k]
                plgpu.wgmma(s_acc, q, k)  # group: S(n) = Q Kᵀ
                v = smem.v.at[previous]  # [block_k, d]
                ops.wgmma(acc_ref, p, v)  # group: acc += P(n-1) V(n-1)
                plgpu.barrier_arrive(smem.schedule.at[1 - self.wg])
                # Drains S(n); P(n-1) V(n-1) stays in flight.
                return plgpu.wgmma_accumulator_load(s_acc, wait_n=1)

            s = pl.run_scoped(qk, plgpu.ACC((ROWS, block_k)))  # [64, block_k]
            plgpu.barrier_arrive(smem.k_empty.at[stage])
            m, l, alpha, p = self._softmax(s, begin + n, bounds, full, m, l)
            # Not later: without a branch between them, as there is in this wait, ptxas
            # moves the softmax behind `wgmma_wait`.
            plgpu.barrier_wait(smem.v_full.at[stage])  # TMA: V(n)
            plgpu.wgmma_wait(0)  # drains P(n-1) V(n-1)
            plgpu.barrier_arrive(smem.v_empty.at[previous])
            ops.rescale(acc_ref, alpha)  # acc [64, d] is relative to the new m
            return m, l, p

        m, l, p = lax.fori_loop(1, end - begin, step, (m, l, p))
        last = self._stage(end - begin - 1)
        ops.wgmma(acc_ref, p, smem.v.at[last])  # group: acc += P V
        acc = acc_ref[...]  # [64, d]; drains P V
        plgpu.barrier_arrive(smem.v_empty.at[last])
        return m, l, acc

    def _stage(self, n):
        return lax.rem(n, jnp.int32(self.tile.stages))

    def _softmax(self, s, j, bounds, full, m, l):
        """Updates the online softmax (FlashAttention, 2205.14135, algorithm 1).

        s: Q Kᵀ [64, block_k] of key tile j. m: row maxima [64] of scaled scores, as
        exponents of 2. l: row sums [64].

        Returns:
          The new m and l, the factor alpha [64] on l and acc of before, and P in the
          type of V, [64, block_k].
        """
        scale, block_k = self.tile.scale, self.tile.block_k
        if self.tile.tanh_scale is not None:
            s = one_plus_tanh(s, self.tile.tanh_scale, self.tile.ops)

        is_full = (full[0] <= j) & (j < full[1])
        s = lax.cond(is_full, lambda s: s, lambda s: masked(s, j * block_k, bounds), s)
        new_m = jnp.maximum(m, s.max(axis=1) * scale)  # [64]
        alpha = jnp.exp2(m - new_m)  # [64]
        p = jnp.exp2(s * scale - broadcast_cols(new_m, block_k))  # [64, block_k]
        l = l * alpha + p.sum(axis=1)  # [64]
        return new_m, l, alpha, p.astype(self.smem.q.dtype)

    def _write(self, m, l, acc):
        """Writes out and lse of m [64], l [64] and acc [64, d], merged with the carry.

        See `merge`: a carry is a partial result of row maximum lse and row sum 1.
        """
        if self.tile.tanh_scale is not None:
            m -= self.tile.scale  # of tanh, no longer of 1 + tanh
        weights = []
        if self.carry:
            carry_m = load(self.carry[1], WGMMA_ROW) * LOG2_E  # [64]
            new_m = jnp.maximum(m, carry_m)  # [64]
            weights = [jnp.exp2(m - new_m), jnp.exp2(carry_m - new_m)]  # [64] each
            m, l = new_m, l * weights[0] + weights[1]
        is_visible = l != 0  # also where l is nan, which must show
        l = jnp.where(is_visible, l, 1.0)
        weights = [w / l for w in weights] or [1 / l]  # [64] each
        self.lse[...] = jnp.where(is_visible, (m + jnp.log2(l)) * LN_2, -jnp.inf)
        for first in range(0, acc.shape[1], EPILOGUE_COLUMNS):
            columns = pl.ds(first, EPILOGUE_COLUMNS)
            out = lax.slice(acc, (0, first), (ROWS, first + EPILOGUE_COLUMNS))
            out *= broadcast_cols(weights[0], EPILOGUE_COLUMNS)  # [64, 64]
            if self.carry:
                carry_out = load(self.carry[0].at[:, columns])  # [64, 64]
                out += carry_out * broadcast_cols(weights[1], EPILOGUE_COLUMNS)
            self.out[:, columns] = out
