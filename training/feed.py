"""From the blocks that a host has loaded to the arrays of the whole mesh."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding

from data.batch import Block


def host_blocks(sharding: NamedSharding, shape: tuple[int, int]) -> tuple[Block, ...]:
    """Returns the blocks of an array [B, T] on this host's devices, each once."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    return tuple(dict.fromkeys(_block(index, shape) for index in indices))


def place[Arrays: NamedTuple](
    blocks: Mapping[Block, Arrays], sharding: NamedSharding, shape: tuple[int, int]
) -> Arrays:
    """Builds the global batch from this host's blocks of it.

    blocks: a `Batch`, or another NamedTuple of arrays (rows, columns, …).
    sharding: of arrays (B, T); further axes are whole on every device.
    shape: (B, T).
    """
    some = next(iter(blocks.values()))

    def array(field: int) -> jax.Array:
        return jax.make_array_from_callback(
            (*shape, *some[field].shape[2:]),
            sharding,
            lambda index: blocks[_block(index[:2], shape)][field],
        )

    return type(some)(*map(array, range(len(some))))


def _block(index: tuple[slice, ...], shape: tuple[int, int]) -> Block:
    rows, columns = (
        part.indices(size)[:2] for part, size in zip(index, shape, strict=True)
    )
    return Block(rows, columns)
