"""Attention sinks and soft caps, against a softmax written out and its autodiff."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kernels import layouts as layout
from kernels import masks
from kernels.decode_attention import CachedAttention
from kernels.masks import Visible
from kernels.one_device import attention, attention_with_lse
from kernels.ring_attention import make_ring_attention, ring_attention
from tests.rings import ring_mesh

ROWS, TOKENS, HEADS, KV_HEADS, DEPTH = 2, 24, 4, 2, 8
CAP = 1.2
IDS = np.repeat([[0, 1, 1, 2], [0, 0, 0, 4]], TOKENS // 4, axis=1)
MASKS = {
    "causal": masks.causal(),
    "window": masks.window(5),
    "prefix": masks.prefix(7),
    "documents": masks.documents(IDS),
    "padding": masks.causal() & masks.padding(TOKENS - 5),
}
each_cap = pytest.mark.parametrize("soft_cap", [None, CAP])


def masks_with_caps():
    """Each mask without and with a cap; the second one of each is slow."""
    for number, (name, mask) in enumerate(MASKS.items()):
        for soft_cap, is_slow in ((None, number % 2), (CAP, 1 - number % 2)):
            marks = [pytest.mark.slow] * is_slow
            yield pytest.param(mask, soft_cap, marks=marks, id=f"{name}-{soft_cap}")


def operands(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """q, k, v and sinks."""

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    kv = ROWS, TOKENS, KV_HEADS, DEPTH
    return normal(ROWS, TOKENS, HEADS, DEPTH), normal(*kv), normal(*kv), normal(HEADS)


def written_out(q, k, v, sinks, mask, soft_cap=None):
    """(out, lse) of a softmax over all keys and one more, whose value is 0."""
    k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v))
    s = jnp.einsum("bthd,bshd->bhts", q, k) * DEPTH**-0.5
    if soft_cap is not None:
        s = soft_cap * jnp.tanh(s / soft_cap)
    index = np.arange(TOKENS, dtype=np.int32)
    k_start, k_end = (bound[:, None, :, None] for bound in mask(index, TOKENS))
    s = jnp.where((k_start <= index) & (index < k_end), s, -jnp.inf)
    sink = jnp.broadcast_to(sinks[:, None, None], (*s.shape[:3], 1))
    s = jnp.concatenate([s, sink], axis=3)  # (B, H, T, S + 1)
    p = jax.nn.softmax(s, axis=3)[..., :-1]
    return jnp.einsum("bhts,bshd->bthd", p, v), jax.nn.logsumexp(s, axis=3)


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(attend, arrays, cotangents):
    """The results, and the gradients of all arrays."""
    results, pull = jax.vjp(attend, *arrays)
    return results, pull(cotangents)


def assert_true(attend, arrays, mask, soft_cap, rng):
    """Holds `attend`, from arrays to (out, lse), to what is written out in float64."""
    index = np.arange(TOKENS)
    cotangents = tuple(
        np.asarray(mask.fill_padding(x.astype(np.float32), index, axis=axis))
        for x, axis in (
            (rng.standard_normal((ROWS, TOKENS, HEADS, DEPTH)), 1),
            (rng.standard_normal((ROWS, HEADS, TOKENS)), 2),
        )
    )
    want = functools.partial(written_out, mask=mask, soft_cap=soft_cap)
    with jax.enable_x64():
        wide = jax.tree.map(lambda x: x.astype(np.float64), (arrays, cotangents))
        expected = with_gradients(want, *wide)
    got = with_gradients(attend, arrays, cotangents)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x) for x in (a, b))
        is_real = np.isfinite(a)  # the lse of padding is not
        assert is_real.mean() > 0.7
        np.testing.assert_allclose(a[is_real], b[is_real], atol=2e-5)


@pytest.mark.thorough(quick=2)
@pytest.mark.parametrize("mask, soft_cap", list(masks_with_caps()))
@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_sink_is_a_key_whose_value_is_zero(mask, soft_cap, implementation, rng):
    def attend(q, k, v, sinks):
        options = {"visible": mask, "sinks": sinks, "soft_cap": soft_cap}
        return attention_with_lse(q, k, v, **options, implementation=implementation)

    assert_true(attend, operands(rng), mask, soft_cap, rng)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind", [pytest.param(layout.Striped(), marks=pytest.mark.slow), layout.Zigzag()]
)
def test_sinks_of_a_mesh_get_the_gradient_of_all_its_devices(kind, rng):
    """Batch over data, heads over tensor: each device has sinks of its own heads."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "ring", "tensor"))
    mask, order = MASKS["documents"], (kind, 2)
    ring = make_ring_attention(mesh, layout=kind, soft_cap=CAP)

    def attend(q, k, v, sinks):
        q, k, v = (layout.permute(x, *order) for x in (q, k, v))
        return layout.unpermute(ring(q, k, v, mask, sinks=sinks), *order)

    arrays = operands(rng)
    out, pull = jax.jit(functools.partial(jax.vjp, attend))(*arrays)
    do = rng.standard_normal(out.shape).astype(np.float32)
    want, want_pull = jax.vjp(
        lambda *x: written_out(*x, mask, CAP)[0], *map(jnp.asarray, arrays)
    )
    np.testing.assert_allclose(out, want, atol=1e-5)
    for got, expected in zip(jax.jit(pull)(do), want_pull(do), strict=True):
        np.testing.assert_allclose(got, expected, atol=3e-5)


def test_rows_that_see_nothing_see_their_sink(rng):
    q, k, v, sinks = operands(rng)
    nothing = Visible(*np.zeros((2, 1, TOKENS), np.int32))
    sinks[0] = -np.inf  # none
    (out, lse), pull = jax.vjp(
        lambda sinks: attention_with_lse(q, k, v, visible=nothing, sinks=sinks),
        jnp.asarray(sinks),
    )
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_allclose(lse, np.broadcast_to(sinks[:, None], lse.shape))
    (d_sinks,) = pull((jnp.ones_like(out), jnp.ones_like(lse)))
    want = np.full(HEADS, ROWS * TOKENS)  # lse is the sink
    want[0] = 0
    np.testing.assert_allclose(d_sinks, want)


def test_sinks_of_minus_infinity_are_none(rng):
    q, k, v, sinks = operands(rng)
    none = np.full_like(sinks, -np.inf)
    got = attention_with_lse(q, k, v, sinks=none)
    for a, b in zip(got, attention_with_lse(q, k, v), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_cap_far_above_all_scores_changes_nothing(rng):
    q, k, v, _ = operands(rng)
    got, want = attention(q, k, v, soft_cap=1e4), attention(q, k, v)
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert np.abs(attention(q, k, v, soft_cap=CAP) - want).max() > 1e-2


@pytest.mark.parametrize("ring, tensor", [(1, 1), (4, 2)])
@each_cap
def test_sinks_and_caps_of_a_cache_are_those_of_attention(ring, tensor, soft_cap, rng):
    """The last queries of a row, which see a window of it."""
    devices = np.array(jax.devices()[: ring * tensor]).reshape(ring, tensor)
    cached = CachedAttention(Mesh(devices, ("ring", "tensor")), soft_cap=soft_cap)
    q, k, v, sinks = operands(rng)
    mask, new = MASKS["window"], 3
    want, _ = written_out(q, k, v, sinks, mask, soft_cap)
    index = np.arange(TOKENS, dtype=np.int32)
    last = np.broadcast_to(index[-new:], (ROWS, new))
    got = jax.jit(cached.attend)(
        *(q[:, -new:], k[None], v[None], np.tile(index, (ROWS, 1))),
        mask(last, TOKENS),
        np.int32(0),
        sinks,
    )
    np.testing.assert_allclose(got, want[:, -new:], atol=1e-5)


def test_shard_map_that_checks_how_values_vary_takes_sinks(rng):
    q, k, v, sinks = operands(rng)
    bounds = (jnp.asarray(b) for b in masks.causal()(np.arange(TOKENS), TOKENS))
    local = functools.partial(
        ring_attention,
        axis_name="ring",
        layout=layout.Contiguous(),
        implementation="reference",
    )
    sharded = jax.shard_map(
        lambda q, k, v, k_start, k_end, sinks: local(
            q, k, v, k_start, k_end, sinks=sinks
        ),
        mesh=ring_mesh(4),
        in_specs=(*(P(None, "ring"),) * 5, P()),
        out_specs=P(None, "ring"),
    )
    operand = q, k, v, *bounds

    def total(attend):
        return jax.jit(jax.value_and_grad(lambda x: jnp.sum(attend(x) ** 2)))

    got = total(lambda x: sharded(*operand, x))(sinks)
    want = total(lambda x: written_out(q, k, v, x, masks.causal())[0])(sinks)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
