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
LAST = np.array([TOKENS // TILE - 1, *[TOKENS // TILE] * 3], np.int32)
"""Ranges of one tile, which is partial."""


def there(x: np.ndarray, tokens: int = TILE):
    """The pointer to so many tokens, of which only the last ones are there."""
    return pointer(x.ctypes.data - (tokens - TILE) * 256 * x.itemsize, x.dtype)


def far_step(
    rng: np.random.Generator,
) -> tuple[list[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """q, k, v and do of a tile, and bounds by which all is seen."""
    step = StepCase(TILE, TILE, group=1, head_dim=256, batch=1).draw(rng)
    operands = [np.asarray(x, np.float32) for x in step[:4]]
    return operands, (np.zeros((1, TILE), np.int32), np.full((1, TILE), TILE, np.int32))


def test_keys_at_the_end_of_a_long_sequence_are_found(rng):
    (q, k, v, _), seen = far_step(rng)
    want = reference.forward(q, k, v, *seen, scale=SCALE)
    bounds = np.stack(seen) + np.int32(TOKENS - TILE)
    nothing, out, lse = np.zeros(1, np.float32), *(np.zeros_like(x) for x in want)
    near = [there(x) for x in (bounds, LAST, nothing, nothing, out, lse)]
    pointers = there(q), there(k, TOKENS), there(v, TOKENS), *near
    interpret("forward", pointers, 1, replace(FAR, keys=TOKENS))
    np.testing.assert_allclose(out, want[0], atol=1e-5)
    np.testing.assert_allclose(lse, want[1], atol=1e-5)


def test_queries_at_the_end_of_a_long_sequence_are_found(rng):
    (q, k, v, do), seen = far_step(rng)
    _, lse = reference.forward(q, k, v, *seen, scale=SCALE)
    rows = np.asarray(lse), np.ones_like(lse)
    given = q, k, v, do, *rows, *seen
    _, *want = reference.backward(*given, scale=SCALE, dq=np.zeros_like(q))
    # Memory that is nowhere written is nowhere taken.
    all_lse, all_delta = (np.zeros((1, 1, TOKENS), np.float32) for _ in range(2))
    bounds = np.zeros((2, 1, TOKENS), np.int32)
    for x, end in zip((all_lse, all_delta, bounds), (*rows, seen), strict=True):
        x[..., -TILE:] = end
    dk, dv = np.zeros_like(k), np.zeros_like(v)
    near = [there(x) for x in (all_lse, all_delta, bounds, LAST, dk, dv)]
    pointers = there(q, TOKENS), there(k), there(v), there(do, TOKENS), *near
    interpret("backward_dkv", pointers, 1, replace(FAR, queries=TOKENS))
    for got, exact in zip((dk, dv), want, strict=True):
        np.testing.assert_allclose(got, exact, atol=1e-4)


def test_without_jax_triton_it_is_not_implemented(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    refusal = Refusal(NotImplementedError, r"install 'annulus-attention\[triton\]'")
    refusal.check(Launch(90))
