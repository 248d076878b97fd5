"""Bits of arrays: digests, blocks of a batch, random rounding, 8-bit moments."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from training.saved.digest import Digest, device_digest, digest, digests, not_finite
from training.update.moments import FLOAT8, encode
from training.update.rounding import random_bits, stochastic_round

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


NARROW = jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2
TIMES = 4096


def units(x: np.ndarray, dtype: jnp.dtype) -> np.ndarray:
    """Distances of the numbers of a type around each x."""
    info = jnp.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(x), 1e-37)))
    return 2.0 ** (np.maximum(exponent, float(info.minexp)) - info.nmant)


@pytest.mark.parametrize("dtype", NARROW, ids=lambda dtype: dtype.__name__)
def test_the_mean_over_many_words_is_the_number_itself(dtype, rng):
    wide = rng.normal(size=300) * 10.0 ** rng.integers(-5, 2, 300)
    x = np.float32([*wide, 0.0, 1.0, -(2.0**-9), 2.0**-12])
    words = jnp.asarray(rng.integers(0, 2**32, TIMES, np.uint32))

    @jax.jit
    @jax.vmap
    def rounded(word):
        bits = random_bits(word, x.shape)
        return stochastic_round(jnp.asarray(x), bits, dtype).astype(jnp.float32)

    found = np.asarray(rounded(words), np.float64)
    unit = units(x, dtype)
    assert (np.abs(found - x) < unit).all()  # a neighbour
    error = (found.mean(0) - x) / (unit / 2 / np.sqrt(TIMES))
    assert np.abs(error).max() < 5  # standard deviations, at most
    assert 0.5 < error.std() < 1.1
    narrow, info = x.astype(dtype), jnp.finfo(dtype)
    exact = (narrow.astype(np.float32) == x).nonzero()
    assert (found[:, *exact] == x[exact]).all()
    # Whatever the bits; and what exceeds the largest number becomes that.
    most = np.float32([1.001, -1.001]) * np.float32(info.max)
    for bits in 0, 2**32 - 1:
        bits = jnp.full(x.shape, bits, jnp.uint32)
        same = stochastic_round(jnp.float32(narrow), bits, dtype)
        np.testing.assert_array_equal(same, narrow)
        largest = stochastic_round(jnp.asarray(most), bits[:2], dtype)
        assert largest.tolist() == [float(info.max), float(info.min)]


def test_bits_are_of_the_place_in_the_whole_array(rng):
    x = np.float32(rng.normal(size=(8, 16)))
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))

    @jax.jit
    def rounded(x):
        return stochastic_round(x, random_bits(jnp.uint32(7), x.shape), jnp.bfloat16)

    first, second = (np.asarray(random_bits(jnp.uint32(w), (64, 64))) for w in (1, 2))
    assert len(np.unique(first)) > 4090
    ones = np.unpackbits((first ^ second).view(np.uint8)).mean()
    assert abs(ones - 0.5) < 0.01  # of 131072 bits: 7 standard deviations
    for spec in (PartitionSpec("x", "y"), PartitionSpec(None, ("y", "x"))):
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        np.testing.assert_array_equal(rounded(placed), rounded(x))


MOMENTS = {(3, 512): 1, (768, 5): 0, (4, 40): 1, (7, 3): 0}
"""Shapes, and the axis of the blocks: of 256, 8 and 1."""


def draw_moment(
    rng: np.random.Generator, moment: str, shape: tuple[int, ...]
) -> np.ndarray:
    """Of rows and columns that differ by orders of magnitude."""
    size = 10.0 ** rng.uniform(-6, -2, (shape[0], 1)) * rng.lognormal(0, 1.5, shape)
    x = np.float32(size * rng.normal(size=shape))
    x[:, 0] = 0
    return np.square(x) if moment == "nu" else x


@jax.jit(static_argnames=("moment", "axis"))
def through(x, moment, axis, word):
    return encode(x, moment, axis, word).decoded()


@pytest.mark.parametrize("moment", FLOAT8)
@pytest.mark.parametrize("shape", MOMENTS)
def test_the_error_of_a_number_is_below_a_unit(moment, shape, rng):
    """2^-3 of it for a first moment, 2^-2 for a second, above the smallest numbers."""
    x, axis = draw_moment(rng, moment, shape), MOMENTS[shape]
    found = np.asarray(through(x, moment, axis, jnp.uint32(3)), np.float64)
    info = jnp.finfo(FLOAT8[moment])
    length = np.gcd(256, shape[axis])
    blocks = np.moveaxis(x, axis, -1).reshape(-1, length)
    largest = np.repeat(np.abs(blocks).max(-1), length)
    largest = np.moveaxis(largest.reshape(np.moveaxis(x, axis, -1).shape), -1, axis)
    least = largest * float(info.smallest_subnormal) / float(info.max)
    bound = np.maximum(np.abs(x) * 2.0**-info.nmant, least) * (1 + 1e-5)
    assert (np.abs(found - x) <= bound).all()
    assert (np.sign(found) * np.sign(x) >= 0).all() and not found[x == 0].any()
    if moment == "nu":
        assert (found > 0).sum() == (x > 0).sum()  # updates are divided by its root


@pytest.mark.thorough
def test_an_average_that_moves_by_less_than_a_unit_arrives():
    """Rounded to the nearest it would stand still: 1 % is less than half a unit."""
    target, decay, steps = 2.0, 0.99, 600

    def step(number, stored):
        wide = decay * stored.decoded() + (1 - decay) * target
        return encode(wide, "nu", 1, number.astype(jnp.uint32))

    start = encode(jnp.ones((8, 256)), "nu", 1, jnp.uint32(0))
    found = jax.lax.fori_loop(0, steps, step, start).decoded()
    wanted = target - decay**steps * (target - 1)
    assert abs(float(found.mean()) / wanted - 1) < 0.02
