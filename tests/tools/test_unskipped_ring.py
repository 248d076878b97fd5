"""The benchmark's baseline: right, and really without any skipping."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import blockwise, reference
from kernels.block_sizes import BlockSizes
from tools.lib.benchmarks import unskipped as unskipped_ring


def random_operands(rng: np.random.Generator, length: int, heads: int, kv_heads: int):
    """q, k, v, d_out (2, T, ·, 16); lse, delta (2, H, T); increasing bounds (1, T)."""

    def normal(*shape: int):
        return jnp.asarray(rng.standard_normal((2, *shape)), jnp.float32)

    q, d_out = normal(length, heads, 16), normal(length, heads, 16)
    k, v = normal(length, kv_heads, 16), normal(length, kv_heads, 16)
    bounds = np.sort(rng.integers(0, length + 1, (2, 1, length), np.int32))
    rows = normal(heads, length) + 4, normal(heads, length)
    return (q, k, v), d_out, rows, (jnp.asarray(bounds[0]), jnp.asarray(bounds[1]))


def jitted(module):
    """forward and backward of a backend, in the same blocks."""
    settings = {"scale": 0.3, "block_sizes": BlockSizes(block_q=8, block_k=16)}
    steps = module.forward, module.backward
    return [jax.jit(functools.partial(step, **settings)) for step in steps]


@pytest.mark.parametrize(("length", "kv_heads"), [(32, 4), (37, 2), (15, 1)])
def test_unskipped_results_equal_the_reference(length, kv_heads, rng):
    qkv, d_out, (lse, delta), bounds = random_operands(rng, length, 4, kv_heads)
    forward, backward = jitted(unskipped_ring)
    true_forward, true_backward = jitted(reference)
    got = forward(*qkv, *bounds, carry=(d_out, lse))
    want = true_forward(*qkv, *bounds, carry=(d_out, lse))
    arguments = *qkv, d_out, lse, delta, *bounds
    got += backward(*arguments, dq=qkv[0])
    want += true_backward(*arguments, dq=qkv[0])
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_hidden_tiles_are_computed_all_the_same(rng):
    """Their values are multiplied by zero, which shows if one is not a number."""
    (q, k, v), *_ = random_operands(rng, 32, 2, 2)
    causal = jnp.zeros((1, 32), jnp.int32), jnp.arange(1, 33, dtype=jnp.int32)[None]
    v = v.at[:, -1].set(jnp.nan)
    out, _ = jitted(unskipped_ring)[0](q, k, v, *causal)
    assert jnp.isnan(out).all()
    out, _ = jitted(blockwise)[0](q, k, v, *causal)
    assert not jnp.isnan(out[:, :16]).any()
