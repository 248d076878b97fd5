"""Runs the backward step on a Hopper GPU (FlashAttention-3, 2407.08608, appendix B.1).

A program computes dk and dv of one key tile of one key/value head. Its work tiles
n = 0, 1, ... are the live query tiles of each of its query heads. The producer copies K
and V once, and Q(n) and dO(n) as stages become empty. Two consumers own 64 keys each.
Scores are transposed, keys by queries: so P and dS are operands in registers of the
WGMMAs for dV and dK, which accumulate in registers too:

    producer  TMA    Q(n+1)                   dO(n+1)
    consumer  WGMMA  S = K Qᵀ  dP = V dOᵀ     dV += P dO      dQ(n-1) = dS K  dK += dS Q
              ALU              P = exp2(S)    dS = P (dP - delta)             store dQ

dQ needs the dS of both consumers, through SMEM, and is added to GMEM by TMA. It is
computed one work tile late, so that no consumer waits for the other unless they are a
tile apart. Without dQ, sums have the same order each time.

    barrier      waits           arrives, and what it means
    k_full       both consumers  TMA: K is in SMEM
    v_full       both consumers  TMA: V is in SMEM
    q_full       both consumers  TMA, three copies: Q(n), its lse and delta, its bounds
    do_full      both consumers  TMA: dO(n) is in its stage
    q_empty      producer        both consumers: dK(n) is computed
    do_empty     producer        both consumers: dV(n) is computed
    ds_exchange  both consumers  both: dS(n-1) is stored, and dQ(n-2) computed
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .backward_tile import (
    STAGES,
    ConsumerPart,
    KeyConfig,
    KeyOperands,
    KeySmem,
    WorkTile,
    WorkTiles,
)
from .shared import (
    ROWS,
    WARPGROUP,
    WGMMA_COL,
    broadcast_rows,
    by_role,
    constant,
    empty_stage,
    load,
    mask,
    probabilities,
    run_kernel,
    wait_for_last_arrivals,
)


def backward_call(
    config: KeyConfig,
    operands: KeyOperands,
    dq: jax.Array | None,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """Runs the kernel.

    dq: float32 (B, T, H, D), which is added to in its place, in no certain order. None
      for dk and dv alone, which come out the same each time.

    Returns:
      dq, and dk and dv, shaped like k; of which type: see `KeyConfig`.
    """
    batch, length, heads, _ = operands.k.shape
    programs = length // config.block_k
    has_dq = dq is not None
    # No result, as dk and dv: each program adds to it, and none writes all of it.
    dq_ref = config.ops.new_sum(dq, programs) if has_dq else None
    dtype = jnp.float32 if config.dk_scale is None else operands.k.dtype
    gradient = jax.ShapeDtypeStruct(operands.k.shape, dtype)
    dk, dv = run_kernel(
        functools.partial(_kernel, config),
        (operands, dq_ref),
        name="flash_backward" if has_dq else "flash_backward_keys",
        out_type=(gradient, gradient),
        smem=KeySmem.types(config, operands.q.dtype, has_dq),
        # The last axis is the fastest: the tiles of a head read the same queries.
        grid={"batch": batch, "head": heads, "tile": programs},
        interpret=interpret,
    )
    return config.ops.freeze_sum(dq_ref) if has_dq else None, dk, dv


def _kernel(
    config: KeyConfig,
    inputs: tuple[KeyOperands, jax.Ref | None],  # and dq, (B, T, H, D)
    dk_ref: jax.Ref,  # (B, S, K, D)
    dv_ref: jax.Ref,  # (B, S, K, D)
    smem: KeySmem,
) -> None:
    """Computes one key tile of one key/value head."""
    operands, dq_ref = inputs
    batch = lax.axis_index("batch")
    head = lax.axis_index("head")
    k_tile = lax.axis_index("tile")
    # A batch that shares its bounds has one row of them.
    bound_row = batch if operands.live.shape[0] > 1 else 0
    group = operands.q.shape[2] // operands.k.shape[2]
    work_tiles = WorkTiles(
        begin=operands.live[bound_row, k_tile, 0],
        end=operands.live[bound_row, k_tile, 1],
        head=head * group,
        group=group,
    )
    is_live = work_tiles.begin < work_tiles.end

    def consume(wg: jax.Array) -> None:
        part = ConsumerPart.of(config, wg)
        tile_key = k_tile * config.block_k
        keys = pl.ds(tile_key + part.first_key, ROWS)
        consumer = BackwardConsumer(
            config=config,
            smem=smem,
            work_tiles=work_tiles,
            tile_key=tile_key,
            full=operands.full.at[bound_row],
            dq=dq_ref
            if dq_ref is None
            else config.ops.addend(dq_ref, k_tile).at[batch],
            dk=dk_ref.at[batch, keys, head, part.columns],
            dv=dv_ref.at[batch, keys, head, part.columns],
        )
        # Nothing else writes dk and dv: without zeros they would be what was in memory.
        pl.when(is_live)(consumer.accumulate)
        pl.when(~is_live)(consumer.write_zeros)

    def produce() -> None:
        keys = pl.ds(k_tile * config.block_k, config.block_k)
        source = operands._replace(
            k=operands.k.at[batch, keys, head],  # [block_k, d]
            v=operands.v.at[batch, keys, head],  # [block_k, d]
            q=operands.q.at[batch],  # [T, H, d]
            do=operands.do.at[batch],  # [T, H, d]
            lse_delta=operands.lse_delta.at[batch],  # [H, T / block_q, 2, block_q]
            bounds=operands.bounds.at[bound_row],  # [T / block_q, 2, block_q]
        )
        pl.when(is_live)(lambda: _produce(config, smem, source, work_tiles))

    by_role(consume, produce)


def _produce(
    config: KeyConfig, smem: KeySmem, source: KeyOperands, work_tiles: WorkTiles
) -> None:
    """Copies K, V and the work tiles to SMEM, in order of use."""
    count = work_tiles.total()
    plgpu.copy_gmem_to_smem(source.k, smem.k, smem.k_full)

    def copy(n, work):
        i, head = work
        queries = pl.ds(i * config.block_q, config.block_q)
        stage = empty_stage(n, STAGES, smem.q_empty)
        full = smem.q_full.at[stage]
        for x, buffer in (
            (source.q.at[queries, head], smem.q),  # [block_q, d]
            (source.lse_delta.at[head, i], smem.lse_delta),  # [2, block_q]
            (source.bounds.at[i], smem.bounds),  # [2, block_q]
        ):
            plgpu.copy_gmem_to_smem(x, buffer.at[stage], full)

        @pl.when(n == 0)
        def _():
            plgpu.copy_gmem_to_smem(source.v, smem.v, smem.v_full)

        stage = empty_stage(n, STAGES, smem.do_empty)
        do = source.do.at[queries, head]  # [block_q, d]
        plgpu.copy_gmem_to_smem(do, smem.do.at[stage], smem.do_full.at[stage])
        return work_tiles.next(work)

    lax.fori_loop(0, count, copy, work_tiles.first())
    for empty in smem.q_empty, smem.do_empty:
        wait_for_last_arrivals(count, STAGES, empty)


class BackwardConsumer(NamedTuple):
    """A consumer warpgroup and the refs, in GMEM, of its keys.

    tile_key: first key of the key tile.
    """

    config: KeyConfig
    smem: KeySmem
    work_tiles: WorkTiles
    tile_key: jax.Array
    full: jax.Ref  # [S / 64, 2], half-open ranges of query tiles that need no mask
    dq: jax.Ref | None  # [T, H, d]
    dk: jax.Ref  # [64, columns]
    dv: jax.Ref  # [64, columns]

    def accumulate(self) -> None:
        """Computes the gradients; there is one live query tile at least."""
        smem = self.smem
        ops = self.config.ops
        wg = lax.axis_index(WARPGROUP)
        shape = ROWS, self.config.columns

        def with_dk(dk_acc):
            with_dv = functools.partial(self._all_work_tiles, dk_acc)
            ops.run_with_acc(smem.dv, wg, shape, with_dv)

        ops.run_with_acc(smem.dk, wg, shape, with_dk)

    def write_zeros(self) -> None:
        """Writes dk and dv of keys that no query sees."""
        for gradient in self.dk, self.dv:
            zeros = constant(gradient.shape, 0.0, plgpu.Layout.WGMMA)
            gradient[...] = zeros.astype(gradient.dtype)

    def _all_work_tiles(self, dk_acc: jax.Ref, dv_acc: jax.Ref) -> None:
        """Runs the pipeline. dk_acc, dv_acc: [64, columns]."""
        smem, work_tiles = self.smem, self.work_tiles
        plgpu.barrier_wait(smem.k_full)  # TMA: K
        plgpu.barrier_wait(smem.v_full)  # TMA: V
        if self.dq is not None:
            plgpu.barrier_arrive(smem.ds_exchange)  # there is no dS(-1), nor dQ(-2)

        def step(n, work):
            self._work_tile(n, work, dk_acc, dv_acc)
            return work_tiles.next(work)

        end = lax.fori_loop(0, work_tiles.total(), step, work_tiles.first())
        # Each step releases the tile before its own; here, the last one is left.
        plgpu.wgmma_wait(0)  # drains dK of the last work tile
        self._release(work_tiles.total() - 1)
        if self.dq is not None:
            plgpu.barrier_wait(smem.ds_exchange)  # both have stored the last dS
            part = ConsumerPart.of(self.config, lax.axis_index(WARPGROUP))
            self._add_dq(part, work_tiles.total() - 1, work_tiles.previous(end), None)
        dk = dk_acc[...]  # [64, columns]
        if self.config.dk_scale is not None:
            dk *= self.config.dk_scale
        self.dk[...] = dk.astype(self.dk.dtype)
        self.dv[...] = dv_acc[...].astype(self.dv.dtype)  # [64, columns]
        if self.dq is not None:
            plgpu.wait_smem_to_gmem(0)  # the last dQ has been added

    def _work_tile(self, n, work, dk_acc, dv_acc) -> None:
        """Accumulates dK(n) and dV(n), and dQ(n-1)."""
        config, smem = self.config, self.smem
        # Asked for in each step: else ptxas keeps, and spills, all addresses that
        # depend on it.
        part = ConsumerPart.of(config, lax.axis_index(WARPGROUP))
        stage = lax.rem(n, jnp.int32(STAGES))
        plgpu.barrier_wait(smem.q_full.at[stage])  # TMA: Q(n), lse, delta and bounds
        ds = self._score_gradients(n, work.i, part, dv_acc)  # [64, block_q]

        def issue_dk() -> None:
            q = smem.q.at[stage, :, part.columns]  # [block_q, columns]
            config.ops.wgmma(dk_acc, ds, q)  # group: dK += dS Q

        # In flight: dV(n).
        if self.dq is None:
            issue_dk()
            plgpu.wgmma_wait(1)  # drains dV(n); dK(n) stays in flight
        else:
            # Both consumers have stored dS(n-1), and computed dQ(n-2) with the dS(n-2)
            # that is overwritten here.
            plgpu.barrier_wait(smem.ds_exchange)
            smem.ds[lax.rem(n, jnp.int32(2)), part.ds_rows] = ds
            plgpu.commit_smem()  # orders the store before reads by WGMMA
            self._add_dq(part, n - 1, self.work_tiles.previous(work), issue_dk)
        do_stage = lax.rem(n, jnp.int32(STAGES))
        plgpu.barrier_arrive(smem.do_empty.at[do_stage])

    def _release(self, n) -> None:
        """Arrives where others wait for the end of work tile n."""
        stage = lax.rem(n, jnp.int32(STAGES))
        plgpu.barrier_arrive(self.smem.q_empty.at[stage])
        if self.dq is not None:
            plgpu.barrier_arrive(self.smem.ds_exchange)

    def _score_gradients(self, n, i, part, dv_acc) -> jax.Array:
        """Returns dSᵀ [64, block_q] of query tile i, with dV(n) in flight."""
        config, smem = self.config, self.smem
        dtype = smem.q.dtype
        stage = lax.rem(n, jnp.int32(STAGES))
        do_stage = lax.rem(n, jnp.int32(STAGES))
        do = smem.do.at[do_stage]  # [block_q, d]
        acc = plgpu.ACC((ROWS, config.block_q))

        def scores(s_acc, *dp_acc):
            k = smem.k.at[part.keys]  # [64, d]
            # In flight on entry: dK(n-1).
            plgpu.wgmma(s_acc, k, smem.q.at[stage].transpose((1, 0)))  # group: S = K Qᵀ
            plgpu.wgmma_wait(1)  # drains dK(n-1); S(n) stays in flight
            pl.when(n > 0)(lambda: self._release(n - 1))

            plgpu.barrier_wait(smem.do_full.at[do_stage])  # TMA: dO(n)
            # By the order of issue in SASS: if dP's registers are taken before, ptxas
            # drains dK(n-1) before S(n); if here, and there is dQ, it moves registers.
            if dp_acc:
                return gradients(s_acc, *dp_acc)
            return pl.run_scoped(functools.partial(gradients, s_acc), acc)

        def gradients(s_acc, dp_acc):
            v = smem.v.at[part.keys]  # [64, d]
            plgpu.wgmma(dp_acc, v, do.transpose((1, 0)))  # group: dP = V dOᵀ
            # Drains S(n); dP(n) stays in flight.
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)  # [64, block_q]
            p, weight = self._probabilities(s, stage, i, part)  # [64, block_q] each

            # Group: dV += P dO.
            config.ops.wgmma(dv_acc, p.astype(dtype), do.at[:, part.columns])
            # Drains dP(n); dV(n) stays in flight.
            dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)  # [64, block_q]
            delta = load(smem.lse_delta.at[stage, 1], WGMMA_COL)  # [block_q]
            ds = weight * (dp - broadcast_rows(delta, ROWS))
            return ds.astype(dtype)

        return pl.run_scoped(scores, acc, *([] if self.dq is None else [acc]))

    def _probabilities(self, s, stage, i, part) -> tuple[jax.Array, jax.Array]:
        """Returns `probabilities` of query tile i from s = K Qᵀ [64, block_q]."""
        config, smem = self.config, self.smem
        lse = load(smem.lse_delta.at[stage, 0], WGMMA_COL)  # [block_q]

        def masked(x, fill):
            first_key = self.tile_key + part.first_key
            full = self.full.at[lax.div(first_key, jnp.int32(ROWS))]  # [2]

            def of_partial(x):
                bounds = (load(smem.bounds.at[stage, e], WGMMA_COL) for e in range(2))
                return mask(x, first_key, 0, bounds, fill)  # bounds: [block_q] each

            is_full = (full[0] <= i) & (i < full[1])
            return lax.cond(is_full, lambda x: x, of_partial, x)

        return probabilities(config, s, broadcast_rows(lse, ROWS), masked)

    def _add_dq(
        self, part: ConsumerPart, n, work: WorkTile, issue: Callable[[], None] | None
    ) -> None:
        """Adds the partial gradient dQ(n) of a work tile, the previous one, to GMEM.

        n: -1 at the first work tile, which has no previous one.
        issue: issues a WGMMA of this work tile, dK(n+1), to run while dQ(n) is stored.
        """
        config, smem = self.config, self.smem
        queries, columns = part.dq_block

        def store(dq) -> None:
            buffer = smem.dq.at[part.wg]  # [64, 64]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # TMA has read the last dQ
            buffer[...] = dq
            plgpu.commit_smem()  # orders the store before the TMA
            rows = pl.ds(work.i * config.block_q + queries.start, ROWS)
            config.ops.copy_smem_to_gmem_add(
                buffer, self.dq.at[rows, work.head, columns]
            )

        def body(dq_acc):
            # n + 2, as lax.rem of -1 is negative. dS(n) is stored transposed.
            ds = smem.ds.at[lax.rem(n + 2, jnp.int32(2)), :, queries]  # [128, 64]
            # Group: dQ = dS K. Both consumers have stored dS(n): see `ds_exchange`.
            plgpu.wgmma(dq_acc, ds.transpose((1, 0)), smem.k.at[:, columns])
            if issue is not None:
                issue()
            # Drains dQ(n) and dV(n+1); dK(n+1) stays in flight.
            dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=int(issue is not None))
            pl.when(n >= 0)(lambda: store(dq))  # [64, 64]

        pl.run_scoped(body, plgpu.ACC((ROWS, ROWS)))
