"""From the blocks that a host has loaded to the arrays of the whole mesh."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from data.batch import Block


def host_blocks(sharding: NamedSharding, shape: tuple[int, int]) -> tuple[Block, ...]:
    """Returns the blocks of an array [B, T] on this host's devices, each once."""
    # Devices along tensor hold copies, which are read once.
    indices = sharding.addressable_devices_indices_map(shape).values()
    return tuple(dict.fromkeys(_block(index, shape) for index in indices))


def global_batch[Arrays: NamedTuple](
    blocks: Mapping[Block, Arrays], sharding: NamedSharding, shape: tuple[int, int]
) -> Arrays:
    """Builds the global batch from this host's blocks of it.

    blocks: a `Batch`, or another NamedTuple of arrays (rows, columns, …).
    sharding: of arrays (B, T); further axes are whole on every device.
    shape: (B, T).
    """
    first = next(iter(blocks.values()))
    arrays = []
    for field, of_block in enumerate(first):
        # JAX asks for the shards of this host's devices alone, which `blocks` has.
        arrays.append(
            jax.make_array_from_callback(
                (*shape, *of_block.shape[2:]),
                sharding,
                functools.partial(_shard, blocks, shape, field),
            )
        )
    return type(first)(*arrays)


def _shard(
    blocks: Mapping[Block, Any],
    shape: tuple[int, int],
    field: int,
    index: tuple[slice, ...] | None,
) -> np.ndarray:
    """Returns a device's part of an array of the batch, by its slices."""
    return blocks[_block(index, shape)][field]


def _block(index: tuple[slice, ...] | None, shape: tuple[int, int]) -> Block:
    """Returns the block that these slices of rows and columns are."""
    if index is None:  # JAX's type allows it for devices of other hosts
        raise ValueError("a device of this host must hold a part of the batch")
    first_row, end_row, _ = index[0].indices(shape[0])
    first_column, end_column, _ = index[1].indices(shape[1])
    return Block((first_row, end_row), (first_column, end_column))
