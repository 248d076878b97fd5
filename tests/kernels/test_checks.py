"""Tests of arguments of attention: refused, or accepted in several forms."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from kernels import masks
from kernels.checks import check_increasing
from kernels.masks import Visible
from kernels.one_device import attention


@pytest.mark.parametrize(
    "q, k, v, words",
    [
        ((8, 4, 6), (8, 2, 6), (8, 2, 6), r"must be \(B, T, H, D\).*q.shape=\(8, 4, 6"),
        ((2, 8, 4, 6), (2, 8, 2, 6), (2, 8, 2), r"must be \(B, T, H, D\)"),
        ((2, 8, 4, 6), (2, 8, 2, 6), (2, 9, 2, 6), "k and v must have one shape"),
        ((2, 8, 4, 6), (3, 8, 2, 6), (3, 8, 2, 6), "batch and head size.*must agree"),
        ((2, 8, 4, 6), (2, 8, 2, 5), (2, 8, 2, 5), "batch and head size.*must agree"),
        (
            (2, 8, 4, 6),
            (2, 8, 3, 6),
            (2, 8, 3, 6),
            "H=4 must be a multiple of .*K=3, got",
        ),
        ((2, 8, 4, 6), (2, 8, 0, 6), (2, 8, 0, 6), "must not be empty, got q.shape"),
        ((2, 0, 4, 6), (2, 8, 2, 6), (2, 8, 2, 6), "must not be empty, got q.shape"),
        ((2, 8, 4, 6), (2, 0, 2, 6), (2, 0, 2, 6), "must not be empty, got q.shape"),
        ((2, 8, 4, 0), (2, 8, 2, 0), (2, 8, 2, 0), "must not be empty, got q.shape"),
        ((2, 8, 0, 6), (2, 8, 2, 6), (2, 8, 2, 6), "must not be empty, got q.shape"),
        ((0, 8, 4, 6), (0, 8, 2, 6), (0, 8, 2, 6), "must not be empty, got q.shape"),
    ],
)
def test_shapes_that_do_not_fit_together_are_refused(q, k, v, words):
    with pytest.raises(ValueError, match=words):
        attention(jnp.zeros(q), jnp.zeros(k), jnp.zeros(v))


@pytest.mark.parametrize(
    "dtypes, words",
    [
        (("bfloat16", "float32", "float32"), "one type, got bfloat16, float32.*cast"),
        (("float32", "float32", "bfloat16"), "one type, got float32, float32, bfl"),
        (("int32", "int32", "int32"), "float16, .* or float64, got int32"),
        (("float8_e4m3fn",) * 3, "float16, .* or float64, got float8_e4m3fn"),
    ],
)
def test_types_that_do_not_fit_together_are_refused(dtypes, words):
    q, k, v = (jnp.zeros((2, 8, 4, 6), dtype) for dtype in dtypes)
    with pytest.raises(ValueError, match=words):
        attention(q, k, v)


@pytest.mark.parametrize(
    "shapes", [[(1, 7)] * 2, [(3, 8)] * 2, [(1, 8), (2, 8)], [(8,)] * 2]
)
def test_bounds_of_another_shape_are_refused(shapes):
    x = jnp.zeros((2, 8, 4, 6))
    visible = Visible(*(jnp.zeros(shape, jnp.int32) for shape in shapes))
    words = re.escape(f"k_start.shape={shapes[0]} and k_end.shape={shapes[1]}")
    with pytest.raises(ValueError, match=r"\(B, T\) or \(1, T\).*" + words):
        attention(x, x, x, visible=visible)


@pytest.mark.parametrize("dtype", ["float32", "bool", "uint8", "uint32", "uint64"])
@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_bounds_that_are_no_signed_integers_are_refused(array, dtype):
    x, bound = jnp.zeros((2, 8, 4, 6)), np.zeros((1, 8), dtype)
    with pytest.raises(ValueError, match=f"signed integers.*{array(bound).dtype}"):
        attention(x, x, x, visible=Visible(array(bound), array(bound)))


def test_bounds_of_any_signed_type_mean_the_same():
    """Narrow ones of more keys than they can count, and wide ones that do not wrap."""
    q, k = (jax.random.normal(jax.random.key(n), (1, n, 2, 8)) for n in (120, 300))
    run = functools.partial(attention, q, k, k)
    mask = masks.window(50)(np.arange(120, dtype=np.int32), 300)
    want = run(visible=mask)
    for dtype in np.int8, np.int16, np.int64:
        for array in np.asarray, jnp.asarray:
            visible = Visible(*(array(bound.astype(dtype)) for bound in mask))
            np.testing.assert_array_equal(run(visible=visible), want)
    far = Visible(
        mask.k_start - 2**40 * (mask.k_start == 0), mask.k_end + np.int64(2**40)
    )
    want = run(visible=Visible(mask.k_start, np.full_like(mask.k_end, 300)))
    with jax.enable_x64():
        wide = Visible(*map(jnp.asarray, far))  # which JAX without 64 bits would wrap
    for visible in far, wide:
        assert visible.k_start.dtype == visible.k_end.dtype == np.int64
        np.testing.assert_array_equal(run(visible=visible), want)


@pytest.mark.parametrize("name, place", [("k_start", 3), ("k_end", 5)])
@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_bounds_that_decrease_are_refused_where_they_are_known(array, name, place):
    x = jnp.ones((2, 8, 4, 6))
    visible = masks.full()(np.arange(8, dtype=np.int32), 8)
    visible = Visible(*(np.repeat(bound, 2, axis=0) for bound in visible))
    bound = getattr(visible, name)
    bound[1] = [0, 1, 2, 4, 5, 6, 7, 7]
    bound[1, place + 1] -= 3
    before, after = bound[1, place : place + 2]
    words = f"{name} of row 1: {before} at {place} and {after} after it"
    visible = Visible(*map(array, visible))
    with pytest.raises(ValueError, match=words):
        attention(x, x, x, visible=visible)
    with pytest.raises(ValueError, match=words):  # a constant of the program
        jax.jit(lambda x: attention(x, x, x, visible=visible))(x)
    with pytest.raises(ValueError, match=words):
        check_increasing(visible)

    @jax.jit
    @checkify.checkify
    def checked(x, visible):
        check_increasing(visible)
        return attention(x, x, x, visible=visible, implementation="reference")

    visible = Visible(*map(jnp.asarray, visible))
    with pytest.raises(checkify.JaxRuntimeError, match=words):
        checked(x, visible)[0].throw()
    error, out = checked(x, Visible(*(jnp.sort(bound) for bound in visible)))
    assert error.get() is None and out.shape == x.shape


def test_bounds_that_decrease_beyond_the_keys_are_not():
    x = jax.random.normal(jax.random.key(0), (1, 4, 2, 8))
    bounds = np.array([[[-1, -9, -5, 0]], [[5, 4, 10, 7]]])
    run = functools.partial(attention, x, x, x, implementation="reference")
    want = run(visible=masks.full())
    np.testing.assert_array_equal(run(visible=Visible(*bounds)), want)


@pytest.mark.parametrize(
    "visible, words",
    [
        (masks.causal, r"as causal\(\) with its parentheses.*got causal"),
        (np.ones((8, 8), bool), "must be a mask.*got ndarray"),
        (None, "must be a mask.*got NoneType"),
        (Visible([[0] * 8], [[8] * 8]), "Visible of two arrays, got Visible"),
        (masks.documents(np.zeros(6, int)), "sequence of 8 tokens, got 6 ids"),
    ],
)
def test_what_is_no_mask_of_these_tokens_is_refused(visible, words):
    x = jnp.ones((2, 8, 4, 6))
    with pytest.raises(ValueError, match=words):
        attention(x, x, x, visible=visible)
    with pytest.raises(ValueError, match=words):
        jax.jit(lambda x: attention(x, x, x, visible=visible))(x)


@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
def test_scale_may_be_any_number_that_is_known(implementation):
    x = jax.random.normal(jax.random.key(0), (1, 8, 2, 8))
    run = functools.partial(attention, x, x, x, implementation=implementation)
    want = run(scale=0.25)
    for scale in np.float32(0.25), np.float64(0.25), np.array(0.25), jnp.float32(0.25):
        np.testing.assert_array_equal(run(scale=scale), want)


@pytest.mark.parametrize(
    "scale",
    [np.nan, np.inf, -1e39, True, "large", "1", 1j, np.array([0.3]), "traced"],
    ids=repr,
)
def test_scale_that_is_no_finite_number_is_refused(scale):
    x = jnp.ones((1, 8, 2, 8))

    def run(traced):
        return attention(x, x, x, scale=traced if scale == "traced" else scale)

    with pytest.raises(ValueError, match="scale must be one finite number.*known"):
        jax.jit(run)(0.3)


def test_operands_that_are_no_arrays_are_refused():
    x = jnp.ones((1, 8, 2, 8))
    with pytest.raises(ValueError, match="must be arrays, got ArrayImpl, list, list"):
        attention(x, x.tolist(), x.tolist())
