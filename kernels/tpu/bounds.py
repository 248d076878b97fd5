"""Visible keys [k_start, k_end) of the TPU kernels: live granules and masks."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ..masks import in_interval
from .vector import LANES, broadcast_lanes, float_bits_to_int, row_to_column


class SubBlockBounds(NamedTuple):
    """Keys that each sub-block of a query tile attends to, in SMEM.

    min_k_start, max_k_end: int32 of all sub-blocks of a problem, in one dimension: SMEM
      pads the last one to 128 numbers.
    offset: the number of the query tile's first sub-block.
    """

    min_k_start: jax.Ref
    max_k_end: jax.Ref
    offset: jax.Array

    def live_granules(
        self, block: jax.Array, first_key: jax.Array, keys: int, granule: int
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (first, number) of the granules that some row of a block attends to.

        Of the keys from `first_key` on, of which `granule` make one granule.
        """
        k_start = self.min_k_start[self.offset + block]
        k_end = self.max_k_end[self.offset + block]
        begin = jnp.clip(k_start - first_key, 0, keys) // granule
        end = pl.cdiv(jnp.clip(k_end - first_key, 0, keys), granule)
        return begin, end - begin


class RowBounds(NamedTuple):
    """Keys that each row of a query tile attends to: int32 [R, 128], equal lanes."""

    k_start: jax.Ref
    k_end: jax.Ref

    def load(self, packed_ref: jax.Ref) -> None:
        """Fills both from `int_to_float_bits`, [2, R / 128, 128]."""
        for number, bound_ref in enumerate((self.k_start, self.k_end)):
            for strip in range(packed_ref.shape[1]):
                row = packed_ref[number, pl.ds(strip, 1), :]  # [1, 128]
                column = row_to_column(row)  # [128, 128], equal lanes
                bound_ref[pl.ds(strip * LANES, LANES), :] = float_bits_to_int(column)

    def mask(self, rows: pl.Slice, first_key: jax.Array, s: jax.Array) -> jax.Array:
        """Returns scores [rows, keys], of keys from `first_key` on, -inf if masked."""
        key = lax.broadcasted_iota(jnp.int32, s.shape, 1) + first_key  # [rows, keys]
        k_start = broadcast_lanes(self.k_start[rows, :], s.shape[1])  # [rows, keys]
        k_end = broadcast_lanes(self.k_end[rows, :], s.shape[1])  # [rows, keys]
        return jnp.where(in_interval(k_start, key, k_end), s, -jnp.inf)
