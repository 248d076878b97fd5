"""From the blocks that a host has loaded to the arrays of the whole mesh."""

from collections.abc import Mapping

import jax
from jax.sharding import NamedSharding

from data.batch import Batch, Block


def host_blocks(sharding: NamedSharding, shape: tuple[int, int]) -> tuple[Block, ...]:
    """What this host's devices hold of an array (B, T): each block once."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    return tuple(dict.fromkeys(_block(index, shape) for index in indices))


def place(
    blocks: Mapping[Block, Batch], sharding: NamedSharding, shape: tuple[int, int]
) -> Batch:
    """The global batch, its arrays (B, T), from this host's blocks of it."""

    def array(field: int) -> jax.Array:
        return jax.make_array_from_callback(
            shape, sharding, lambda index: blocks[_block(index, shape)][field]
        )

    return Batch(*map(array, range(len(Batch._fields))))


def _block(index: tuple[slice, ...], shape: tuple[int, int]) -> Block:
    rows, columns = (
        part.indices(size)[:2] for part, size in zip(index, shape, strict=True)
    )
    return Block(rows, columns)
