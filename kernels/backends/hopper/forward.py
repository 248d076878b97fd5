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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...precision import LOG2_E
from .query_tile import Program, Queries, QueryConfig, QueryOperands, QuerySmem
from .shared import (
    EPILOGUE_COLUMNS,
    ROWS,
    WGMMA_ROW,
    broadcast_cols,
    by_role,
    constant,
    load,
    masked,
    one_plus_tanh,
    run_kernel,
    wait_for_last_arrivals,
)

LN_2 = math.log(2)

IN_PLACE = 128
"""Largest heads whose out takes the place of a carry: of 256, ptxas spills 24 bytes."""

M_INIT = -0.7 * float(jnp.finfo(jnp.float32).max)
"""Row maximum before any visible key: finite, as -inf - -inf is nan."""


def forward_call(
    config: QueryConfig,
    operands: QueryOperands,
    out_type: jnp.dtype,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel, with out in the place of the carry's if there is one.

    out_type: of out; in a narrower one than float32 it has a place of its own.

    Returns:
      out and natural-log lse, shaped like the carry; -inf for rows without any key.
    """
    batch, length, heads, d = operands.q.shape
    out = jax.ShapeDtypeStruct(operands.q.shape, out_type)
    lse = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    is_in_place = operands.carry and out_type == jnp.float32 and d <= IN_PLACE
    if is_in_place:
        carry_out, carry_lse = operands.carry
        out_ref = jax.new_ref(carry_out)
        operands = operands._replace(carry=(out_ref, carry_lse))
    *outs, lse = run_kernel(
        functools.partial(_kernel, config),
        operands,
        name="flash_forward",
        out_type=(lse,) if is_in_place else (out, lse),
        smem=QuerySmem.types(config, d, operands.q.dtype, is_backward=False),
        grid=operands.grid,
        interpret=interpret,
    )
    return outs[0] if outs else jax.freeze(operands.carry[0]), lse


def _kernel(
    config: QueryConfig,
    operands: QueryOperands,
    *results_and_smem: Any,  # out (B, T, H, D) if not in place; lse (B, H, T); smem
) -> None:
    """Computes one query tile of one head."""
    *outs, lse_ref, smem = results_and_smem
    out_ref = outs[0] if outs else operands.carry[0]
    program = Program.of(operands, config.block_k)
    begin, end = program.begin, program.end

    def consume(wg: jax.Array) -> None:
        batch, head = program.batch, program.head
        queries = program.queries(operands, wg)
        rows = queries.rows
        carry = None
        if operands.carry:
            carry_out, carry_lse = operands.carry
            carry = carry_out.at[batch, rows, head], carry_lse.at[batch, head, rows]
        consumer = ForwardConsumer(
            config=config,
            smem=smem,
            wg=wg,
            queries=queries,
            out=out_ref.at[batch, rows, head],
            lse=lse_ref.at[batch, head, rows],
            carry=carry,
        )
        # As the producer does: one that waits for copies of no tile would hang.
        pl.when(begin < end)(lambda: consumer.attend(begin, end))
        pl.when(begin >= end)(consumer.copy_carry)

    def produce() -> None:
        source = program.source(operands)
        pl.when(begin < end)(lambda: _produce(program, smem, source))

    by_role(consume, produce)


def _produce(program: Program, smem: QuerySmem, source: QueryOperands) -> None:
    """Copies Q and the live key tiles to SMEM, in order of use."""
    count = program.end - program.begin
    k, v = program.key_copies(source, smem)

    k.start(jnp.int32(0))
    program.copy_queries(source.q, smem.q, smem.q_full)

    # V(n-1) behind K(n), as consumers read them: S(n) is issued before P(n-1) V(n-1).
    @pl.loop(1, count)
    def _(n):
        k.start(n)
        v.start(n - 1)

    v.start(count - 1)
    wait_for_last_arrivals(count, smem.k.shape[0], smem.k_empty, smem.v_empty)


class ForwardConsumer(NamedTuple):
    """A consumer warpgroup and the refs, in GMEM, of its 64 queries."""

    config: QueryConfig
    smem: QuerySmem
    wg: jax.Array
    queries: Queries
    out: jax.Ref  # [64, d]
    lse: jax.Ref  # [64]
    carry: tuple[jax.Ref, jax.Ref] | None  # as out and lse

    def attend(self, begin: jax.Array, end: jax.Array) -> None:
        """Attends to the key tiles [begin, end), of which there is one at least."""
        smem, wg = self.smem, self.wg
        # Consumer 0 issues first: consumer 1 arrives as if it just had.
        pl.when(wg == 1)(lambda: plgpu.barrier_arrive(smem.schedule.at[0]))
        plgpu.barrier_wait(smem.q_full.at[wg])  # TMA: Q
        m, l, acc = self.config.ops.run_with_acc(
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
            # Else it is there.
            if self.out.dtype != jnp.float32 or self.out.shape[1] > IN_PLACE:
                self.out[...] = load(carry_out).astype(self.out.dtype)  # [64, d]
            self.lse[...] = load(carry_lse, WGMMA_ROW)  # [64]
        else:
            zeros = constant(self.out.shape, 0.0, plgpu.Layout.WGMMA)  # [64, d]
            self.out[...] = zeros.astype(self.out.dtype)
            self.lse[...] = constant((ROWS,), -jnp.inf, WGMMA_ROW)

    def _attend_to_tiles(self, begin, end, acc_ref):
        """Returns m [64], l [64] and acc [64, d] over the key tiles [begin, end)."""
        smem = self.smem
        ops, block_k = self.config.ops, self.config.block_k
        q = smem.q.at[self.wg]  # [64, d]
        queries = self.queries
        k_start = load(queries.k_start, WGMMA_ROW)  # [64]
        k_end = load(queries.k_end, WGMMA_ROW)  # [64]
        bounds = k_start, k_end
        full = queries.full_tiles(block_k)
        m = constant((ROWS,), M_INIT, WGMMA_ROW)  # [64]
        l = constant((ROWS,), 0.0, WGMMA_ROW)  # [64]

        # Tile 0 by itself: there is no P(-1) V(-1) to run beside its softmax.
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
            stage = self._stage(n)
            previous = self._stage(n - 1)
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
        # Its V is in SMEM: the wait for it is in the step, or in tile 0's, above.
        last = self._stage(end - begin - 1)
        ops.wgmma(acc_ref, p, smem.v.at[last])  # group: acc += P V
        acc = acc_ref[...]  # [64, d]; drains P V
        plgpu.barrier_arrive(smem.v_empty.at[last])
        return m, l, acc

    def _stage(self, n):
        # Of V too: it has as many stages as K in `FORWARD`, and must have.
        return lax.rem(n, jnp.int32(self.config.k_stages))

    def _softmax(self, s, j, bounds, full, m, l):
        """Updates the online softmax (FlashAttention, 2205.14135, algorithm 1).

        s: Q Kᵀ [64, block_k] of key tile j. m: row maxima [64] of scaled scores, as
        exponents of 2. l: row sums [64].

        Returns:
          The new m and l, the factor alpha [64] on l and acc of before, and P in the
          type of V, [64, block_k].
        """
        scale, block_k = self.config.scale, self.config.block_k
        if self.config.tanh_scale is not None:
            s = one_plus_tanh(s, self.config.tanh_scale, self.config.ops)

        is_full = (full[0] <= j) & (j < full[1])
        s = lax.cond(is_full, lambda s: s, lambda s: masked(s, j * block_k, bounds), s)
        # scale is above 0 (`forward_factors`): the largest score is the largest scaled.
        new_m = jnp.maximum(m, s.max(axis=1) * scale)  # [64]
        alpha = jnp.exp2(m - new_m)  # [64]
        p = jnp.exp2(s * scale - broadcast_cols(new_m, block_k))  # [64, block_k]
        l = l * alpha + p.sum(axis=1)  # [64]
        return new_m, l, alpha, p.astype(self.smem.q.dtype)

    def _write(self, m, l, acc):
        """Writes out and lse of m [64], l [64] and acc [64, d], merged with the carry.

        See `merge`: a carry is a partial result of row maximum lse and row sum 1.
        """
        if self.config.tanh_scale is not None:
            m -= self.config.scale  # of tanh, no longer of 1 + tanh
        weights = []
        if self.carry:
            carry_m = load(self.carry[1], WGMMA_ROW) * LOG2_E  # [64]
            new_m = jnp.maximum(m, carry_m)  # [64]
            weights = [jnp.exp2(m - new_m), jnp.exp2(carry_m - new_m)]  # [64] each
            m = new_m
            l = l * weights[0] + weights[1]  # [64]
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
            self.out[:, columns] = out.astype(self.out.dtype)
