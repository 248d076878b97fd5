"""Merged partial results against attention to all of the keys at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.merge import Partial, merge

SHAPE = (2, 3, 4, 5)  # B, T, H, D
EMPTY_LSE = -np.inf


def random_scores(keys: int, spread: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """Scores (B, H, T, keys) and values (B, keys, H, D)."""
    rng = np.random.default_rng()
    batch, length, heads, depth = SHAPE
    scores = spread * rng.standard_normal((batch, heads, length, keys))
    return jnp.asarray(scores), jnp.asarray(rng.standard_normal((batch, keys, 4, 5)))


@jax.jit
def attend(scores: jax.Array, values: jax.Array) -> Partial:
    out = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), values)
    return out, jax.nn.logsumexp(scores, axis=-1)


def attend_in_parts(scores: jax.Array, values: jax.Array, *parts: slice) -> Partial:
    return functools.reduce(
        merge, (attend(scores[..., part], values[:, part]) for part in parts)
    )


def nothing() -> Partial:
    batch, length, heads, _ = SHAPE
    return jnp.zeros(SHAPE), jnp.full((batch, heads, length), EMPTY_LSE)


def one_row(out: float, lse: float) -> Partial:
    return jnp.full((1, 1, 1, 1), out), jnp.full((1, 1, 1), lse)


def assert_close(got: Partial, want: Partial, tolerance: float = 1e-13) -> None:
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("spread", [0.0, 1.0, 300.0])
@pytest.mark.parametrize("cut", [1, 7, 12])
def test_two_parts_give_the_attention_to_both(float64, cut, spread):
    scores, values = random_scores(13, spread)
    got = attend_in_parts(scores, values, slice(cut), slice(cut, None))
    assert got[0].dtype == got[1].dtype == jnp.float64
    assert_close(got, attend(scores, values))


def test_order_and_grouping_do_not_matter(float64):
    scores, values = random_scores(12, 5.0)
    a, b, c = (
        attend(scores[..., part], values[:, part])
        for part in (slice(2), slice(2, 9), slice(9, None))
    )
    want = attend(scores, values)
    for got in (
        merge(merge(a, b), c),
        merge(a, merge(b, c)),
        merge(merge(c, b), a),
        merge(b, merge(a, c)),
    ):
        assert_close(got, want)


def test_nothing_changes_nothing_to_the_last_bit():
    partial = attend(*(x.astype(jnp.float32) for x in random_scores(6)))
    for got in merge(partial, nothing()), merge(nothing(), partial):
        for a, b in zip(got, partial, strict=True):
            assert a.dtype == jnp.float32
            np.testing.assert_array_equal(a, b)


def test_two_empty_rows_are_an_empty_row():
    out, lse = merge(nothing(), nothing())
    np.testing.assert_array_equal(out, np.zeros(SHAPE))
    np.testing.assert_array_equal(lse, np.full(lse.shape, -np.inf))


@pytest.mark.parametrize("gap", [200.0, 1e4, 1e30])
@pytest.mark.parametrize("light", [2.0, 1e8, -3e38])
def test_what_weighs_nothing_leaves_no_trace(gap, light):
    """However large the lighter side is: its weight is exp(-gap)."""
    heavy = one_row(1.25, 0.5)
    lighter = one_row(light, 0.5 - gap)
    for out, lse in merge(heavy, lighter), merge(lighter, heavy):
        assert (float(out.item()), float(lse.item())) == (1.25, 0.5)


@pytest.mark.parametrize("tied", [False, True])
def test_gradient_is_that_of_the_attention_to_both(float64, tied):
    """Ties too: with all scores alike, as at the start of a training, lse are equal."""
    scores, values = random_scores(8, 0.0 if tied else 1.0)
    weights = jnp.asarray(np.random.default_rng().standard_normal(SHAPE))

    def loss(attention, scores, values):
        out, lse = attention(scores, values)
        return (weights * out).sum() + jnp.sin(lse).sum()

    def in_parts(scores, values):
        return attend_in_parts(scores, values, slice(4), slice(4, None))

    got, want = (
        jax.grad(loss, (1, 2))(attention, scores, values)
        for attention in (in_parts, attend)
    )
    assert_close(got, want)


@pytest.mark.parametrize("first", [EMPTY_LSE, 0.5])
@pytest.mark.parametrize("second", [EMPTY_LSE, 0.5])
def test_gradients_of_empty_rows_are_finite(first, second):
    def loss(partials):
        out, lse = merge(*partials)
        return out.sum() + jnp.where(lse == -jnp.inf, 0, lse).sum()

    partials = one_row(0.0, first), one_row(0.0, second)
    gradient = jax.grad(loss)(partials)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))
    for (_, lse), (_, d_lse) in zip(partials, gradient, strict=True):
        assert (d_lse.item() == 0) == (lse.item() == -np.inf)
