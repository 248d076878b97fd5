"""Tests of arguments of attention: refused, or accepted in several forms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from kernels import backends, masks
from kernels.attention import attention
from kernels.checks import check_increasing
from kernels.masks import Visible
from tests.cases import table

X = jnp.ones((2, 8, 4, 6))
FIT = (2, 8, 4, 6), (2, 8, 2, 6), (2, 8, 2, 6)


def shaped(axis: int | None = None, size: int = 0, *, of: str = "qkv") -> dict:
    """q, k and v, of which some have another size of an axis, or one axis less."""
    arrays = {}
    for name, shape in zip("qkv", FIT, strict=True):
        if name in of:
            shape = shape[1:] if axis is None else list(shape)
            if axis is not None:
                shape[axis] = size
        arrays[name] = jnp.zeros(shape)
    return arrays


def typed(*dtypes: str) -> dict:
    arrays = (jnp.zeros(X.shape, dtype) for dtype in dtypes)
    return dict(zip("qkv", arrays, strict=True))


def seen(*shapes: tuple[int, ...], array=jnp.zeros, dtype=np.int32) -> dict:
    return {"visible": Visible(*(array(shape, dtype) for shape in shapes))}


KNOWN = {"shaped": shaped, "typed": typed, "seen": seen, "masks": masks, "np": np}
KNOWN |= {"jnp": jnp, "X": X, "ROW": [(1, 8)] * 2, "Visible": Visible}
NAMED = ".*".join(backends.IMPLEMENTATIONS)
UNKNOWN = {"implementation": "cudnn"}, f"'cudnn' is not one of {NAMED}"


@pytest.mark.parametrize(
    "wrong, words", [*table("kernels.txt", "attention", **KNOWN), UNKNOWN]
)
def test_wrong_arguments_are_refused(wrong, words):
    """Also where they are constants of a program."""
    arguments = dict.fromkeys("qkv", X) | wrong
    for run in attention, jax.jit(lambda: attention(**arguments)):
        with pytest.raises(ValueError, match=words):
            run(**arguments if run is attention else {})


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
    want = run(visible=Visible(mask.k_start, np.full_like(mask.k_end, 300)))
    for far in 1000, np.iinfo(np.int32).max, 2**40:
        start, end = mask.k_start - far * (mask.k_start == 0), np.full_like(far, far)
        beyond = Visible(start, np.broadcast_to(end, start.shape))
        with jax.enable_x64():
            wide = Visible(*map(jnp.asarray, beyond))  # which JAX would wrap
        for visible in beyond, wide:
            np.testing.assert_array_equal(run(visible=visible), want)
        for side in -far, far:
            nothing = np.full(start.shape, side)
            assert not run(visible=Visible(nothing, nothing)).any()


RISING = np.array([0, 1, 2, 4, 5, 6, 7, 7])
FALLS = [np.where(np.arange(8) == place, RISING - 3, RISING) for place in (4, 6)]
WHOLE = np.array([[0] * 8, [8] * 8])
# Queries that see [0, 2) and [2, 5).
APART = np.array([[[0] * 8, [2] * 8], [[2] * 8, [5] * 8]])
SHARED, BACK = APART.copy(), APART.copy()
SHARED[1, 0, 5:], BACK[1, 0, 3:6] = 3, 3  # of some the first ends a key later


@pytest.mark.parametrize(
    "right, wrong, words",
    [
        (WHOLE, [FALLS[0], WHOLE[1]], "k_start of row 1: 4 at 3 and 2 after it"),
        (WHOLE, [WHOLE[0], FALLS[1]], "k_end of row 1: 6 at 5 and 4 after it"),
        (APART, SHARED, "for the query at 5 of row 1: join them with"),
        (APART, BACK, "k_end of interval 0 of row 1: 3 at 5 and 2 after it"),
    ],
)
@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_bounds_that_decrease_or_share_keys_are_refused(array, right, wrong, words):
    """Where they are known, and where they are traced by `check_increasing`."""
    x = jnp.ones((2, 8, 4, 6))
    rows = zip(right, wrong, strict=True)
    visible = Visible(*(array(np.stack(pair, axis=-2)) for pair in rows))
    with pytest.raises(ValueError, match=words):
        attention(x, x, x, visible=visible)
    with pytest.raises(ValueError, match=words):  # a constant of the program
        jax.jit(lambda x: attention(x, x, x, visible=visible))(x)
    with pytest.raises(ValueError, match=words):
        check_increasing(visible)

    @jax.jit
    @checkify.checkify
    def checked(visible):
        check_increasing(visible)

    with pytest.raises(checkify.JaxRuntimeError, match=words):
        checked(Visible(*map(jnp.asarray, visible)))[0].throw()
    right = Visible(*(jnp.stack([bound, bound], axis=-2) for bound in right))
    assert checked(right)[0].get() is None


@pytest.mark.thorough
def test_intervals_that_share_no_key_are_those_of_the_whole(rng):
    x = jnp.float32(rng.standard_normal((1, 8, 2, 8)))
    apart, whole = APART[:, :, None], APART[[0, 1], [0, 1], None]
    found, want = (attention(x, x, x, visible=Visible(*b)) for b in (apart, whole))
    np.testing.assert_allclose(found, want, atol=1e-6)


def test_bounds_that_decrease_beyond_the_keys_are_not():
    x = jax.random.normal(jax.random.key(0), (1, 4, 2, 8))
    bounds = np.array([[[-1, -9, -5, 0]], [[5, 4, 10, 7]]])
    run = functools.partial(attention, x, x, x, implementation="reference")
    want = run(visible=masks.full())
    np.testing.assert_array_equal(run(visible=Visible(*bounds)), want)


@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
def test_scale_may_be_any_number_that_is_known(implementation):
    x = jax.random.normal(jax.random.key(0), (1, 8, 2, 8))
    run = functools.partial(attention, x, x, x, implementation=implementation)
    want = run(scale=0.25)
    for scale in np.float32(0.25), np.float64(0.25), np.array(0.25), jnp.float32(0.25):
        np.testing.assert_array_equal(run(scale=scale), want)


def test_scale_that_is_traced_is_refused():
    with pytest.raises(ValueError, match="scale must be one finite number.*known"):
        jax.jit(lambda scale: attention(X, X, X, scale=scale))(0.3)
