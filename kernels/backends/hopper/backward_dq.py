"""Computes dq alone on a Hopper GPU, in the same order of sums each time.

The kernel of `backward` adds to dq from all key tiles, in no certain order, so its last
bits change from run to run. Here a program owns one query tile [128, d] of one head and
adds to dq once. That takes the scores and their gradients once more: seven products a
tile instead of five. The producer copies Q and dO once, and K(n) and V(n) of the live
key tiles n = 0, 1, ... as stages become empty. Two consumers own 64 queries each:

    producer  TMA    K(n+1)                     V(n+1)
    consumer  WGMMA  S = Q Kᵀ  dP = dO Vᵀ                           dQ += dS K
              ALU              P = exp2(S)      dS = P (dP - delta)

    barrier  waits           arrives, and what it means
    q_full   consumer        TMA: its 64 queries are in SMEM
    do_full  consumer        TMA: their dO is in SMEM
    k_full   both consumers  TMA: K(n) is in its stage
    v_full   both consumers  TMA: V(n) is in its stage
    k_empty  producer        both consumers: dS(n) K(n) is computed
    v_empty  producer        both consumers: dP(n) is computed
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .query_tile import Program, Queries, QueryConfig, QueryOperands, QuerySmem
from .shared import (
    EPILOGUE_COLUMNS,
    ROWS,
    WARPGROUP,
    WGMMA_ROW,
    broadcast_cols,
    by_role,
    constant,
    load,
    mask,
    probabilities,
    run_kernel,
    wait_for_last_arrivals,
)


def query_gradients_call(
    config: QueryConfig,
    operands: QueryOperands,
    dq: jax.Array,
    interpret: plgpu.InterpretGPUParams | None,
) -> jax.Array:
    """Adds to dq, float32 (B, T, H, D), in its place; a result is not added to it."""
    d = operands.q.shape[-1]
    dq_ref = jax.new_ref(dq) if config.dq_scale is None else None
    result = jax.ShapeDtypeStruct(operands.q.shape, operands.q.dtype)
    results = run_kernel(
        functools.partial(_kernel, config),
        (operands, dq_ref),
        name="flash_backward_queries",
        out_type=(result,) if dq_ref is None else (),
        smem=QuerySmem.types(config, d, operands.q.dtype, is_backward=True),
        grid=operands.grid,
        interpret=interpret,
    )
    return results[0] if dq_ref is None else jax.freeze(dq_ref)


def _kernel(
    config: QueryConfig,
    inputs: tuple[QueryOperands, jax.Ref | None],  # and dq, (B, T, H, D)
    *result_and_smem: Any,  # dq, where it is none of the inputs; `QuerySmem`
) -> None:
    """Computes one query tile of one head."""
    operands, sum_ref = inputs
    *results, smem = result_and_smem
    dq_ref = results[0] if sum_ref is None else sum_ref

    # Each role finds its program: of one for both, ptxas spills the number of the
    # query tile over the loop, in heads of 256.
    def consume(wg: jax.Array) -> None:
        program = Program.of(operands, config.block_k)
        begin, end = program.begin, program.end
        batch, head = program.batch, program.head
        queries = program.queries(operands, wg)
        rows = queries.rows
        lse, delta = operands.lse_delta
        lse = lse.at[batch, head, rows]  # [64]
        delta = delta.at[batch, head, rows]  # [64]
        dq = dq_ref.at[batch, rows, head]  # [64, d]
        consumer = DqConsumer(config, smem, queries, lse, delta, dq)
        pl.when(begin < end)(lambda: consumer.accumulate(begin, end))
        # Of a tile without keys a dq stays as it is that is added to in its place.
        if results:
            pl.when(begin >= end)(consumer.write_zeros)

    def produce() -> None:
        program = Program.of(operands, config.block_k)
        source = program.source(operands)
        has_keys = program.begin < program.end
        pl.when(has_keys)(lambda: _produce(program, smem, source))

    by_role(consume, produce)


def _produce(program: Program, smem: QuerySmem, source: QueryOperands) -> None:
    """Copies Q, dO and the live key tiles to SMEM, in order of use."""
    count = program.end - program.begin
    k, v = program.key_copies(source, smem)

    program.copy_queries(source.q, smem.q, smem.q_full)
    k.start(jnp.int32(0))
    program.copy_queries(source.do, smem.do, smem.do_full)
    v.start(jnp.int32(0))

    @pl.loop(1, count)
    def _(n):
        k.start(n)
        v.start(n)

    for copies in k, v:
        wait_for_last_arrivals(count, copies.buffer.shape[0], copies.empty)


class DqConsumer(NamedTuple):
    """A consumer warpgroup and the refs, in GMEM, of its 64 queries."""

    config: QueryConfig
    smem: QuerySmem
    queries: Queries
    lse: jax.Ref  # [64]
    delta: jax.Ref  # [64]
    dq: jax.Ref  # [64, d]

    def accumulate(self, begin: jax.Array, end: jax.Array) -> None:
        """Adds the gradient over key tiles [begin, end), at least one, to dq."""
        smem = self.smem
        wg = lax.axis_index(WARPGROUP)
        plgpu.barrier_wait(smem.q_full.at[wg])  # TMA: Q
        plgpu.barrier_wait(smem.do_full.at[wg])  # TMA: dO
        body = functools.partial(self._all_key_tiles, begin, end)
        self.config.ops.run_with_acc(smem.acc, wg, self.dq.shape, body)

    def _all_key_tiles(self, begin, end, dq_acc) -> None:
        """Runs the pipeline. dq_acc: [64, d]."""
        config, smem = self.config, self.smem
        lse = load(self.lse, WGMMA_ROW)  # [64]
        # Once: found in each step it spills, in capped heads of 256.
        full = self.queries.full_tiles(config.block_k)

        def step(n, _):
            stage = lax.rem(n, jnp.int32(config.k_stages))
            ds = self._score_gradients(n, begin, end, lse, full)  # [64, block_k]
            config.ops.wgmma(dq_acc, ds, smem.k.at[stage])  # group: dQ += dS K

        self._wait_for_keys(jnp.int32(0))
        lax.fori_loop(0, end - begin, step, None)
        plgpu.wgmma_wait(0)  # drains dQ
        self._release(end - begin - 1)
        dq = dq_acc[...]  # [64, d]
        for first in range(0, dq.shape[1], EPILOGUE_COLUMNS):
            columns = pl.ds(first, EPILOGUE_COLUMNS)
            part = lax.slice(dq, (0, first), (ROWS, first + EPILOGUE_COLUMNS))
            if config.dq_scale is None:
                part += load(self.dq.at[:, columns])  # [64, 64]
            else:
                part *= config.dq_scale
            self.dq[:, columns] = part.astype(self.dq.dtype)

    def write_zeros(self) -> None:
        """Writes dq of queries that see no key."""
        zeros = constant(self.dq.shape, 0.0, plgpu.Layout.WGMMA)  # [64, d]
        self.dq[...] = zeros.astype(self.dq.dtype)

    def _wait_for_keys(self, n) -> None:
        """Waits for TMA of K(n)."""
        stage = lax.rem(n, jnp.int32(self.config.k_stages))
        plgpu.barrier_wait(self.smem.k_full.at[stage])

    def _release(self, n) -> None:
        """Arrives where the producer waits to copy to the stage of K(n)."""
        stage = lax.rem(n, jnp.int32(self.config.k_stages))
        plgpu.barrier_arrive(self.smem.k_empty.at[stage])

    def _score_gradients(self, n, begin, end, lse, full) -> jax.Array:
        """Returns dS(n) [64, block_k], once K(n+1) has arrived."""
        config, smem = self.config, self.smem
        wg = lax.axis_index(WARPGROUP)  # in each step: see `backward`
        k_stage = lax.rem(n, jnp.int32(config.k_stages))
        v_stage = lax.rem(n, jnp.int32(config.v_stages))
        acc = plgpu.ACC((ROWS, config.block_k))

        def scores(s_acc):
            # In flight on entry: dQ(n-1).
            k = smem.k.at[k_stage].transpose((1, 0))  # [d, block_k]
            plgpu.wgmma(s_acc, smem.q.at[wg], k)  # group: S = Q Kᵀ
            plgpu.wgmma_wait(1)  # drains dQ(n-1); S(n) stays in flight
            pl.when(n > 0)(lambda: self._release(n - 1))

            plgpu.barrier_wait(smem.v_full.at[v_stage])  # TMA: V(n)
            # Not with S: ptxas would drain dQ(n-1) before it issues S(n).
            return pl.run_scoped(functools.partial(gradients, s_acc), acc)

        def gradients(s_acc, dp_acc):
            v = smem.v.at[v_stage].transpose((1, 0))  # [d, block_k]
            plgpu.wgmma(dp_acc, smem.do.at[wg], v)  # group: dP = dO Vᵀ
            # Drains S(n); dP(n) stays in flight.
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)  # [64, block_k]
            _, weight = self._probabilities(s, begin + n, lse, full)  # [64, block_k]
            # As in `forward`: without a branch ptxas moves it behind the wait for dP.
            pl.when(begin + n + 1 < end)(lambda: self._wait_for_keys(n + 1))  # K(n+1)

            # Loaded in each step, while WGMMAs run: kept, it would spill others.
            delta = broadcast_cols(load(self.delta, WGMMA_ROW), config.block_k)
            # Drains dP(n).
            dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)  # [64, block_k]
            plgpu.barrier_arrive(smem.v_empty.at[v_stage])
            return (weight * (dp - delta)).astype(smem.q.dtype)

        return pl.run_scoped(scores, acc)

    def _probabilities(self, s, j, lse, full) -> tuple[jax.Array, jax.Array]:
        """Returns `probabilities` of key tile j from s = Q Kᵀ [64, block_k]."""
        queries = self.queries
        block_k = self.config.block_k

        def masked(x, fill):
            def of_partial(x):
                refs = queries.k_start, queries.k_end
                bounds = (load(ref, WGMMA_ROW) for ref in refs)  # [64] each
                return mask(x, j * block_k, 1, bounds, fill)

            is_full = (full[0] <= j) & (j < full[1])
            return lax.cond(is_full, lambda x: x, of_partial, x)

        return probabilities(self.config, s, broadcast_cols(lse, block_k), masked)
