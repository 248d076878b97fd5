"""Layouts against lists of tokens, and the arithmetic of intervals on shards."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels import layouts as layout
from kernels.layouts import Contiguous, Mirror, Striped, Zigzag
from tests.cases import table

LAYOUTS = [Contiguous(), Striped(), Striped(3), Striped(4), Zigzag(), Mirror()]
RING_SIZES = [1, 2, 3, 4, 5, 8]

each_ring = pytest.mark.parametrize("ring_size", RING_SIZES)
each_layout = pytest.mark.parametrize("kind", LAYOUTS, ids=str)


def shard_length(kind, ring_size: int) -> int:
    """Three of the smallest shards."""
    return 3 * kind.divisor(ring_size) // ring_size


def shards(kind, ring_size: int) -> list[np.ndarray]:
    length = shard_length(kind, ring_size)
    return [kind.index(shard, ring_size, length) for shard in range(ring_size)]


@pytest.mark.parametrize(
    "kind, shard, tokens",
    [
        (Contiguous(), 1, [4, 5, 6, 7]),
        (Striped(), 1, [1, 4, 7, 10]),
        (Striped(2), 1, [2, 3, 8, 9]),
        (Zigzag(), 0, [0, 1, 10, 11]),
        (Zigzag(), 2, [4, 5, 6, 7]),
        (Mirror(), 1, [4, 5, 6, 7]),
        (Mirror(), 2, [2, 3, 8, 9]),
    ],
)
def test_shard_of_three_holds_the_tokens_of_its_definition(kind, shard, tokens):
    assert kind.index(shard, 3, 4).tolist() == tokens


@each_layout
@each_ring
def test_shards_are_increasing_and_hold_every_token_once(kind, ring_size):
    tokens = shards(kind, ring_size)
    assert all(shard.dtype == np.int32 for shard in tokens)
    assert all((np.diff(shard) > 0).all() for shard in tokens)
    assert len({shard.size for shard in tokens}) == 1
    together = np.concatenate(tokens)
    np.testing.assert_array_equal(np.sort(together), np.arange(together.size))
    order = layout.order(kind, ring_size, together.size)
    np.testing.assert_array_equal(order, together)
    assert order.dtype == np.int32
    for part in [(0, 0), (0, 1), (1, order.size), (order.size // 2, order.size)]:
        found = layout.order(kind, ring_size, order.size, part)
        np.testing.assert_array_equal(found, order[slice(*part)])


@each_layout
@each_ring
def test_count_is_the_number_of_tokens_below_any_bound(kind, ring_size):
    length = shard_length(kind, ring_size)
    total = ring_size * length
    bound = np.arange(-2 * total - 3, 3 * total + 4, dtype=np.int32)
    for shard, tokens in enumerate(shards(kind, ring_size)):
        got = kind.count(shard, bound, ring_size, length)
        want = (tokens < bound[:, None]).sum(axis=1)
        np.testing.assert_array_equal(got, want)
        assert got.dtype == np.int32
        square = kind.count(shard, bound[:6].reshape(2, 3), ring_size, length)
        np.testing.assert_array_equal(square, want[:6].reshape(2, 3))


@each_layout
@each_ring
def test_traced_shard_gives_what_a_known_one_gives(kind, ring_size):
    length = shard_length(kind, ring_size)
    bound = np.arange(-5, ring_size * length + 5, dtype=np.int32)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None))
    def of_shard(shard, bound):
        args = ring_size, length
        return kind.index(shard, *args), kind.count(shard, bound, *args)

    index, count = of_shard(jnp.arange(ring_size, dtype=jnp.int32), jnp.asarray(bound))
    assert index.dtype == count.dtype == jnp.int32
    np.testing.assert_array_equal(index, np.stack(shards(kind, ring_size)))
    want = [kind.count(shard, bound, ring_size, length) for shard in range(ring_size)]
    np.testing.assert_array_equal(count, np.stack(want))


@each_layout
@pytest.mark.parametrize("ring_size", [1, 4, 5])
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_permuted_slices_are_the_shards_and_unpermute_undoes_it(
    kind, ring_size, axis, array, rng
):
    length = ring_size * shard_length(kind, ring_size)
    shape = [2, 3, 2]
    shape[axis] = length
    x = array(rng.standard_normal(shape).astype(np.float32))
    permuted = layout.permute(x, kind, ring_size, axis)
    assert type(permuted) is type(x) and permuted.dtype == x.dtype
    slices = np.split(np.asarray(permuted), ring_size, axis)
    for got, tokens in zip(slices, shards(kind, ring_size), strict=True):
        np.testing.assert_array_equal(got, np.take(np.asarray(x), tokens, axis))
    back = layout.unpermute(permuted, kind, ring_size, axis)
    assert type(back) is type(x)
    np.testing.assert_array_equal(back, x)


def test_sequences_are_along_the_second_axis_by_default():
    x = jnp.arange(24).reshape(2, 12)
    permuted = jax.jit(lambda x: layout.permute(x, Striped(), 3))(x)
    assert permuted[0].tolist() == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]
    np.testing.assert_array_equal(layout.unpermute(permuted, Striped(), 3), x)


def test_axes_count_from_the_last_on_explicit_meshes_too():
    mesh = jax.make_mesh((2,), ("ring",), devices=jax.devices()[:2])
    lse = np.arange(48).reshape(2, 3, 8)  # (B, H, T)
    placed = jax.device_put(lse, NamedSharding(mesh, P(None, None, "ring")))
    for x in lse, placed:
        permuted = layout.permute(x, Striped(), 2, axis=-1)
        np.testing.assert_array_equal(permuted, layout.permute(lse, Striped(), 2, 2))
        np.testing.assert_array_equal(layout.unpermute(permuted, Striped(), 2, -1), x)


@each_layout
@each_ring
def test_padded_length_is_the_smallest_that_the_layout_can_shard(kind, ring_size):
    divisor = kind.divisor(ring_size)
    for length in range(0, 3 * divisor + 1):
        padded = layout.padded_length(kind, ring_size, length)
        assert length <= padded < length + divisor
        layout.check_length(kind, ring_size, padded)
        assert padded == length or length % divisor


KNOWN = {"layout": layout, "np": np, "Contiguous": Contiguous, "Striped": Striped}
KNOWN |= {"Zigzag": Zigzag, "Mirror": Mirror}


@pytest.mark.parametrize("use, words", table("kernels.txt", "layouts", **KNOWN))
def test_wrong_layouts_rings_and_lengths_are_refused(use, words):
    with pytest.raises(ValueError, match=words):
        use()
