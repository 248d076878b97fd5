"""What the Hopper kernels of `forward` and `backward_dq` share.

A program owns one query tile [128, d] of one head, and loops over its live key tiles.
Its two consumers own 64 queries each.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .shared import BLOCK_Q, CONSUMERS, ROWS, NativeOps, empty_stage, tiled_smem


class QueryConfig(NamedTuple):
    """Sizes and constants of a program.

    block_k: keys of a tile. k_stages, v_stages: tiles of K (2 at least) and V in SMEM.
    scale: factor on scores, for exponents of 2; positive in the forward kernel.
    tanh_scale: scores are 1 + tanh(tanh_scale Q Kᵀ), or Q Kᵀ if it is None.
    ops: of the GPU, or emulated.
    dq_scale: factor on dq where that is a result, in the operands' type; None where it
      is a sum in float32.
    """

    block_k: int
    k_stages: int
    v_stages: int
    scale: float
    tanh_scale: float | None
    ops: NativeOps
    dq_scale: float | None = None


class QueryOperands(NamedTuple):
    """Arrays that a kernel reads, in GMEM. T and S are whole tiles.

    k_start, k_end: int32 (M, T), visible keys of each query; M is B or 1.
    lse_delta: of the backward, float32 (B, H, T) each: lse for exponents of 2, delta.
    q: (B, T, H, D). do: the same, of the backward. k, v: (B, S, K, D).
    carry: of the forward, out (B, T, H, D) and natural-log lse (B, H, T) over other
      keys, if any.
    """

    k_start: jax.Array
    k_end: jax.Array
    lse_delta: tuple[jax.Array, ...]
    q: jax.Array
    do: jax.Array | tuple[()]
    k: jax.Array
    v: jax.Array
    carry: tuple[jax.Array, ...]

    @property
    def grid(self) -> dict[str, int]:
        """The last axis is the fastest: heads share keys, and long rows come first."""
        batch, length, heads, _ = self.q.shape
        return {"tile": length // BLOCK_Q, "batch": batch, "head": heads}


class QuerySmem(NamedTuple):
    """Shared memory and barriers of a program, the latter as in the kernels' tables."""

    q: jax.Ref  # [2, 64, d]
    do: jax.Ref | None  # [2, 64, d], of the backward
    k: jax.Ref  # [k_stages, block_k, d]
    v: jax.Ref  # [v_stages, block_k, d]
    acc: jax.Ref | None  # [2, 64, d] float32 where emulated
    q_full: jax.Ref  # [2]
    do_full: jax.Ref | None  # [2], of the backward
    k_full: jax.Ref  # [k_stages]
    v_full: jax.Ref  # [v_stages]
    k_empty: jax.Ref  # [k_stages]
    v_empty: jax.Ref  # [v_stages]
    schedule: jax.Ref | None  # [2], of the forward

    @classmethod
    def types(
        cls, config: QueryConfig, d: int, dtype: jnp.dtype, is_backward: bool
    ) -> "QuerySmem":
        queries = tiled_smem((CONSUMERS, ROWS, d), dtype)
        # Each consumer begins as soon as its own 64 rows are there.
        of_consumer = plgpu.Barrier(num_barriers=CONSUMERS)
        # Both arrive before a stage is refilled: each reads all of K and V.
        by_consumers = functools.partial(plgpu.Barrier, num_arrivals=CONSUMERS)
        return cls(
            q=queries,
            do=queries if is_backward else None,
            k=tiled_smem((config.k_stages, config.block_k, d), dtype),
            v=tiled_smem((config.v_stages, config.block_k, d), dtype),
            acc=config.ops.acc_smem(ROWS, d),
            q_full=of_consumer,
            do_full=of_consumer if is_backward else None,
            k_full=plgpu.Barrier(num_barriers=config.k_stages),
            v_full=plgpu.Barrier(num_barriers=config.v_stages),
            k_empty=by_consumers(num_barriers=config.k_stages),
            v_empty=by_consumers(num_barriers=config.v_stages),
            schedule=None if is_backward else of_consumer,
        )


class Program(NamedTuple):
    """A query tile of a head, and its live key tiles [begin, end)."""

    batch: jax.Array
    head: jax.Array
    q_tile: jax.Array
    bound_row: jax.Array | int
    begin: jax.Array
    end: jax.Array

    @classmethod
    def of(cls, operands: QueryOperands, block_k: int) -> "Program":
        """Returns that of this thread block. block_k: keys of a tile."""
        batch = lax.axis_index("batch")
        head = lax.axis_index("head")
        # Under a causal mask the last tiles have most live keys: they come first.
        q_tile = operands.q.shape[1] // BLOCK_Q - 1 - lax.axis_index("tile")
        # A batch that shares its bounds has one row of them.
        bound_row = batch if operands.k_start.shape[0] > 1 else 0
        # Bounds do not decrease: the first row's first key is that of all rows.
        first_row = q_tile * BLOCK_Q
        first_key = operands.k_start[bound_row, first_row]
        end_key = operands.k_end[bound_row, first_row + BLOCK_Q - 1]
        begin = lax.div(first_key, jnp.int32(block_k))
        end = lax.div(end_key + block_k - 1, jnp.int32(block_k))
        return cls(batch, head, q_tile, bound_row, begin, jnp.maximum(begin, end))

    def queries(self, operands: QueryOperands, wg: jax.Array) -> "Queries":
        """Returns those of a consumer."""
        rows = pl.ds((self.q_tile * CONSUMERS + wg) * ROWS, ROWS)
        return Queries(
            rows=rows,
            k_start=operands.k_start.at[self.bound_row, rows],
            k_end=operands.k_end.at[self.bound_row, rows],
        )

    def source(self, operands: QueryOperands) -> QueryOperands:
        """Returns what the producer copies: Q and dO [128, d], K and V [S, d]."""
        group = operands.q.shape[2] // operands.k.shape[2]
        # Programs of a group follow each other, and find its keys in the L2 cache.
        kv_head = lax.div(self.head, jnp.int32(group))
        queries = self.batch, pl.ds(self.q_tile * BLOCK_Q, BLOCK_Q), self.head
        return operands._replace(
            q=operands.q.at[queries],
            do=operands.do.at[queries] if operands.lse_delta else (),
            k=operands.k.at[self.batch, :, kv_head],
            v=operands.v.at[self.batch, :, kv_head],
        )

    def key_copies(
        self, source: QueryOperands, smem: QuerySmem
    ) -> tuple["KeyCopies", "KeyCopies"]:
        """Returns those of K and of V. source: what `source` returns."""
        k = KeyCopies(self.begin, source.k, smem.k, smem.k_full, smem.k_empty)
        v = KeyCopies(self.begin, source.v, smem.v, smem.v_full, smem.v_empty)
        return k, v

    @staticmethod
    def copy_queries(source: jax.Ref, buffer: jax.Ref, full: jax.Ref) -> None:
        """Copies Q or dO [128, d] for both consumers."""
        for wg in range(CONSUMERS):
            rows = source.at[pl.ds(wg * ROWS, ROWS)]  # [64, d]
            plgpu.copy_gmem_to_smem(rows, buffer.at[wg], full.at[wg])


class KeyCopies(NamedTuple):
    """Copies of key tiles n = 0, 1, ... of K or V to their stages in SMEM.

    begin: number of tile 0 among the tiles of the source.
    """

    begin: jax.Array
    source: jax.Ref  # [S, d]
    buffer: jax.Ref  # [stages, block_k, d]
    full: jax.Ref  # [stages]
    empty: jax.Ref  # [stages]

    def start(self, n: Any) -> None:
        """Starts to copy tile n, once its stage is empty."""
        stages, block_k, _ = self.buffer.shape
        stage = empty_stage(n, stages, self.empty)
        keys = pl.ds((self.begin + n) * block_k, block_k)
        plgpu.copy_gmem_to_smem(
            self.source.at[keys], self.buffer.at[stage], self.full.at[stage]
        )


class Queries(NamedTuple):
    """64 queries of a consumer. rows: of the sequence."""

    rows: pl.Slice
    k_start: jax.Ref  # [64]
    k_end: jax.Ref  # [64]

    def full_tiles(self, block_k: int) -> tuple[jax.Array, jax.Array]:
        """Returns the half-open range of key tiles that need no mask."""
        begin = lax.div(self.k_start[ROWS - 1] + block_k - 1, jnp.int32(block_k))
        return begin, lax.div(self.k_end[0], jnp.int32(block_k))
