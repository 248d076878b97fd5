"""Moments in blocks of 8-bit numbers: errors, zeros, averages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from training.moments import FLOAT8, encode

WORDS = 2048
SHAPES = {(3, 512): 1, (768, 5): 0, (4, 40): 1, (7, 3): 0}
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
@pytest.mark.parametrize("shape", SHAPES)
def test_the_error_of_a_number_is_below_a_unit(moment, shape, rng):
    """2^-3 of it for a first moment, 2^-2 for a second, above the smallest numbers."""
    x, axis = draw(rng, moment, shape), SHAPES[shape]
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


@pytest.mark.parametrize("moment", FLOAT8)
def test_the_mean_over_many_words_is_the_moment(moment, rng):
    x = draw(rng, moment, (4, 256))
    words = jnp.asarray(rng.integers(0, 2**32, WORDS, np.uint32))
    each = jax.vmap(lambda word: through(x, moment, 1, word))(words)
    found = np.asarray(each, np.float64)
    big = np.abs(x) > 1e-3 * np.abs(x).max(-1, keepdims=True)
    unit = np.abs(x[big]) * 2.0 ** -jnp.finfo(FLOAT8[moment]).nmant
    error = (found.mean(0)[big] - x[big]) / (unit / 2 / np.sqrt(WORDS))
    assert np.abs(error).max() < 5


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
