"""The door for one device: every implementation, every promise, every refusal."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import backend, masks
from kernels.attention import attention, attention_with_lse
from kernels.masks import Visible
from tests.cases import BFLOAT16_RATIO, FLOAT32_TOLERANCE, Answer, Problem, solve

BATCH, HEADS, KV_HEADS, DEPTH = 2, 4, 2, 8
each_implementation = pytest.mark.parametrize("implementation", backend.IMPLEMENTATIONS)


def problem(
    mask: masks.Mask, queries: int, keys: int, dtype: jnp.dtype = jnp.float32
) -> Problem:
    rng = np.random.default_rng()

    def normal(*shape: int) -> np.ndarray:
        x = rng.standard_normal((BATCH, *shape, DEPTH)).astype(dtype)
        return x.astype(np.float64)

    return Problem(
        q=normal(queries, HEADS),
        k=normal(keys, KV_HEADS),
        v=normal(keys, KV_HEADS),
        d_out=normal(queries, HEADS),
        d_lse=rng.standard_normal((BATCH, HEADS, queries)),
        visible=mask(np.arange(queries, dtype=np.int32), keys),
    )


@functools.partial(jax.jit, static_argnames="implementation")
def results(q, k, v, d_out, d_lse, visible, implementation):
    """(out, lse, dq, dk, dv)."""
    run = functools.partial(
        attention_with_lse, visible=visible, implementation=implementation
    )
    found, pull = jax.vjp(run, q, k, v)
    return *found, *pull((d_out, d_lse))


def solve_at_the_door(
    given: Problem, implementation: str, dtype: jnp.dtype = jnp.float32
) -> tuple[jax.Array, ...]:
    q, k, v, d_out = (
        jnp.asarray(x, dtype) for x in (given.q, given.k, given.v, given.d_out)
    )
    d_lse = jnp.asarray(given.d_lse, jnp.float32)
    return results(q, k, v, d_out, d_lse, given.visible, implementation)


def answer(found: tuple[jax.Array, ...]) -> Answer:
    return Answer(*(np.asarray(x, np.float64) for x in found))


def operands(*shape: int) -> list[jax.Array]:
    """q, k and v in float32, all with (T, H) of `shape`."""
    rng = np.random.default_rng()
    x = rng.standard_normal((3, BATCH, *shape, DEPTH)).astype(np.float32)
    return [jnp.asarray(array) for array in x]


def assert_equal(got, want) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


def assert_close(got, want) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


IDS = np.sort(np.random.default_rng(0).integers(0, 6, (BATCH, 300)), axis=1)
REAL = np.array([[140], [290]], np.int32)

# (mask, T, S): lengths that leave a rest in any tile.
CASES = {
    "one token": (masks.causal(), 1, 1),
    "causal": (masks.causal(), 300, 300),
    "fewer queries than keys": (masks.causal(), 37, 300),
    "more queries than keys": (masks.window(50), 300, 37),
    "rows of their own": (masks.documents(IDS), 300, 300),
    "queries that see nothing": (masks.padding(REAL) & masks.causal(), 300, 300),
}


@each_implementation
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_match_the_reference_in_float64(name, implementation):
    given = problem(*CASES[name])
    found = solve_at_the_door(given, implementation)
    assert {x.dtype for x in found} == {np.dtype(np.float32)}
    errors = answer(found).errors(solve(given, jnp.float64))
    assert max(errors.values()) <= FLOAT32_TOLERANCE, errors


@each_implementation
def test_queries_that_see_nothing_give_zeros_and_take_no_gradient(implementation):
    given = problem(*CASES["queries that see nothing"])
    out, lse, dq, dk, dv = solve_at_the_door(given, implementation)
    assert not any(np.isnan(x).any() for x in (out, lse, dq, dk, dv))
    padding = np.arange(300) >= REAL
    for x in out, dq, dk, dv:
        np.testing.assert_array_equal(np.asarray(x)[padding], 0)
    empty = np.isneginf(lse).all(axis=1)
    np.testing.assert_array_equal(empty, padding)


@each_implementation
def test_bfloat16_is_as_exact_as_the_reference_in_bfloat16(implementation):
    given = problem(masks.causal(), 300, 300, jnp.bfloat16)
    found = solve_at_the_door(given, implementation, jnp.bfloat16)
    assert [x.dtype.name for x in found] == ["bfloat16", "float32"] + ["bfloat16"] * 3
    truth = solve(given, jnp.float64)
    errors = answer(found).errors(truth)
    for name, allowed in solve(given, jnp.bfloat16).errors(truth).items():
        assert errors[name] <= BFLOAT16_RATIO * allowed + 1e-6, name


@each_implementation
def test_queries_see_the_past_unless_told(implementation):
    qkv = operands(30, 2)
    got = attention(*qkv, implementation=implementation)
    want = attention(*qkv, visible=masks.causal(), implementation=implementation)
    assert_equal(got, want)
    whole = attention(*qkv, visible=masks.full(), implementation=implementation)
    assert_close(got[:, -1], whole[:, -1])
    assert_close(got[:, 0], qkv[2][:, 0])


@each_implementation
def test_scale_is_that_of_the_head_size_unless_told(implementation):
    q, k, v = operands(30, 2)
    run = functools.partial(attention, implementation=implementation)
    assert_equal(run(q, k, v), run(q, k, v, scale=DEPTH**-0.5))
    assert_close(run(q, k, v, scale=0.7), run(0.7 * DEPTH**0.5 * q, k, v))


@each_implementation
def test_mask_and_its_bounds_give_the_same_with_or_without_jit(implementation):
    """Bounds of NumPy too, which is where a data loader makes them."""
    qkv = operands(30, 2)
    mask = masks.documents(IDS[:, :30])
    bounds = mask(np.arange(30, dtype=np.int32), 30)

    def run(visible, *qkv):
        return attention(*qkv, visible=visible, implementation=implementation)

    want = jax.jit(functools.partial(run, mask))(*qkv)
    assert_close(run(mask, *qkv), want)
    assert_close(jax.jit(run)(bounds, *qkv), want)
    assert_close(run(Visible(*map(jnp.asarray, bounds)), *qkv), want)
    assert_close(run(bounds, *qkv), want)


@each_implementation
@pytest.mark.parametrize("far", [1000, np.iinfo(np.int32).max])
def test_bounds_beyond_the_keys_mean_all_keys_on_that_side(implementation, far):
    qkv = operands(30, 2)
    run = functools.partial(attention, *qkv, implementation=implementation)
    nowhere = jnp.full((1, 30), -far, jnp.int32)
    index = jnp.arange(30, dtype=jnp.int32)[None]
    assert_close(run(visible=Visible(nowhere, -nowhere)), run(visible=masks.full()))
    assert_close(run(visible=Visible(nowhere, index)), run(visible=masks.causal()))
    empty = run(visible=Visible(nowhere, nowhere))
    assert_equal(empty, jnp.zeros_like(empty))


@each_implementation
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_huge_numbers_in_keys_that_nobody_sees_leave_no_trace(implementation, dtype):
    given = problem(masks.padding(270), 300, 300)
    want = solve_at_the_door(given, implementation, dtype)
    given.k[:, 270:] = 1e30
    given.v[:, 270:] = -1e30
    assert_equal(solve_at_the_door(given, implementation, dtype), want)
    for gradient in want[3:]:
        np.testing.assert_array_equal(np.asarray(gradient, np.float32)[:, 270:], 0)


@each_implementation
def test_huge_numbers_in_other_documents_leave_no_trace(implementation):
    ids = np.repeat(np.arange(3), 100)
    given = problem(masks.documents(ids), 300, 300)
    want = solve_at_the_door(given, implementation)
    middle = slice(100, 200)
    given.k[:, :100] = given.k[:, 200:] = 1e15
    given.v[:, :100] = given.v[:, 200:] = -1e30
    out, lse, *gradients = solve_at_the_door(given, implementation)
    assert_equal(lse[..., middle], want[1][..., middle])
    for a, b in zip((out, *gradients), (want[0], *want[2:]), strict=True):
        assert_equal(a[:, middle], b[:, middle])


@each_implementation
def test_vmap_over_operands_and_bounds_equals_a_loop(implementation):
    stacked = [jnp.stack(x) for x in zip(*(operands(30, 2) for _ in range(2)))]
    size = jnp.asarray([3, 17])

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1, 2))
    def gradient(q, k, v, size):
        index = jnp.arange(30, dtype=jnp.int32)[None]
        visible = Visible(index - size, index)
        run = functools.partial(attention, visible=visible)
        return (run(q, k, v, implementation=implementation) ** 2).sum()

    got = jax.vmap(gradient)(*stacked, size)
    for i in range(2):
        want = gradient(*(x[i] for x in stacked), size[i])
        assert_close([x[i] for x in got], want)


@each_implementation
def test_checkpoint_does_not_change_gradients(implementation):
    def loss(q, k, v):
        return (attention(q, k, v, implementation=implementation) ** 2).sum()

    qkv = operands(30, 2)
    got, want = (
        jax.jit(jax.grad(f, (0, 1, 2)))(*qkv) for f in (jax.checkpoint(loss), loss)
    )
    assert_close(got, want)


@pytest.mark.parametrize(
    "q, k, v, words",
    [
        ((8, 4, 6), (8, 2, 6), (8, 2, 6), r"must be \(B, T, H, D\).*q.shape=\(8, 4, 6"),
        ((2, 8, 4, 6), (2, 8, 2, 6), (2, 8, 2), r"must be \(B, T, H, D\)"),
        ((2, 8, 4, 6), (2, 8, 2, 6), (2, 9, 2, 6), "k and v must have one shape"),
        ((2, 8, 4, 6), (3, 8, 2, 6), (3, 8, 2, 6), "batch and head size.*must agree"),
        ((2, 8, 4, 6), (2, 8, 2, 5), (2, 8, 2, 5), "batch and head size.*must agree"),
        ((2, 8, 4, 6), (2, 8, 3, 6), (2, 8, 3, 6), "4 query heads cannot share 3 key"),
        ((2, 8, 4, 6), (2, 8, 0, 6), (2, 8, 0, 6), "4 query heads cannot share 0 key"),
        ((2, 0, 4, 6), (2, 8, 2, 6), (2, 8, 2, 6), "nothing to attend to"),
        ((2, 8, 4, 6), (2, 0, 2, 6), (2, 0, 2, 6), "nothing to attend to"),
        ((2, 8, 4, 0), (2, 8, 2, 0), (2, 8, 2, 0), "nothing to attend to"),
        ((2, 8, 0, 6), (2, 8, 2, 6), (2, 8, 2, 6), "nothing to attend to"),
        ((0, 8, 4, 6), (0, 8, 2, 6), (0, 8, 2, 6), "nothing to attend to"),
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
        (("int32", "int32", "int32"), "floating.*int32"),
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
    words = re.escape(f"visible.lo.shape={shapes[0]} and visible.hi.shape={shapes[1]}")
    with pytest.raises(ValueError, match=r"\(B, T\) or \(1, T\).*" + words):
        attention(x, x, x, visible=visible)


def test_bounds_that_are_no_integers_are_refused():
    x, bound = jnp.zeros((2, 8, 4, 6)), jnp.zeros((1, 8))
    with pytest.raises(ValueError, match="integers.*float32"):
        attention(x, x, x, visible=Visible(bound, bound))


def test_unknown_implementation_is_refused_with_the_known_ones():
    x = jnp.zeros((2, 8, 4, 6))
    known = ".*".join(backend.IMPLEMENTATIONS)
    with pytest.raises(
        ValueError, match=f"implementation='cudnn' is not one of {known}"
    ):
        attention(x, x, x, implementation="cudnn")


def test_best_implementation_is_one_of_them():
    assert backend.choose(None) in backend.IMPLEMENTATIONS.values()
    for name, module in backend.IMPLEMENTATIONS.items():
        assert backend.choose(name) is module
