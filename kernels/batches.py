"""Packed rows of tokens as a training step reads them, placed on a mesh."""

import math
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .checks import check_shards, checked_axes, checked_ids
from .layouts import Layout, check_length, permute

INT32 = np.iinfo(np.int32)


class Batch(NamedTuple):
    """Arrays (B, T) of a batch: all but `segment_ids` in layout order, sharded.

    targets: of each token the next one of its row. weights: float32, 1 where that is of
      the same document and 0 elsewhere; the loss is `sum(weights * loss)` over a sum.
    positions: in its document. segment_ids: natural order, for `documents`.
    """

    tokens: jax.Array
    targets: jax.Array
    weights: jax.Array
    positions: jax.Array
    segment_ids: jax.Array


def shard_batch(
    tokens: np.ndarray,
    positions: np.ndarray | None,
    segment_ids: np.ndarray | None,
    layout: Layout,
    mesh: Mesh,
    *,
    ring_axes: str | tuple[str, ...] = ("ring",),
    batch_axes: str | tuple[str, ...] | None = None,
    ulysses_axis: str | None = None,
) -> Batch:
    """Shifts targets, puts rows into layout order and shards them, on the host.

    tokens: (B, T) on the host, in natural order; each process has the whole batch.
    positions: (B, T), or None to count in each document from 0.
    segment_ids: (B, T), the document of each token, not decreasing along a row; None
      for rows of one document.
    ring_axes, batch_axes, ulysses_axis: as in `make_ring_attention`.

    Raises:
      ValueError: numbers that int32 does not hold, shapes that differ or cannot be
        sharded, or ids that decrease.
    """
    tokens = _checked_int32("tokens", tokens)
    if segment_ids is None:
        segment_ids = np.zeros(tokens.shape, np.int32)
    ids = _checked_int32("segment_ids", np.asarray(checked_ids(segment_ids)))
    begins = np.ones(ids.shape, bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    index = np.arange(ids.shape[1], dtype=np.int32)
    if positions is None:
        first = np.maximum.accumulate(np.where(begins, index, 0), axis=1)
        positions = index - first
    positions = _checked_int32("positions", positions)
    if tokens.ndim != 2 or not tokens.shape == ids.shape == positions.shape:
        raise ValueError(
            "tokens, positions and segment_ids must all be (B, T), got "
            f"{tokens.shape}, {positions.shape} and {ids.shape}"
        )
    # () for heads, which tokens have none of: None would stand for "tensor".
    axes = checked_axes(mesh, ring_axes, batch_axes, (), ulysses_axis)
    ring_size = math.prod(mesh.shape[axis] for axis in axes.ring)
    slices = 1 if ulysses_axis is None else mesh.shape[ulysses_axis]
    check_length(layout, ring_size, tokens.shape[1], slices)
    check_shards("rows", "B", tokens.shape[0], axes.batch, mesh)
    weights = np.roll(~begins, -1, axis=1).astype(np.float32)  # 0 at the row's end
    # The last token's target is the row's first, with a weight of 0.
    rows = tokens, np.roll(tokens, -1, axis=1), weights, positions
    whole = NamedSharding(mesh, PartitionSpec(axes.batch))
    sharded = NamedSharding(mesh, PartitionSpec(axes.batch, axes.tokens))
    arrays = []
    for natural in rows:
        in_order = np.asarray(permute(natural, layout, ring_size))
        arrays.append(_sharded(in_order, sharded))
    return Batch._make([*arrays, _sharded(ids, whole)])


def _checked_int32(name: str, values: np.ndarray) -> np.ndarray:
    """Returns whole numbers, which JAX would cut to 32 bits in silence."""
    values = np.asarray(values)
    if not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"{name} must be whole numbers, got {values.dtype}")
    if values.size and not INT32.min <= values.min() <= values.max() <= INT32.max:
        raise ValueError(
            f"{name} must be from {INT32.min} to {INT32.max} (int32), got "
            f"{values.min()} to {values.max()}"
        )
    return values


def _sharded(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])
