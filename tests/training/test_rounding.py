"""Random rounding, and moments in blocks of 8-bit numbers that are rounded so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from training.moments import FLOAT8, encode
from training.rounding import random_bits, stochastic_round

TYPES = jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2
TIMES = 4096


def units(x: np.ndarray, dtype: jnp.dtype) -> np.ndarray:
    """Distances of the numbers of a type around each x."""
    info = jnp.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(x), 1e-37)))
    return 2.0 ** (np.maximum(exponent, float(info.minexp)) - info.nmant)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.__name__)
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
    exact = (x.astype(dtype).astype(np.float32) == x).nonzero()
    assert (found[:, *exact] == x[exact]).all()


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.__name__)
def test_numbers_of_a_type_stay_whatever_the_bits(dtype, rng):
    x = (rng.normal(size=2000) * 10.0 ** rng.integers(-5, 2, 2000)).astype(dtype)
    most = float(jnp.finfo(dtype).max)
    for bits in 0, 2**31, 2**32 - 1:
        words = jnp.full(x.shape, bits, jnp.uint32)
        found = stochastic_round(jnp.float32(x), words, dtype)
        np.testing.assert_array_equal(found, x)
    if dtype == jnp.float8_e4m3fn:  # what exceeds it becomes its largest number
        found = stochastic_round(jnp.float32([449, -1e9, 448]), words[:3], dtype)
        assert found.astype(jnp.float32).tolist() == [most, -most, most]


def test_bits_are_of_the_place_in_the_whole_array(rng):
    x = np.float32(rng.normal(size=(8, 16)))
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))

    @jax.jit
    def rounded(x):
        return stochastic_round(x, random_bits(jnp.uint32(7), x.shape), jnp.bfloat16)

    for spec in (PartitionSpec("x", "y"), PartitionSpec(None, ("y", "x"))):
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        np.testing.assert_array_equal(rounded(placed), rounded(x))


def test_bits_differ_between_places_and_words():
    first, second = (np.asarray(random_bits(jnp.uint32(w), (64, 64))) for w in (1, 2))
    assert len(np.unique(first)) > 4090 and len(np.unique(second)) > 4090
    ones = np.unpackbits((first ^ second).view(np.uint8)).mean()
    assert abs(ones - 0.5) < 0.01  # of 131072 bits: 7 standard deviations


MOMENTS = {(3, 512): 1, (768, 5): 0, (4, 40): 1, (7, 3): 0}
"""Shapes, and the axis of the blocks: of 256, 8 and 1."""


def draw(rng: np.random.Generator, moment: str, shape: tuple[int, ...]) -> np.ndarray:
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
    x, axis = draw(rng, moment, shape), MOMENTS[shape]
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
