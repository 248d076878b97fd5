"""Blockwise attention: equal to the reference, lazy about tiles, small in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.backends import blockwise, reference
from kernels.backends import tile_ranges as tiles
from kernels.backends.block_sizes import BlockSizes
from kernels.one_device import attention

SCALE = 0.3
BATCH, QUERIES, KEYS, HEADS, KV_HEADS, DEPTH = 2, 19, 14, 4, 2, 3


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape)


def operands(
    rng: np.random.Generator, queries: int, keys: int
) -> tuple[np.ndarray, ...]:
    """q, k, v, the gradient of the result, and a dq gathered so far."""
    q, kv = (BATCH, queries, HEADS, DEPTH), (BATCH, keys, KV_HEADS, DEPTH)
    return tuple(normal(rng, *shape) for shape in (q, kv, kv, q, q))


def solve(module, sizes, given, bounds, carry=None):
    """(out, lse, dq, dk, dv) of one backend."""
    q, k, v, do, lse, delta, dq = given
    run = {"scale": SCALE, "block_sizes": sizes}
    results = module.forward(q, k, v, *bounds, carry=carry, **run)
    return *results, *module.backward(q, k, v, do, lse, delta, *bounds, dq=dq, **run)


compiled = jax.jit(solve, static_argnums=(0, 1))


@jax.jit
def with_residuals(q, k, v, do, dq, bounds):
    """Returns arguments of `solve`, with the lse and delta of the reference."""
    out, lse = reference.forward(q, k, v, *bounds, scale=SCALE)
    return q, k, v, do, lse, jnp.einsum("bthd,bthd->bht", out, do), dq


def assert_close(got, want) -> None:
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize(
    "block, bound_rows",
    [((1, 1), 1), ((3, 5), BATCH), ((64, 4), BATCH)],
)
def test_any_block_size_equals_the_reference(float64, block, bound_rows, rng):
    """From a carry and a dq on; some intervals are empty, or start after they end."""
    drawn = rng.integers(0, KEYS + 1, (2, bound_rows, QUERIES), np.int32)
    bounds = tuple(np.sort(drawn))
    given = with_residuals(*operands(rng, QUERIES, KEYS), bounds)
    carry = normal(rng, *given[0].shape), normal(rng, BATCH, HEADS, QUERIES)
    got = compiled(blockwise, BlockSizes(*block), given, bounds, carry)
    assert {x.dtype for x in got} == {np.dtype(np.float64)}
    assert_close(got, compiled(reference, None, given, bounds, carry))


LENGTH, BLOCK = 32, 8
SIZES = BlockSizes(BLOCK, BLOCK)


@pytest.fixture
def fresh_traces():
    """Traces this test's programs with the module's patches, and no other test's."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.thorough
@pytest.mark.usefixtures("float64", "fresh_traces")
def test_tile_ranges_alone_decide_what_runs_and_what_runs_unmasked(monkeypatch, rng):
    """Given ranges in which whole tiles are full, it computes these under any bounds.

    Bounds that allow nothing show that full tiles have no mask; bounds that allow
    everything show that tiles outside of the ranges are not visited.
    """
    edges = rng.integers(0, 5, (2, BATCH, 4), np.int32)
    start, stop = (BLOCK * np.repeat(x, BLOCK, axis=1) for x in np.sort(edges))
    whole_tiles = np.minimum(start, stop), np.maximum(start, stop)
    given = with_residuals(*operands(rng, LENGTH, LENGTH), whole_tiles)

    def lie(ranges):
        return lambda start, stop, *sizes: ranges(
            *map(jnp.asarray, whole_tiles), *sizes
        )

    for name in "key_ranges", "query_ranges":
        monkeypatch.setattr(blockwise, name, lie(getattr(tiles, name)))
    run = jax.jit(lambda bounds: solve(blockwise, SIZES, given, bounds))
    want = compiled(reference, None, given, whole_tiles)
    for allowed in 0, LENGTH:
        bounds = np.zeros_like(start), np.full_like(stop, allowed)
        assert_close(run(bounds), want)


def forward(q, k, v):
    return attention(q, k, v, implementation="blockwise")


def forward_and_backward(q, k, v):
    return jax.vjp(forward, q, k, v)[1](q)


def temporary_bytes(function, length: int) -> int:
    """Returns the bytes a program needs beside its arguments and results."""
    x = jax.ShapeDtypeStruct((1, length, 8, 64), jnp.float32)
    program = jax.jit(function).lower(x, x, x).compile()
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.thorough
def test_memory_is_linear_in_the_length_and_far_below_the_score_matrix():
    scores = 8 * 4096**2 * 4  # bytes of all heads
    used = temporary_bytes(forward_and_backward, 4096)
    assert 0 < temporary_bytes(forward, 4096) < used < scores / 8
    assert used < 2.1 * temporary_bytes(forward_and_backward, 2048)
