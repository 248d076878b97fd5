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
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

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
    load,
    mask,
    probabilities,
    run_kernel,
    tiled_smem,
    wait_for_last_arrivals,
)


class QueryTile(NamedTuple):
    """Sizes and constants of a program.

    block_k: keys of a tile.
    k_stages, v_stages: tiles of K (2 at least) and of V in SMEM.
    exponent_scale: factor on scores, for exponents of 2.
    tanh_scale: scores are 1 + tanh(tanh_scale Q Kᵀ), or Q Kᵀ if it is None.
    ops: of the GPU, or emulated.
    """

    block_k: int
    k_stages: int
    v_stages: int
    exponent_scale: float
    tanh_scale: float | None
    ops: NativeOps


class Operands(NamedTuple):
    """Arrays that the kernel reads, in GMEM. T and S are whole tiles.

    live: int32 (M, T / 128, 2), half-open range of key tiles that are not empty.
    full: int32 (M, T / 64, 2), those that need no mask; M is B or 1.
    k_start, k_end: int32 (M, T), visible keys of each query.
    lse, delta: float32 (B, H, T): lse for exponents of 2.
    q, do: (B, T, H, D). k, v: (B, S, K, D).
    """

    live: jax.Array
    full: jax.Array
    k_start: jax.Array
    k_end: jax.Array
    lse: jax.Array
    delta: jax.Array
    q: jax.Array
    do: jax.Array
    k: jax.Array
    v: jax.Array


class Smem(NamedTuple):
    """Shared memory and barriers of a program, the latter as in the table above."""

    q: jax.Ref  # [2, 64, d]
    do: jax.Ref  # [2, 64, d]
    k: jax.Ref  # [k_stages, block_k, d]
    v: jax.Ref  # [v_stages, block_k, d]
    dq: jax.Ref | None  # [2, 64, d] float32 where emulated
    q_full: jax.Ref  # [2]
    do_full: jax.Ref  # [2]
    k_full: jax.Ref  # [k_stages]
    v_full: jax.Ref  # [v_stages]
    k_empty: jax.Ref  # [k_stages]
    v_empty: jax.Ref  # [v_stages]

    @classmethod
    def types(cls, tile: QueryTile, d: int, dtype: jnp.dtype) -> "Smem":
        queries = tiled_smem((CONSUMERS, ROWS, d), dtype)
        by_consumers = functools.partial(plgpu.Barrier, num_arrivals=CONSUMERS)
        return cls(
            q=queries,
            do=queries,
            k=tiled_smem((tile.k_stages, tile.block_k, d), dtype),
            v=tiled_smem((tile.v_stages, tile.block_k, d), dtype),
            dq=tile.ops.acc_smem(ROWS, d),
            q_full=plgpu.Barrier(num_barriers=CONSUMERS),
            do_full=plgpu.Barrier(num_barriers=CONSUMERS),
            k_full=plgpu.Barrier(num_barriers=tile.k_stages),
            v_full=plgpu.Barrier(num_barriers=tile.v_stages),
            k_empty=by_consumers(num_barriers=tile.k_stages),
            v_empty=by_consumers(num_barriers=tile.v_stages),
        )


def query_gradients_call(
    tile: QueryTile,
    operands: Operands,
    dq: jax.Array,
    interpret: plgpu.InterpretGPUParams | None,
) -> jax.Array:
    """Adds to dq, float32 (B, T, H, D), in its place."""
    batch, length, heads, d = operands.q.shape
    dq_ref = jax.new_ref(dq)
    run_kernel(
        lambda inputs, smem: _kernel(tile, *inputs, smem),
        (operands, dq_ref),
        name="flash_backward_queries",
        out_type=(),
        smem=Smem.types(tile, d, operands.q.dtype),
        # The last axis is the fastest: heads share keys, and long rows come first.
        grid={"tile": length // BLOCK_Q, "batch": batch, "head": heads},
        interpret=interpret,
    )
    return jax.freeze(dq_ref)


def _kernel(
    tile: QueryTile,
    operands: Operands,
    dq_ref: jax.Ref,  # (B, T, H, D)
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
        consumer = Consumer(
            tile=tile,
            smem=smem,
            k_start=operands.k_start.at[bound_row, rows],
            k_end=operands.k_end.at[bound_row, rows],
            full=operands.full.at[bound_row, rows_64],
            lse=operands.lse.at[batch, head, rows],
            delta=operands.delta.at[batch, head, rows],
            dq=dq_ref.at[batch, rows, head],
        )
        pl.when(begin < end)(lambda: consumer.accumulate(begin, end))

    @pl.when(wg == CONSUMERS)
    def _():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        group = operands.q.shape[2] // operands.k.shape[2]
        kv_head = lax.div(head, jnp.int32(group))
        queries = pl.ds(q_tile * BLOCK_Q, BLOCK_Q)
        source = operands._replace(
            q=operands.q.at[batch, queries, head],  # [128, d]
            do=operands.do.at[batch, queries, head],  # [128, d]
            k=operands.k.at[batch, :, kv_head],  # [S, d]
            v=operands.v.at[batch, :, kv_head],  # [S, d]
        )
        pl.when(begin < end)(lambda: _produce(tile, smem, source, begin, end))


def _produce(
    tile: QueryTile, smem: Smem, source: Operands, begin: jax.Array, end: jax.Array
) -> None:
    """Copies Q, dO and the key tiles [begin, end) to SMEM, in order of use."""
    count = end - begin
    k_copy = source.k, smem.k, smem.k_full, smem.k_empty
    v_copy = source.v, smem.v, smem.v_full, smem.v_empty

    def copy_queries(source, buffer, full) -> None:
        for wg in range(CONSUMERS):
            rows = source.at[pl.ds(wg * ROWS, ROWS)]  # [64, d]
            plgpu.copy_gmem_to_smem(rows, buffer.at[wg], full.at[wg])

    def copy(source, buffer, full, empty, n) -> None:
        stages = buffer.shape[0]
        stage = lax.rem(n, jnp.int32(stages))
        # Both consumers have arrived: they are done with tile n - stages.
        pl.when(n >= stages)(lambda: plgpu.barrier_wait(empty.at[stage]))
        keys = pl.ds((begin + n) * tile.block_k, tile.block_k)
        plgpu.copy_gmem_to_smem(source.at[keys], buffer.at[stage], full.at[stage])

    copy_queries(source.q, smem.q, smem.q_full)
    copy(*k_copy, jnp.int32(0))
    copy_queries(source.do, smem.do, smem.do_full)
    copy(*v_copy, jnp.int32(0))

    @pl.loop(1, count)
    def _(n):
        copy(*k_copy, n)
        copy(*v_copy, n)

    wait_for_last_arrivals(count, tile.k_stages, smem.k_empty)
    wait_for_last_arrivals(count, tile.v_stages, smem.v_empty)


class Consumer(NamedTuple):
    """A consumer warpgroup and the refs, in GMEM, of its 64 queries."""

    tile: QueryTile
    smem: Smem
    k_start: jax.Ref  # [64]
    k_end: jax.Ref  # [64]
    full: jax.Ref  # [2], half-open range of key tiles that need no mask
    lse: jax.Ref  # [64]
    delta: jax.Ref  # [64]
    dq: jax.Ref  # [64, d]

    def accumulate(self, begin: jax.Array, end: jax.Array) -> None:
        """Adds the gradient over key tiles [begin, end), at least one, to dq."""
        smem, wg = self.smem, lax.axis_index(WARPGROUP)
        plgpu.barrier_wait(smem.q_full.at[wg])  # TMA: Q
        plgpu.barrier_wait(smem.do_full.at[wg])  # TMA: dO
        body = functools.partial(self._all_key_tiles, begin, end)
        self.tile.ops.run_with_acc(smem.dq, wg, self.dq.shape, body)

    def _all_key_tiles(self, begin, end, dq_acc) -> None:
        """Runs the pipeline. dq_acc: [64, d]."""
        tile, smem = self.tile, self.smem
        lse = load(self.lse, WGMMA_ROW)  # [64]

        def step(n, _):
            stage = lax.rem(n, jnp.int32(tile.k_stages))
            ds = self._score_gradients(n, begin, end, lse)  # [64, block_k]
            tile.ops.wgmma(dq_acc, ds, smem.k.at[stage])  # group: dQ += dS K

        self._wait_for_keys(jnp.int32(0))
        lax.fori_loop(0, end - begin, step, None)
        plgpu.wgmma_wait(0)  # drains dQ
        self._release(end - begin - 1)
        dq = dq_acc[...]  # [64, d]
        for first in range(0, dq.shape[1], EPILOGUE_COLUMNS):
            columns = pl.ds(first, EPILOGUE_COLUMNS)
            part = lax.slice(dq, (0, first), (ROWS, first + EPILOGUE_COLUMNS))
            self.dq[:, columns] = part + load(self.dq.at[:, columns])  # [64, 64]

    def _wait_for_keys(self, n) -> None:
        """Waits for TMA of K(n)."""
        stage = lax.rem(n, jnp.int32(self.tile.k_stages))
        plgpu.barrier_wait(self.smem.k_full.at[stage])

    def _release(self, n) -> None:
        """Arrives where the producer waits to copy to the stage of K(n)."""
        stage = lax.rem(n, jnp.int32(self.tile.k_stages))
        plgpu.barrier_arrive(self.smem.k_empty.at[stage])

    def _score_gradients(self, n, begin, end, lse) -> jax.Array:
        """Returns dS(n) [64, block_k], once K(n+1) has arrived."""
        tile, smem = self.tile, self.smem
        wg = lax.axis_index(WARPGROUP)  # in each step: see `backward`
        k_stage = lax.rem(n, jnp.int32(tile.k_stages))
        v_stage = lax.rem(n, jnp.int32(tile.v_stages))
        acc = plgpu.ACC((ROWS, tile.block_k))

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
            _, weight = self._probabilities(s, begin + n, lse)  # [64, block_k]
            # As in `forward`: without a branch ptxas moves it behind the wait for dP.
            pl.when(begin + n + 1 < end)(lambda: self._wait_for_keys(n + 1))  # K(n+1)

            # Loaded in each step, while WGMMAs run: kept, it would spill others.
            delta = broadcast_cols(load(self.delta, WGMMA_ROW), tile.block_k)
            # Drains dP(n).
            dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)  # [64, block_k]
            plgpu.barrier_arrive(smem.v_empty.at[v_stage])
            return (weight * (dp - delta)).astype(smem.q.dtype)

        return pl.run_scoped(scores, acc)

    def _probabilities(self, s, j, lse) -> tuple[jax.Array, jax.Array]:
        """Returns `probabilities` of key tile j from s = Q Kᵀ [64, block_k]."""
        block_k = self.tile.block_k

        def masked(x, fill):
            def of_partial(x):
                bounds = (load(x, WGMMA_ROW) for x in (self.k_start, self.k_end))
                return mask(x, j * block_k, 1, bounds, fill)  # bounds: [64] each

            is_full = (self.full[0] <= j) & (j < self.full[1])
            return lax.cond(is_full, lambda x: x, of_partial, x)

        return probabilities(self.tile, s, broadcast_cols(lse, block_k), masked)
