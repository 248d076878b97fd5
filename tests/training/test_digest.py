"""Digests, the same on every mesh, and batches from blocks to global arrays."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from data.batch import Batch, Block
from training.digest import Digest, device_digest, digest, digests, not_finite
from training.feed import host_blocks, place
from training.mesh import MeshShape, Partition, make_mesh

TYPES = ["float32", "bfloat16", "float16", "int32", "uint8", "bool"]
LAYOUTS = [(8, PartitionSpec("x", "y")), (4, PartitionSpec("y")), (2, PartitionSpec())]


def draw(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return rng.normal(size=shape, scale=50).astype(jnp.dtype(dtype))


def placed(array: np.ndarray, count: int, spec: PartitionSpec) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()[:count]).reshape(-1, 2), ("x", "y"))
    return jax.device_put(array, NamedSharding(mesh, spec))


one_digest = jax.jit(digest)


@pytest.mark.parametrize("dtype", TYPES)
def test_digest_is_the_same_on_every_mesh(dtype, rng):
    array = draw(rng, dtype, (8, 16))
    found = {int(one_digest(placed(array, *layout))) for layout in LAYOUTS}
    assert found == {int(one_digest(array))}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_every_flipped_bit_changes_the_digest(dtype, rng):
    array = draw(rng, dtype, (3, 5))
    word = np.dtype(f"uint{8 * array.dtype.itemsize}")
    seen = {int(one_digest(array))}
    bits = array.view(word).ravel()
    for spot in range(bits.size):
        for bit in range(8 * word.itemsize):
            changed = bits.copy()
            changed[spot] ^= word.type(1 << bit)
            seen.add(int(one_digest(changed.view(array.dtype).reshape(3, 5))))
    assert len(seen) == 1 + bits.size * 8 * word.itemsize


def test_reordered_elements_change_the_digest(rng):
    array = draw(rng, "float32", (8, 4))
    # Signs differ by the highest bit, which even weights would lose.
    array[5, 2] = -array[0, 1]
    swapped = array.copy()
    swapped[0, 1], swapped[5, 2] = array[5, 2], array[0, 1]
    others = [
        *(array, swapped, array[::-1], np.roll(array, 1)),
        np.ascontiguousarray(array.T).reshape(array.shape),
        np.where(np.arange(8)[:, None] == 3, 0, array),  # a row lost
        array[[0, 1, 1, 3, 4, 5, 6, 7]],  # a row twice
    ]
    assert len({int(one_digest(other)) for other in others}) == len(others)
    words = np.array([0, 1 << 31, 0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    assert len({int(one_digest(words[i : i + 1])) for i in range(4)}) == 4


def test_digests_are_named_by_the_leaves_of_the_tree(rng):
    tree: Any = {"a": draw(rng, "float32", (4,)), "b": [jnp.int32(3), jnp.ones((0, 2))]}
    found = digests(tree)
    assert list(found) == ["a", "b.0", "b.1"]
    assert found["a"].bits == int(one_digest(tree["a"]))
    assert found["b.1"] == Digest(0, 0, 0)
    # And that of a tree follows each leaf and their order.
    a, b = draw(rng, "float32", (4,)), draw(rng, "float32", (4,))
    found = {int(device_digest(x)) for x in ([a, b], [b, a], [a, a], [a, -b])}
    assert len(found) == 4


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e5m2"])
def test_what_is_not_finite_is_counted_where_it_lies(dtype, rng):
    array = draw(rng, dtype, (8, 16))
    assert not_finite(digests({"a": placed(array, 8, PartitionSpec("x", "y"))})) == ""
    array[7, 15], array[0, 0], array[3, 3] = np.nan, np.inf, -np.inf
    for layout in LAYOUTS:
        found = digests({"fine": jnp.ones(3), "a": placed(array, *layout)})
        assert found["a"][1:] == (1, 2)
        assert not_finite(found) == "a holds 1 nan and 2 inf"
    found = digests({"a": np.float32([1, np.inf]), "b": np.float32([np.nan])})
    assert not_finite(found) == "a holds 1 inf (and 1 more arrays are not finite)"


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
