"""Tests the oracle against a softmax written out, and JAX's own attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import masks
from kernels.attention import attention_with_lse
from kernels.backends import reference

SCALE = 0.3
forward = jax.jit(functools.partial(reference.forward, scale=SCALE))
backward = jax.jit(functools.partial(reference.backward, scale=SCALE))


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def operands(
    rng: np.random.Generator, queries: int, keys: int, heads: int, kv_heads: int
) -> list[np.ndarray]:
    shapes = (queries, heads), (keys, kv_heads), (keys, kv_heads)
    return [rng.standard_normal((2, *shape, 6)) for shape in shapes]


def bounds(mask: masks.Mask, queries: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """[k_start, k_end) of each query, (1 or B, T)."""
    k_start, k_end = mask(np.arange(queries, dtype=np.int32), keys)
    return k_start.clip(0, keys), k_end.clip(0, keys)


def normal_like(rng: np.random.Generator, x: jax.Array | np.ndarray) -> np.ndarray:
    return rng.standard_normal(x.shape)


@jax.jit
def gradients(qkv, limits, do, d_lse):
    """dq, dk and dv by the oracle's own backward."""
    out, lse = forward(*qkv, *limits)
    delta = jnp.einsum("bthd,bthd->bht", do, out) - d_lse
    dq = jnp.zeros_like(qkv[0])
    dq, dk, dv = backward(*qkv, do, lse, delta, *limits, dq=dq)
    return SCALE * dq, SCALE * dk, dv


def assert_close(got, want, tolerance: float) -> None:
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


IDS = np.array([[0] * 4 + [2] * 5 + [3] * 4, [1] * 11 + [5] * 2], np.int32)

# (mask, T, S, H, K, cap, whether there are sinks). Queries have keys, or sinks.
CASES = {
    "full": (masks.full(), 7, 12, 2, 2, None, False),
    "causal, cap": (masks.causal(), 13, 13, 4, 2, 1.2, False),
    "window, sinks": (masks.window(3), 13, 13, 3, 1, None, True),
    "prefix, sinks, cap": (masks.prefix(np.array([[2], [9]])), 13, 13, 2, 2, 1.2, True),
    "documents": (masks.documents(IDS), 9, 13, 6, 3, None, False),
    "padding, sinks": (masks.padding(9), 13, 13, 2, 2, None, True),
}


def written_out(q, k, v, sinks, visible, soft_cap):
    """(out, lse) of a softmax over all keys and one more, whose value is 0."""
    k, v = jnp.repeat(jnp.stack([k, v]), q.shape[2] // k.shape[2], axis=3)
    s = SCALE * jnp.einsum("bthd,bshd->bhts", q, k)
    if soft_cap is not None:
        s = soft_cap * jnp.tanh(s / soft_cap)
    s = jnp.where(visible, s, -jnp.inf)
    sink = jnp.broadcast_to(sinks[:, None, None], (*s.shape[:3], 1))
    s = jnp.concatenate([s, sink], axis=3)  # (B, H, T, S + 1)
    p = jax.nn.softmax(s, axis=3)[..., :-1]
    return jnp.einsum("bhts,bshd->bthd", p, v), jax.nn.logsumexp(s, axis=3)


@pytest.mark.thorough(quick=2)
@pytest.mark.parametrize("name", CASES)
def test_attention_is_the_softmax_written_out_with_its_derivative(name, rng):
    """And where there are neither caps nor sinks that of JAX, which is in float32."""
    mask, queries, keys, heads, kv_heads, soft_cap, has_sinks = CASES[name]
    qkv = operands(rng, queries, keys, heads, kv_heads)
    k_start, k_end = bounds(mask, queries, keys)
    slot = np.arange(keys)
    visible = (k_start[..., None] <= slot) & (slot < k_end[..., None])
    visible = visible[:, None]  # (B, 1, T, S)
    sinks = rng.standard_normal(heads) if has_sinks else np.full(heads, -np.inf)
    do, d_lse = normal_like(rng, qkv[0]), rng.standard_normal((2, heads, queries))

    @functools.partial(jax.jit, static_argnums=0)
    def with_gradients(attend, *arrays):
        results, pull = jax.vjp(attend, *arrays)
        return *results, *pull((do, d_lse))

    def on_one(q, k, v, sinks):
        seen = masks.Visible(k_start, k_end)
        more = {"soft_cap": soft_cap, "scale": SCALE, "implementation": "reference"}
        return attention_with_lse(q, k, v, visible=seen, sinks=sinks, **more)

    want = functools.partial(written_out, visible=visible, soft_cap=soft_cap)
    got = with_gradients(on_one, *qkv, sinks)
    assert {x.dtype for x in got} == {np.dtype(np.float64)}
    assert_close(got, with_gradients(want, *qkv, sinks), 1e-10)
    if soft_cap is None and not has_sinks:
        with_none = with_gradients(lambda *qkv: on_one(*qkv, None), *qkv)
        assert_close(with_none, got[:-1], 1e-12)
        with jax.numpy_dtype_promotion("standard"):
            of_jax = jax.nn.dot_product_attention(*qkv, mask=visible, scale=SCALE)
        assert_close([of_jax], got[:1], 1e-5)


def empty_rows(queries: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Empty intervals first, in the middle (k_start after k_end) and last."""
    k_start, k_end = np.zeros((2, 1, queries), np.int32)
    k_end[:, 2:] = keys // 2
    k_start[:, 4:6] = keys - 2
    k_end[:, 6:] = keys
    k_start[:, 6:] = keys - 2
    k_start[:, -1:] = keys
    return k_start, k_end


def test_rows_without_visible_keys_are_empty_and_have_no_gradient(rng):
    queries = 9
    qkv = operands(rng, queries, 10, 4, 2)
    limits = empty_rows(queries, 10)
    out, lse = forward(*qkv, *limits)
    empty = np.array([0, 1, 4, 5, 8])
    others = np.setdiff1d(np.arange(queries), empty)
    np.testing.assert_array_equal(out[:, empty], 0)
    np.testing.assert_array_equal(lse[..., empty], -np.inf)
    assert np.isfinite(lse[..., others]).all()

    do, d_lse = normal_like(rng, out), normal_like(rng, lse)
    dq, dk, dv = gradients(qkv, limits, do, d_lse)
    np.testing.assert_array_equal(dq[:, empty], 0)
    # dk and dv are those of the other rows alone.
    few = [qkv[0][:, others], *qkv[1:]]
    limits = [bound[:, others] for bound in limits]
    want = gradients(few, limits, do[:, others], d_lse[..., others])
    assert_close((dq[:, others], dk, dv), want, 1e-12)


def test_carry_and_dq_gather_what_lies_in_two_sets_of_keys(rng):
    """As on a ring: keys in two parts, the second with a carry from the first."""
    q, k, v = operands(rng, 10, 10, 4, 2)
    k_start, k_end = bounds(masks.window(4), 10, 10)
    do, dq = normal_like(rng, q), normal_like(rng, q)
    whole, lse = forward(q, k, v, k_start, k_end)
    delta = np.einsum("bthd,bthd->bht", do, whole)

    carry, gathered, shares = None, dq, []
    for begin, end in (0, 4), (4, 10):
        qkv = q, k[:, begin:end], v[:, begin:end]
        limits = k_start.clip(begin, end) - begin, k_end.clip(begin, end) - begin
        carry = forward(*qkv, *limits, carry=carry)
        gathered, *share = backward(*qkv, do, lse, delta, *limits, dq=gathered)
        shares.append(share)
    assert_close(carry, (whole, lse), 1e-12)
    dk, dv = (np.concatenate(parts, axis=1) for parts in zip(*shares, strict=True))
    want = gradients((q, k, v), (k_start, k_end), do, np.zeros(lse.shape))
    got = SCALE * (gathered - dq), SCALE * dk, dv
    assert_close(got, want, 1e-12)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_results_and_gradients_of_narrow_types_are_float32(dtype, rng):
    qkv = [jnp.asarray(x, dtype) for x in operands(rng, 4, 4, 2, 1)]
    limits = bounds(masks.causal(), 4, 4)
    out, lse = forward(*qkv, *limits)
    dq = jnp.zeros(out.shape, jnp.float32)
    results = backward(*qkv, qkv[0], lse, lse, *limits, dq=dq)
    assert {x.dtype for x in (out, lse, *results)} == {np.dtype(np.float32)}
