"""Rotary positions against float64, and against Hugging Face's formulas."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.rope import RopeScaling, rotate, rotations

ANGLE_ERROR = 1e-5
"""Radians that an angle may be off at any position below 2³⁰."""

THETA = 10_000.0
LARGEST = 2**30 - 1
UNLUCKY = 1_072_606_737
"""Where the errors of digits that are multiplied in float32 add up, for D = 128."""

rotations_at = jax.jit(rotations, static_argnums=(1, 2, 3))


def exact_angles(positions: np.ndarray, head_dim: int, theta: float) -> np.ndarray:
    """(…, D / 2) float64."""
    return positions[..., None] * theta ** -(np.arange(0, head_dim, 2) / head_dim)


def angle_errors(rotation: tuple[jax.Array, jax.Array], exact: np.ndarray) -> float:
    """The largest distance on the unit circle, which is the angle where it is small."""
    cosine, sine = (np.asarray(x, np.float64) for x in rotation)
    return np.hypot(cosine - np.cos(exact), sine - np.sin(exact)).max()


def some_positions(rng: np.random.Generator) -> np.ndarray:
    """Digits' edges, random positions, the largest ones, and an unlucky one."""
    drawn = rng.integers(0, LARGEST, 20_000)
    edges = [0, 1, 1023, 1024, 2**20 - 1, 2**20, LARGEST]
    last = LARGEST - np.arange(5_000)
    return np.concatenate([edges, [UNLUCKY], drawn, last]).astype(np.int32)


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0, 5e7])
@pytest.mark.parametrize("head_dim", [2, 100, 128])
def test_angles_are_exact_at_any_position(head_dim, theta, rng):
    positions = some_positions(rng)[None]
    cosine, sine = rotations_at(jnp.asarray(positions), head_dim, theta)
    assert cosine.shape == sine.shape == (*positions.shape, 1, head_dim // 2)
    assert cosine.dtype == sine.dtype == jnp.float32
    exact = exact_angles(positions, head_dim, theta)[:, :, None]
    assert angle_errors((cosine, sine), exact) < ANGLE_ERROR


def huggingface(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """x · cos + rotate_half(x) · sin, as in `transformers`' LLaMA, in float64."""
    angles = exact_angles(positions, x.shape[-1], theta)
    angles = np.concatenate([angles, angles], axis=-1)[:, :, None]  # (B, T, 1, D)
    first, second = np.split(x.astype(np.float64), 2, axis=-1)
    rotate_half = np.concatenate([-second, first], axis=-1)
    return x * np.cos(angles) + rotate_half * np.sin(angles)


def random_heads(
    rng: np.random.Generator, length: int, head_dim: int
) -> tuple[np.ndarray, np.ndarray]:
    """x (2, T, 3, D) and positions (2, T), some of them far."""
    x = rng.standard_normal((2, length, 3, head_dim)).astype(np.float32)
    positions = rng.integers(0, 4 * length, (2, length)).astype(np.int32)
    return x, positions


@pytest.mark.parametrize("head_dim", [2, 100, 128])
def test_rotated_heads_are_those_of_hugging_face(head_dim, rng):
    x, positions = random_heads(rng, 50, head_dim)
    got = rotate(jnp.asarray(x), rotations_at(jnp.asarray(positions), head_dim, THETA))
    want = huggingface(x, positions, THETA)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_bfloat16_heads_are_turned_in_float32_and_rounded_once(rng):
    x, positions = random_heads(rng, 50, 16)
    x = jnp.asarray(x, jnp.bfloat16)
    rotation = rotations_at(jnp.asarray(positions), 16, THETA)
    got = rotate(x, rotation)
    assert got.dtype == jnp.bfloat16
    want = rotate(x.astype(jnp.float32), rotation).astype(jnp.bfloat16)
    np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(jnp.float32))


SCALINGS = {
    "none": RopeScaling(),
    "linear": RopeScaling("linear", 8.0),
    "ntk": RopeScaling("ntk", 8.0),
    "yarn": RopeScaling("yarn", 8.0, 4096),
    "yarn, other turns": RopeScaling(
        "yarn", 32.0, 2048, beta_fast=20.0, beta_slow=2.0, attention_factor=1.5
    ),
    "llama3": RopeScaling("llama3", 8.0, 8192),
}


def published_frequencies(
    scaling: RopeScaling, head_dim: int, theta: float
) -> list[float]:
    """Pair after pair, as the papers and Meta's program have them."""
    factor, original = scaling.factor, scaling.original_max_position_embeddings

    def pair_of(turns: float) -> float:
        """The pair that turns so often in the original context."""
        radians = original / (turns * 2 * math.pi)
        return head_dim / 2 * math.log(radians) / math.log(theta)

    def frequency(pair: int) -> float:
        base = theta
        if scaling.rope_type == "ntk":
            base = theta * factor ** (head_dim / (head_dim - 2))
        plain = 1 / base ** (2 * pair / head_dim)
        if scaling.rope_type == "linear":
            return plain / factor
        if scaling.rope_type == "yarn":
            first = max(0, math.floor(pair_of(scaling.beta_fast)))
            last = min(head_dim - 1, math.ceil(pair_of(scaling.beta_slow)))
            ramp = min(max((pair - first) / (last - first), 0), 1)
            return plain / factor * ramp + plain * (1 - ramp)
        if scaling.rope_type == "llama3":
            wavelength = 2 * math.pi / plain
            if wavelength < original / scaling.high_freq_factor:
                return plain
            if wavelength > original / scaling.low_freq_factor:
                return plain / factor
            smooth = (original / wavelength - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            return (1 - smooth) * plain / factor + smooth * plain
        return plain

    return [frequency(pair) for pair in range(head_dim // 2)]


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("head_dim, theta", [(64, 10_000.0), (128, 500_000.0)])
def test_scaled_frequencies_are_the_published_ones(name, head_dim, theta):
    got = SCALINGS[name].frequencies(head_dim, theta)
    want = published_frequencies(SCALINGS[name], head_dim, theta)
    np.testing.assert_allclose(got, want, rtol=1e-12)
    plain = published_frequencies(RopeScaling(), head_dim, theta)
    assert np.allclose(got, plain, rtol=1e-6) == (name == "none")


def test_scaled_frequencies_have_these_values():
    """The slowest pair is interpolated by all, the fastest by linear alone; D 128."""
    values = {
        "none": (1.0, 1.1547819846894582e-4),
        "linear": (0.125, 1.4434774808618227e-5),
        "ntk": (1.0, 1.4434774808618227e-5),
        "yarn": (1.0, 1.4434774808618227e-5),
        "llama3": (1.0, 1.4434774808618227e-5),
    }
    for name, (first, last) in values.items():
        got = SCALINGS[name].frequencies(128, THETA)
        assert (got[0], got[-1]) == pytest.approx((first, last), rel=1e-12), name


@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_angles_are_exact_at_any_position(name, rng):
    scaling, positions = SCALINGS[name], some_positions(rng)[None]
    cosine, sine = rotations_at(jnp.asarray(positions), 128, THETA, scaling)
    magnitude = scaling.magnitude()
    exact = positions[..., None] * scaling.frequencies(128, THETA)
    rotation = np.asarray(cosine) / magnitude, np.asarray(sine) / magnitude
    assert angle_errors(rotation, exact[:, :, None]) < ANGLE_ERROR


NO_ORIGINAL = "original_max_position_embeddings=0 must be at least 1"


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"rope_type": "dynamic"}, "rope_type='dynamic' must be one of none, linear"),
        ({"factor": 2.0}, "factor=2.0 of rope_type='none' must be"),
        ({"rope_type": "linear", "factor": 0.5}, "factor=0.5 .* at least 1"),
        ({"rope_type": "ntk", "factor": math.nan}, "factor=nan .* at least 1"),
        ({"rope_type": "yarn", "factor": 2.0}, NO_ORIGINAL),
        ({"rope_type": "llama3", "factor": 2.0}, NO_ORIGINAL),
        ({"low_freq_factor": 4.0}, "low_freq_factor=4.0 must be above 0 and below"),
        ({"beta_slow": 32.0}, "beta_slow=32.0 must be above 0 and below"),
        ({"attention_factor": -1.0}, "attention_factor=-1.0 must be above 0, or 0"),
    ],
)
def test_scalings_without_a_meaning_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RopeScaling(**fields)


def test_ntk_of_a_single_pair_is_refused():
    with pytest.raises(ValueError, match="head_dim=2 above 2"):
        rotations(jnp.zeros((1, 4), jnp.int32), 2, THETA, RopeScaling("ntk", 2.0))
