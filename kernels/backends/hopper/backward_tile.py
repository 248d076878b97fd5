"""Sizes, operands, shared memory and work tiles of the Hopper backward kernel.

See `backward`, which holds the kernel.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .shared import CONSUMERS, ROWS, NativeOps, tiled_smem

MAX_COLUMNS = 128
"""Columns of dk and dv that a consumer has registers for."""

STAGES = 2
"""Tiles of Q, and of dO, in SMEM."""


class KeyConfig(NamedTuple):
    """Sizes and constants of a program.

    d: head size. Up to MAX_COLUMNS a consumer has half of the keys of a tile. Above, it
      has half of the columns, and both compute all of P; then there is no dq.
    block_q: queries of a tile. With dq, block_q · d is twice 64 · 64.
    scale: factor on scores, for exponents of 2.
    tanh_scale: scores are 1 + tanh(tanh_scale K Qᵀ), or K Qᵀ if it is None.
    ops: of the GPU, or emulated.
    dk_scale: factor on dk where dk and dv are results, in the operands' type; None
      where they are sums in float32.
    """

    d: int
    block_q: int
    scale: float
    tanh_scale: float | None
    ops: NativeOps
    dk_scale: float | None = None

    @property
    def splits_keys(self) -> bool:
        """Whether consumers split the keys, rather than the columns of dk and dv."""
        return self.d <= MAX_COLUMNS

    @property
    def block_k(self) -> int:
        """Keys of a tile."""
        return CONSUMERS * ROWS if self.splits_keys else ROWS

    @property
    def columns(self) -> int:
        """Columns of dk and dv that a consumer has."""
        return self.d if self.splits_keys else self.d // CONSUMERS


class KeyOperands(NamedTuple):
    """Arrays that the kernel reads, in GMEM. T and S are whole tiles.

    live: int32 (M, S / block_k, 2), half-open range of query tiles that are not empty.
    full: int32 (M, S / 64, 2), those that need no mask; M is B or 1.
    k, v: (B, S, K, D). q, do: (B, T, H, D).
    lse_delta: float32 (B, H, T / block_q, 2, block_q): lse for exponents of 2, and
      delta.
    bounds: int32 (M, T / block_q, 2, block_q): k_start and k_end.
    """

    live: jax.Array
    full: jax.Array
    k: jax.Array
    v: jax.Array
    q: jax.Array
    do: jax.Array
    lse_delta: jax.Array
    bounds: jax.Array


class KeySmem(NamedTuple):
    """Shared memory and barriers of a program, the latter as in `backward`'s table."""

    k: jax.Ref  # [block_k, d]
    v: jax.Ref  # [block_k, d]
    q: jax.Ref  # [stages, block_q, d]
    do: jax.Ref  # [stages, block_q, d]
    lse_delta: jax.Ref  # [stages, 2, block_q] float32
    bounds: jax.Ref  # [stages, 2, block_q] int32
    ds: jax.Ref | None  # [2, 128, block_q], with dq alone: dSᵀ of two work tiles
    dq: jax.Ref | None  # [2, 64, 64] float32, with dq alone: partial dQ
    dk: jax.Ref | None  # [2, 64, columns] float32 where emulated
    dv: jax.Ref | None  # [2, 64, columns] float32 where emulated
    k_full: jax.Ref
    v_full: jax.Ref
    q_full: jax.Ref  # [stages]: Q, lse_delta and bounds
    do_full: jax.Ref  # [stages]
    q_empty: jax.Ref  # [stages]
    do_empty: jax.Ref  # [stages]
    ds_exchange: jax.Ref

    @classmethod
    def types(cls, config: KeyConfig, dtype: jnp.dtype, has_dq: bool) -> "KeySmem":
        kv = tiled_smem((config.block_k, config.d), dtype)
        row = STAGES, 2, config.block_q
        ds = tiled_smem((2, CONSUMERS * ROWS, config.block_q), dtype)
        dq = tiled_smem((CONSUMERS, ROWS, ROWS), jnp.float32)
        acc = config.ops.acc_smem(ROWS, config.columns)
        # Both arrive before a stage is refilled: each reads all of Q and dO.
        by_consumers = functools.partial(plgpu.Barrier, num_arrivals=CONSUMERS)
        return cls(
            k=kv,
            v=kv,
            q=tiled_smem((STAGES, config.block_q, config.d), dtype),
            do=tiled_smem((STAGES, config.block_q, config.d), dtype),
            lse_delta=plgpu.SMEM(row, jnp.float32),
            bounds=plgpu.SMEM(row, jnp.int32),
            ds=ds if has_dq else None,
            dq=dq if has_dq else None,
            dk=acc,
            dv=acc,
            k_full=plgpu.Barrier(),
            v_full=plgpu.Barrier(),
            # Of TMA's three copies: Q, lse and delta, bounds.
            q_full=plgpu.Barrier(num_arrivals=3, num_barriers=STAGES),
            do_full=plgpu.Barrier(num_barriers=STAGES),
            q_empty=by_consumers(num_barriers=STAGES),
            do_empty=by_consumers(num_barriers=STAGES),
            # Both: for its part of dQ each reads the other's dS too.
            ds_exchange=by_consumers(),
        )


class WorkTile(NamedTuple):
    """Query tile i of a query head, against the program's key tile."""

    i: jax.Array
    head: jax.Array


class WorkTiles(NamedTuple):
    """Live query tiles [begin, end) of `group` query heads, head by head.

    head: the first one.
    """

    begin: jax.Array
    end: jax.Array
    head: jax.Array
    group: int

    def total(self) -> jax.Array:
        return (self.end - self.begin) * self.group

    def first(self) -> WorkTile:
        return WorkTile(self.begin, self.head)

    def next(self, work: WorkTile) -> WorkTile:
        is_last = work.i + 1 == self.end
        i = jnp.where(is_last, self.begin, work.i + 1)
        return WorkTile(i, jnp.where(is_last, work.head + 1, work.head))

    def previous(self, work: WorkTile) -> WorkTile:
        """Returns the one before; of the first, one that does not exist."""
        is_first = work.i == self.begin
        i = jnp.where(is_first, self.end - 1, work.i - 1)
        return WorkTile(i, jnp.where(is_first, work.head - 1, work.head))


class ConsumerPart(NamedTuple):
    """A consumer's part of a key tile.

    first_key: of its keys. columns: its columns of dk and dv.
    """

    config: KeyConfig
    wg: jax.Array
    first_key: jax.Array
    columns: pl.Slice

    @classmethod
    def of(cls, config: KeyConfig, wg: jax.Array) -> "ConsumerPart":
        if config.splits_keys:
            return cls(config, wg, wg * ROWS, pl.ds(0, config.columns))
        # That is 0, which ptxas does not know: else it keeps all addresses of keys.
        first_key = lax.div(wg, jnp.int32(CONSUMERS)) * ROWS
        return cls(config, wg, first_key, pl.ds(wg * config.columns, config.columns))

    @property
    def keys(self) -> pl.Slice:
        return pl.ds(self.first_key, ROWS)

    @property
    def ds_rows(self) -> pl.Slice:
        """Rows of dSᵀ [128, block_q] that it writes."""
        return pl.ds(self.wg * ROWS, ROWS)

    @property
    def dq_block(self) -> tuple[pl.Slice, pl.Slice]:
        """Rows and columns of dQ [block_q, d] that it computes, 64 each."""
        mine = pl.ds(self.wg * ROWS, ROWS)
        first = pl.ds(0, ROWS)
        return (mine, first) if self.config.block_q > ROWS else (first, mine)
