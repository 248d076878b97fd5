"""What only the Triton kernels have: guarded arrays, 64-bit offsets, imports.

What all backends have is in `test_backends`.
"""

import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl

from kernels.backends import reference
from kernels.backends.triton_gpu.launch import Launch, Sizes
from kernels.merge import Partial
from kernels.precision import LOG2_E
from tests.kernels.backend_suite import Refusal
from tests.support.simulated_triton import (
    SMALL_BLOCKS,
    interpret,
    interpreted_call,
    pointer,
)
from tests.support.steps import StepCase

pytestmark = pytest.mark.thorough

# The last tiles are not whole: a kernel that takes them for more goes too far.
ODD = StepCase(37, 37, group=1, batch=1)


def results_mistaken(rng: np.random.Generator, **mistake: int) -> Partial:
    """out and lse of a kernel that takes a problem's sizes for others."""

    def call(*operands, sizes: Sizes, **options):
        return interpreted_call(*operands, sizes=replace(sizes, **mistake), **options)

    backend = Launch(80, SMALL_BLOCKS, call)
    q, k, v, *_ = ODD.draw(rng).astype(jnp.float32)
    bounds = jnp.zeros((1, 37), jnp.int32), jnp.full((1, 37), 37)
    return jax.block_until_ready(backend.forward(q, k, v, *bounds, scale=ODD.scale))


def test_what_is_read_outside_of_an_array_shows(rng):
    """Nothing more is seen, but 0 · nan is nan."""
    assert not any(np.isnan(x).any() for x in results_mistaken(rng, keys=37))
    assert np.isnan(results_mistaken(rng, keys=38)[0]).all()


def test_what_is_written_outside_of_an_array_is_found(rng):
    with pytest.raises(jax.errors.JaxRuntimeError, match="written outside of the arr"):
        results_mistaken(rng, queries=38)


def test_what_is_not_written_shows(rng):
    assert np.isnan(results_mistaken(rng, depth=63)[0]).any()


def test_triton_compiles_after_it_interpreted(rng):
    """What is patched for the one would break the other."""
    results_mistaken(rng)
    for module in tl, tl.core:
        assert tl.core.is_builtin(module.dot) and tl.core.is_builtin(module.arange)
    assert tl.core.is_builtin(tl.tensor.__add__)
    assert tl.max is tl.standard.max and not triton.knobs.runtime.interpret


TILE = 16
TOKENS = 2**24
"""Of 256 numbers each: 32 bits do not count that many."""

SCALE = 0.1
FAR = Sizes(TILE, TILE, 1, 1, 256, 1, SCALE * LOG2_E, None, TILE, TILE)


def last_tile(tokens: int) -> np.ndarray:
    """Returns the ranges of the last tile of a sequence, which is partial."""
    return np.array([tokens // TILE - 1, *[tokens // TILE] * 3], np.int32)


def there(x: np.ndarray, tokens: int = TILE):
    """The pointer to so many tokens, of which only the last ones are there."""
    return pointer(x.ctypes.data - (tokens - TILE) * 256 * x.itemsize, x.dtype)


def far_step(rng: np.random.Generator) -> list[np.ndarray]:
    """q, k, v and do of a tile, (1, 16, 1, 256) each."""
    step = StepCase(TILE, TILE, group=1, head_dim=256, batch=1).draw(rng)
    return [np.asarray(x, np.float32) for x in step[:4]]


def attended_keys(step: list[np.ndarray], tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns out and lse of 16 queries that see the last 16 keys.

    tokens: keys in all.
    """
    q, k, v, _ = step
    end = np.full((1, TILE), tokens, np.int32)
    bounds = np.stack([end - TILE, end])
    nothing = np.zeros(1, np.float32)
    out = np.zeros_like(q)
    lse = np.zeros((1, 1, TILE), np.float32)
    last = last_tile(tokens)
    near = [there(x) for x in (bounds, last, nothing, nothing, out, lse)]
    pointers = there(q), there(k, tokens), there(v, tokens), *near
    interpret("forward", pointers, 1, replace(FAR, keys=tokens))
    return out, lse


def gradients_of_queries(
    step: list[np.ndarray], tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns dk and dv by the last 16 queries, which see all 16 keys.

    tokens: queries in all.
    """
    q, k, v, do = step
    seen = np.zeros((1, TILE), np.int32), np.full((1, TILE), TILE, np.int32)
    _, lse = reference.forward(q, k, v, *seen, scale=SCALE)
    # Memory that is nowhere written is nowhere taken.
    all_lse, all_delta = (np.zeros((1, 1, tokens), np.float32) for _ in range(2))
    bounds = np.zeros((2, 1, tokens), np.int32)
    given = np.asarray(lse), np.ones_like(lse), seen
    for x, end in zip((all_lse, all_delta, bounds), given, strict=True):
        x[..., -TILE:] = end
    dk, dv = np.zeros_like(k), np.zeros_like(v)
    last = last_tile(tokens)
    near = [there(x) for x in (all_lse, all_delta, bounds, last, dk, dv)]
    pointers = there(q, tokens), there(k), there(v), there(do, tokens), *near
    interpret("backward_dkv", pointers, 1, replace(FAR, queries=tokens))
    return dk, dv


@pytest.mark.parametrize("results", [attended_keys, gradients_of_queries])
def test_tiles_at_the_end_of_a_long_sequence_are_found(results, rng):
    """As the same tiles alone, to the bit: only offsets differ."""
    step = far_step(rng)
    for far, near in zip(results(step, TOKENS), results(step, TILE), strict=True):
        assert near.any()
        np.testing.assert_array_equal(far, near)


def test_without_jax_triton_it_is_not_implemented(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    refusal = Refusal(NotImplementedError, r"install 'annulus-attention\[triton\]'")
    refusal.check(Launch(90))
