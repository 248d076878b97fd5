"""Merged partial results against attention to all of the keys at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import merge as module
from kernels.merge import Partial

BATCH, LENGTH, HEADS, DEPTH = 2, 3, 4, 5
merge = jax.jit(module.merge)


def random_scores(
    rng: np.random.Generator, keys: int, spread: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Scores (B, H, T, keys) and values (B, keys, H, D)."""
    scores = spread * rng.standard_normal((BATCH, HEADS, LENGTH, keys))
    return scores, rng.standard_normal((BATCH, keys, HEADS, DEPTH))


@jax.jit
def attend(scores: jax.Array, values: jax.Array) -> Partial:
    out = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), values)
    return out, jax.nn.logsumexp(scores, axis=-1)


def attend_in_parts(scores: jax.Array, values: jax.Array, cut: int) -> Partial:
    parts = slice(cut), slice(cut, None)
    return merge(*(attend(scores[..., part], values[:, part]) for part in parts))


def nothing() -> Partial:
    out = np.zeros((BATCH, LENGTH, HEADS, DEPTH), np.float32)
    return out, np.full((BATCH, HEADS, LENGTH), -np.inf, np.float32)


def one_row(out: float, lse: float) -> Partial:
    return np.full((1, 1, 1, 1), out, np.float32), np.full((1, 1, 1), lse, np.float32)


def assert_close(got: Partial, want: Partial, tolerance: float = 1e-13) -> None:
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("spread", [0.0, 1.0, 300.0])
@pytest.mark.parametrize("cut", [1, 6])
def test_two_parts_give_the_attention_to_both(float64, cut, spread, rng):
    scores, values = random_scores(rng, 12, spread)
    got = attend_in_parts(scores, values, cut)
    assert got[0].dtype == got[1].dtype == jnp.float64
    assert_close(got, attend(scores, values))


@pytest.mark.parametrize("run", [merge, module.merge], ids=["jit", "eager"])
def test_nothing_changes_nothing_to_the_last_bit(run, rng):
    partial = attend(*(x.astype(np.float32) for x in random_scores(rng, 6)))
    for got in run(partial, nothing()), run(nothing(), partial):
        for a, b in zip(got, partial, strict=True):
            assert a.dtype == jnp.float32
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("gap", [200.0, 1e4, 1e30])
@pytest.mark.parametrize("light", [2.0, 1e8, -3e38])
def test_negligible_weights_leave_no_trace(gap, light):
    """However large the values on the lighter side are: its weight is exp(-gap)."""
    heavy, lighter = one_row(1.25, 0.5), one_row(light, 0.5 - gap)
    for out, lse in merge(heavy, lighter), merge(lighter, heavy):
        assert (out.item(), lse.item()) == (1.25, 0.5)


@pytest.mark.parametrize("spread", [0.0, 1.0], ids=["ties", "no ties"])
def test_gradient_is_that_of_the_attention_to_both(float64, spread, rng):
    """Ties too: where all scores are alike, halves of the keys have equal lse."""
    scores, values = random_scores(rng, 8, spread)
    weights = rng.standard_normal((BATCH, LENGTH, HEADS, DEPTH))

    @functools.partial(jax.jit, static_argnums=0)
    @functools.partial(jax.grad, argnums=(1, 2))
    def gradient(attention, scores, values):
        out, lse = attention(scores, values)
        return (weights * out).sum() + jnp.sin(lse).sum()

    def in_halves(scores, values):
        return attend_in_parts(scores, values, 4)

    got, want = (gradient(run, scores, values) for run in (in_halves, attend))
    assert_close(got, want)


@pytest.mark.parametrize("first", [-np.inf, 0.5])
@pytest.mark.parametrize("second", [-np.inf, 0.5])
def test_gradients_of_empty_rows_are_zero(first, second):
    @jax.jit
    @jax.grad
    def gradient(partials):
        out, lse = merge(*partials)
        return out.sum() + jnp.where(lse == -jnp.inf, 0, lse).sum()

    partials = one_row(0.0, first), one_row(0.0, second)
    for (_, lse), (do, d_lse) in zip(partials, gradient(partials), strict=True):
        assert np.isfinite(do).all()
        assert (d_lse.item() == 0) == np.isneginf(lse.item())
        assert not np.isnan(d_lse)
