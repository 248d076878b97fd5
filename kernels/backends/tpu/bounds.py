"""Visible keys [k_start, k_end) of the TPU kernels: live granules and masks."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ...masks import in_interval
from .orientation import Orientation, strips
from .vector import whole


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
        begin = whole(jnp.clip(k_start - first_key, 0, keys), granule)
        end = whole(jnp.clip(k_end - first_key, 0, keys) + granule - 1, granule)
        return begin, end - begin


class RowBounds(NamedTuple):
    """Keys that each row of a query tile attends to: int32, numbers of rows."""

    k_start: jax.Ref
    k_end: jax.Ref

    def load(self, packed_ref: jax.Ref, orientation: Orientation) -> None:
        """Fills both from `Orientation.packed` numbers in [0, 2**29]: [2, ...]."""
        for number, bound_ref in enumerate(self):
            for strip, rows in strips(bound_ref.shape[orientation.axis]):
                row = packed_ref.at[number][orientation.strip(strip)]  # [1, 128]
                orientation.at(bound_ref, rows)[...] = orientation.unpack(row)

    def mask(
        self,
        rows: pl.Slice,
        first_key: jax.Array,
        s: jax.Array,
        orientation: Orientation,
    ) -> jax.Array:
        """Returns scores of keys from `first_key` on, -inf if masked."""
        axis = orientation.keys_axis
        key = lax.broadcasted_iota(jnp.int32, s.shape, axis) + first_key
        k_start, k_end = (
            orientation.widen(orientation.at(bound, rows)[...], s.shape[axis])
            for bound in self
        )
        return jnp.where(in_interval(k_start, key, k_end), s, -jnp.inf)
