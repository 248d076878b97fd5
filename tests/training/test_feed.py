"""From blocks to global arrays, on meshes that cut and that repeat them."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from data.batch import Batch, Block
from training.feed import host_blocks, place
from training.mesh import MeshShape, Partition, make_mesh

SHAPE = (4, 24)

MESHES = {
    "ring 8": (MeshShape(ring=8), 8),
    "data 2 x fsdp 2 x ring 2": (MeshShape(data=2, fsdp=2, ring=2), 8),
    "fsdp 2 x ring 2 x tensor 2": (MeshShape(fsdp=2, ring=2, tensor=2), 4),
    "tensor 8": (MeshShape(tensor=8), 1),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_placed_blocks_are_the_global_batch(mesh):
    sharding, batch = sharding_of(mesh), global_batch()
    blocks = host_blocks(sharding, SHAPE)
    assert len(blocks) == len(set(blocks)) == MESHES[mesh][1]
    placed = place(cut(batch, sharding), sharding, SHAPE)
    assert isinstance(placed, Batch)
    for name, got, want in zip(Batch._fields, placed, batch, strict=True):
        assert got.sharding == sharding and got.dtype == want.dtype
        np.testing.assert_array_equal(got, want, err_msg=name)
        for shard in got.addressable_shards:
            np.testing.assert_array_equal(shard.data, want[shard.index])


def sharding_of(mesh: str) -> jax.sharding.NamedSharding:
    partition = Partition(make_mesh(MESHES[mesh][0], jax.devices()))
    return partition.sharding(("batch", "sequence"), SHAPE)


def global_batch() -> Batch:
    """Every number is there once."""
    size = SHAPE[0] * SHAPE[1]
    fields = [np.arange(n * size, (n + 1) * size).reshape(SHAPE) for n in range(6)]
    batch = Batch(*(field.astype(np.int32) for field in fields))
    return batch._replace(loss_weights=batch.loss_weights.astype(np.float32))


def cut(batch: NamedTuple, sharding: jax.sharding.NamedSharding) -> dict[Block, Any]:
    """What lies in each block of a batch."""
    return {
        b: type(batch)(*(x[slice(*b.rows), slice(*b.columns)] for x in batch))
        for b in host_blocks(sharding, SHAPE)
    }


def test_only_the_blocks_of_this_host_are_asked_for():
    """Of two hosts, this one has the devices of the second half of the ring."""
    ring = sharding_of("fsdp 2 x ring 2 x tensor 2")
    here = set(ring.mesh.devices[:, :, 1].flat)
    indices = ring.devices_indices_map(SHAPE)
    host = SimpleNamespace(
        addressable_devices_indices_map=lambda shape: {d: indices[d] for d in here}
    )
    half = {Block((0, 2), (12, 24)), Block((2, 4), (12, 24))}
    assert set(host_blocks(host, SHAPE)) == half
    # One that is missing is an error, and no array of something else.
    blocks = cut(global_batch(), ring)
    blocks.popitem()
    with pytest.raises(KeyError, match="Block"):
        place(blocks, ring, SHAPE)
