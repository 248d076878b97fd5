"""Rotary positions against float64, and frequencies against published ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.rope import RopeScaling, rotate, rotate_queries, rotations
from tests.cases import table

ANGLE_ERROR = 1e-5
"""Radians that an angle may be off at any position below 2³⁰."""

THETA = 10_000.0
LARGEST = 2**30 - 1
UNLUCKY = 1_072_606_737
"""Where the errors of digits that are multiplied in float32 add up, for D = 128."""

rotations_at = jax.jit(rotations, static_argnums=(1, 2, 3))


def test_bfloat16_heads_are_turned_in_float32_and_rounded_once(rng):
    x = jnp.asarray(rng.standard_normal((2, 50, 3, 16)), jnp.bfloat16)
    positions = rng.integers(0, 200, (2, 50)).astype(np.int32)
    rotation = rotations_at(positions, 16, THETA)
    got = rotate(x, rotation)
    assert got.dtype == jnp.bfloat16
    want = rotate(x.astype(jnp.float32), rotation).astype(jnp.bfloat16)
    np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(jnp.float32))


TURNS = {"beta_fast": 20.0, "beta_slow": 2.0, "attention_factor": 1.5}
SCALINGS = {
    "none": (RopeScaling(), [1] * 8),
    "linear": (RopeScaling("linear", 8.0), [1 / 8] * 8),
    "ntk": (RopeScaling("ntk", 8.0), 8 ** (-np.arange(8) / 7)),
    # Linear in the pair, from 2 to 6.
    "yarn": (
        RopeScaling("yarn", 8.0, 4096),
        [1, 1, 1, 25 / 32, 9 / 16, 11 / 32, 1 / 8, 1 / 8],
    ),
    # From 2 to 5.
    "yarn, other turns": (
        RopeScaling("yarn", 32.0, 2048, **TURNS),
        [1, 1, 1, 65 / 96, 17 / 48, 1 / 32, 1 / 32, 1 / 32],
    ),
    # Linear in the frequency, between 4 and 1 rotations in 8192 tokens.
    "llama3": (
        RopeScaling("llama3", 8.0, 8192),
        [*[1] * 6, 0.21360754402756865, 1 / 8],
    ),
}
"""With the factors on the frequencies of 8 pairs, by the papers and Meta's program."""


@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_are_the_published_ones(name):
    scaling, factors = SCALINGS[name]
    want = THETA ** -(np.arange(8) / 8) * factors
    np.testing.assert_allclose(scaling.frequencies(16, THETA), want, rtol=1e-12)


@pytest.mark.parametrize(
    "name, head_dim, theta",
    [
        *((name, 128, THETA) for name in SCALINGS),
        *(("none", head_dim, 5e5) for head_dim in (2, 100, 128)),
        ("none", 100, 5e7),
        ("none", 2, THETA),
    ],
)
def test_angles_are_exact_at_any_position(name, head_dim, theta, rng):
    drawn, last = rng.integers(0, LARGEST, 20_000), LARGEST - np.arange(5_000)
    edges = [0, 1, 1023, 1024, 2**20 - 1, 2**20, LARGEST, UNLUCKY]  # of digits
    positions = np.concatenate([edges, drawn, last]).astype(np.int32)[None]
    scaling, _ = SCALINGS[name]
    cosine, sine, _ = rotations_at(jnp.asarray(positions), head_dim, theta, scaling)
    assert cosine.shape == sine.shape == (*positions.shape, 1, head_dim // 2)
    assert cosine.dtype == sine.dtype == jnp.float32
    exact = (positions[..., None] * scaling.frequencies(head_dim, theta))[:, :, None]
    cosine, sine = (np.float64(x) / scaling.magnitude() for x in (cosine, sine))
    # The distance on the unit circle is the angle, as it is small.
    errors = np.hypot(cosine - np.cos(exact), sine - np.sin(exact))
    assert errors.max() < ANGLE_ERROR


def test_longrope_divides_by_what_is_for_a_row_of_this_length():
    """And its magnitude is the paper's."""
    short, long = (1.0, 1.5, 2.0), (1.0, 3.0, 40.0)
    scaling = RopeScaling("longrope", 32.0, 64, short_factor=short, long_factor=long)
    plain = THETA ** -(np.arange(3) / 3)
    for tokens, factors in ((1, short), (64, short), (65, long)):
        got = scaling.frequencies(6, THETA, tokens)
        np.testing.assert_allclose(got, plain / factors, rtol=1e-12)
    assert scaling.magnitude() == pytest.approx((1 + 5 / 6) ** 0.5)
    # A cache says how long its rows may become; else the tokens do.
    one = jnp.full((1, 1), 7, jnp.int32)
    kept = rotations(one, 6, THETA, scaling, tokens=65)
    row = rotations(jnp.arange(65, dtype=jnp.int32)[None], 6, THETA, scaling)
    np.testing.assert_array_equal(kept.cosine[0, 0], row.cosine[0, 7])
    assert not np.array_equal(rotations(one, 6, THETA, scaling).cosine, kept.cosine)


def test_queries_far_behind_the_original_context_are_made_larger(rng):
    scaling = RopeScaling("yarn", 4.0, 16, query_scale=0.5)
    positions = np.array([[0, 15, 16, 47, 48]], np.int32)
    rotation = rotations(positions, 8, THETA, scaling)
    x = jnp.asarray(rng.standard_normal((1, 5, 2, 8)), jnp.float32)
    factors = 1 + 0.5 * np.log([1, 1, 2, 3, 4])
    want = np.asarray(rotate(x, rotation)) * factors[:, None, None]
    np.testing.assert_allclose(rotate_queries(x, rotation), want, rtol=1e-6)


@pytest.mark.parametrize("fields, message", table("models.txt", "scaling"))
def test_scalings_without_a_meaning_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RopeScaling(**fields)
    # A single pair has no base.
    with pytest.raises(ValueError, match="head_dim=2 above 2"):
        rotations(jnp.zeros((1, 4), jnp.int32), 2, THETA, RopeScaling("ntk", 2.0))
