"""Tests of arguments of attention: refused, or accepted in several forms."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from kernels import backends, masks
from kernels.backends.block_sizes import BlockSizes
from kernels.backends.hopper.launch import HopperBlocks
from kernels.backends.tpu.block_sizes import TPU_FORWARD
from kernels.backends.triton_gpu.block_sizes import TritonBlocks
from kernels.checks import check_increasing
from kernels.masks import Visible
from kernels.one_device import attention

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


def wrong_arguments():
    """Of `attention`, all others being X, and what it says."""
    yield shaped(of="q"), r"must be \(B, T, H, D\).*q.shape=\(8, 4, 6"
    yield shaped(of="v"), r"must be \(B, T, H, D\)"
    yield shaped(1, 9, of="v"), "k and v must have one shape"
    yield shaped(0, 3, of="kv"), "batch and head size.*must agree"
    yield shaped(3, 5, of="kv"), "batch and head size.*must agree"
    yield shaped(2, 3, of="kv"), "H=4 must be a multiple of .*K=3, got"
    for axis, of in (2, "kv"), (1, "q"), (1, "kv"), (3, "qkv"), (2, "q"), (0, "qkv"):
        yield shaped(axis, 0, of=of), "must not be empty, got q.shape"
    yield typed("bfloat16", "float32", "float32"), "got bfloat16, float32.*cast"
    yield typed("float32", "float32", "bfloat16"), "one type, got float32, float32, bfl"
    for name in "int32", "float8_e4m3fn":
        yield typed(*[name] * 3), f"float16, .* or float64, got {name}"
    yield {"k": X.tolist(), "v": []}, "must be arrays, got ArrayImpl, list, list"
    wrong = [(1, 7)] * 2, [(3, 8)] * 2, [(1, 8), (2, 8)], [(8,)] * 2
    for shapes in *wrong, [(2, 3, 8)] * 2, [(0, 1, 8)] * 2, [(2, 1, 8), (1, 1, 8)]:
        words = re.escape(f"k_start.shape={shapes[0]} and k_end.shape={shapes[1]}")
        yield seen(*shapes), r"\(B, T\) or \(1, T\).*" + words
    for name in "float32", "bool", "uint8", "uint32", "uint64":
        of_numpy = seen(*[(1, 8)] * 2, array=np.zeros, dtype=name)
        yield of_numpy, f"signed integers.*{name}"
        of_jax = Visible(*map(jnp.asarray, of_numpy["visible"]))
        yield {"visible": of_jax}, f"signed integers.*{of_jax.k_end.dtype}"
    yield {"visible": masks.causal}, r"as causal\(\) with its parentheses.*got causal"
    yield {"visible": np.ones((8, 8), bool)}, "must be a mask.*got ndarray"
    yield {"visible": None}, "must be a mask.*got NoneType"
    lists = Visible([[0] * 8], [[8] * 8])
    yield {"visible": lists}, "Visible of two arrays, got Visible"
    few = masks.documents(np.zeros(6, int))
    yield {"visible": few}, "sequence of 8 tokens, got 6 ids"
    for scale in np.nan, np.inf, -1e39, True, "large", "1", 1j, np.array([0.3]):
        yield {"scale": scale}, "scale must be one finite number.*known"
    for cap in 0, -1.0, np.inf, np.nan, 1e39, 1e-39, True, "x", "30", [30.0]:
        got = re.escape(str(cap))
        yield {"soft_cap": cap}, f"soft_cap must be one finite number above 0 .* {got}"
    for shape, dtype in ((3,), "float32"), ((4, 1), "float32"), ((4,), "int32"):
        words = rf"sinks must be .*\(4,\), one .* got {dtype} {re.escape(str(shape))}"
        yield {"sinks": np.ones(shape, dtype)}, words
    known = ".*".join(backends.IMPLEMENTATIONS)
    yield {"implementation": "cudnn"}, f"implementation='cudnn' is not one of {known}"


@pytest.mark.parametrize("wrong, words", list(wrong_arguments()))
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


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_intervals_that_decrease_or_share_keys_are_refused(array, rng):
    """Of queries that see [0, 2) and [2, 5): of one the first ends a key later."""
    x = jnp.float32(rng.standard_normal((2, 8, 2, 8)))
    right = np.broadcast_to([[[0]], [[2]]], (2, 2, 8)), np.array([[[2]], [[5]]])
    right = Visible(right[0].copy(), np.broadcast_to(right[1], (2, 2, 8)).copy())
    whole = Visible(right.k_start[0], right.k_end[1])
    np.testing.assert_allclose(
        attention(x, x, x, visible=Visible(*map(array, right))),
        attention(x, x, x, visible=whole),
        atol=1e-6,
    )

    @jax.jit
    @checkify.checkify
    def checked(visible):
        check_increasing(visible)

    for place, words in (
        (5, "for the query at 5 of row 1: join them with"),
        (
            slice(3, 6),
            "k_end of interval 0 of row 1: 3 at 5 and 2 after it",
        ),
    ):
        wrong = Visible(right.k_start, right.k_end.copy())
        wrong.k_end[0, 1, place] = 3
        if place == 5:  # and those behind it
            wrong.k_end[0, 1, 6:] = 3
        wrong = Visible(*map(array, wrong))
        with pytest.raises(ValueError, match=words):
            attention(x, x, x, visible=wrong)
        with pytest.raises(checkify.JaxRuntimeError, match=words):
            checked(Visible(*map(jnp.asarray, wrong)))[0].throw()
    assert checked(Visible(*map(jnp.asarray, right)))[0].get() is None


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


TPU, TRITON = TPU_FORWARD["v5e"], TritonBlocks(64, 64, 4, 2)


@pytest.mark.parametrize(
    "blocks, changes, words",
    [
        (BlockSizes(64, 64), {"block_q": 0}, "block_q=0.* integers from 1 on"),
        (BlockSizes(64, 64), {"block_k": -1}, "block_k=-1.* integers from 1 on"),
        (BlockSizes(64, 64), {"block_q": 64.0}, r"64\.0.* integers from 1 on"),
        (BlockSizes(64, 64), {"block_k": True}, "True.* integers from 1 on"),
        (TPU, {"rows": 100}, "powers of 2 from 128 on, got .*rows=100"),
        (TPU, {"columns": 64}, "powers of 2 from 128 on, got .*columns=64"),
        (TPU, {"live_columns": 0}, "from 128 on, got .*live_columns=0"),
        (TPU, {"ahead": -1}, "ahead and behind must be at least 0, .*ahead=-1"),
        (TPU, {"block_k": 0}, "block_k at least 1, got .*block_k=0"),
        (
            HopperBlocks(64, 2),
            {"block_k": -64},
            "multiple of 64, got .*=-64.*next is 64",
        ),
        (HopperBlocks(64, 2), {"stages": 1}, "at least 2, got .*stages=1"),
        (TRITON, {"block_k": 48}, "powers of 2 from 16 on, got block_q=.*block_k=48"),
        (TRITON, {"warps": 3}, "a power of 2 up to 32.*warps=3"),
        (TRITON, {"stages": 0}, "stages at least 1.*stages=0"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else None,
)
def test_sizes_that_no_kernel_has_are_refused(blocks, changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(blocks, **changes)
