"""The Triton kernels, interpreted, against the reference: values, guards, refusals."""

import functools
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl

from kernels import reference
from kernels.block_sizes import BlockSizes
from kernels.cases import FLOAT32_TOLERANCE, Answer
from kernels.merge import Partial
from kernels.triton_gpu import launch as triton_gpu
from kernels.triton_gpu.launch import Launch, Sizes
from tests.simulated_triton import (
    SMALL_BLOCKS,
    SimulatedGpu,
    interpret,
    interpreted_call,
    pointer,
)
from tests.steps import Step, StepCase, answer, assert_true, compiled, truth

# Each group, head size and odd length, with a carry and without, in a few programs.
FLOAT32_CASES = {
    "one query, scale of zero": StepCase(1, 70, group=1, kv_heads=2, scale=0.0),
    "one key": StepCase(70, 1, group=2, head_dim=100, bound_rows=2, has_carry=True),
    "far more keys": StepCase(
        37, 300, group=3, head_dim=128, bound_rows=2, sizes=BlockSizes(16, 32)
    ),
    "far more queries": StepCase(
        257, 37, group=4, head_dim=256, batch=1, has_carry=True, scale=-0.1
    ),
    "whole tiles": StepCase(128, 128, group=1, head_dim=3, has_carry=True),
}

NARROW_CASES = {
    "bfloat16": StepCase(101, 201, group=2, head_dim=100, bound_rows=2, has_carry=True),
    "float16": StepCase(70, 257, group=4, head_dim=128, batch=1, scale=-0.1),
}


@pytest.mark.parametrize("name", FLOAT32_CASES)
def test_step_in_float32_equals_the_reference_in_float64(name, rng):
    assert_true(rng, SimulatedGpu(), FLOAT32_CASES[name], jnp.float32)


@pytest.mark.parametrize("name", NARROW_CASES)
def test_step_in_16_bits_is_as_exact_as_the_reference_in_the_same(name, rng):
    assert_true(rng, SimulatedGpu(), NARROW_CASES[name], jnp.dtype(name))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", triton_gpu.TYPES, ids=lambda x: x.__name__)
@pytest.mark.parametrize("group", [1, 2, 3, 8])
@pytest.mark.parametrize("head_dim", [64, 100, 128, 256])
@pytest.mark.parametrize("bound_rows", [1, 2])
def test_step_of_any_shape_equals_the_reference(
    bound_rows, head_dim, group, dtype, rng
):
    case = StepCase.of_any_length(rng, 512, group, head_dim, bound_rows)
    assert_true(rng, SimulatedGpu(), case, dtype)


GAPS = StepCase(192, 320, group=1, batch=1)
GAPS_PROGRAM = compiled(SimulatedGpu(), GAPS.scale)


def step_of_tiles(rng: np.random.Generator, *bounds: tuple[int, int]) -> Step:
    """Each 64 rows see what they are told."""
    start, stop = np.repeat(np.array(bounds, np.int32), 64, axis=0).T[:, None]
    return GAPS.draw(rng)._replace(start=start, stop=stop)


def results_with_gaps(step: Step) -> Answer:
    return answer(GAPS_PROGRAM(step.astype(jnp.float32)), step)


def test_keys_that_no_tile_sees_and_rows_that_see_nothing_are_never_computed(rng):
    """They are nan, and 0 · nan is nan: nothing of them may be multiplied."""
    step = step_of_tiles(rng, (70, 120), (192, 250), (320, 256))
    want = truth(GAPS, step)
    unseen = np.isin(np.arange(GAPS.keys) // 64, (0, 2, 4))
    step.k[:, unseen] = step.v[:, unseen] = np.nan
    step.q[:, 128:] = step.d_out[:, 128:] = np.nan
    got = results_with_gaps(step)
    assert max(got.errors(want).values()) <= FLOAT32_TOLERANCE
    for gradient in got.dk, got.dv:
        np.testing.assert_array_equal(gradient[:, unseen], 0)
    for x in got.out, got.dq:
        np.testing.assert_array_equal(x[:, 128:], 0)
    np.testing.assert_array_equal(got.lse[..., 128:], -np.inf)


@pytest.mark.parametrize("slot, first_row, last_row", [(30, 0, 64), (200, 64, 192)])
def test_nan_shows_in_every_row_that_sees_it_and_in_no_other(
    slot, first_row, last_row, rng
):
    step = step_of_tiles(rng, (0, 128), (64, 256), (128, 320))
    want = results_with_gaps(step)
    step.k[:, slot] = np.nan
    got = results_with_gaps(step)
    reached = np.zeros(GAPS.queries, bool)
    reached[first_row:last_row] = True
    for name, axis in (("out", 1), ("lse", 2), ("dq", 1)):
        rows, clean = (np.moveaxis(getattr(x, name), axis, 0) for x in (got, want))
        is_nan = np.isnan(rows).reshape(len(rows), -1).any(axis=1)
        np.testing.assert_array_equal(is_nan, reached)
        np.testing.assert_array_equal(rows[~reached], clean[~reached])


# The last tiles are not whole: a kernel that takes them for more goes too far.
ODD = StepCase(37, 37, group=1, batch=1)


def results_mistaken(rng: np.random.Generator, **mistake: int) -> Partial:
    """out and lse of a kernel that takes a problem's sizes for others."""

    def call(*operands, sizes: Sizes, **options):
        return interpreted_call(*operands, sizes=replace(sizes, **mistake), **options)

    backend = SimulatedGpu(Launch(80, SMALL_BLOCKS, call))
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

FAR = Sizes(TILE, TILE, 1, 1, 256, 1, 0.1, 0.1 * triton_gpu.LOG2_E, TILE, TILE)
LAST = np.array([TOKENS // TILE - 1, *[TOKENS // TILE] * 3], np.int32)
"""Ranges of one tile, which is partial."""


def there(x: np.ndarray, tokens: int = TILE):
    """The pointer to so many tokens, of which only the last ones are there."""
    return pointer(x.ctypes.data - (tokens - TILE) * 256 * x.itemsize, x.dtype)


def far_step(
    rng: np.random.Generator,
) -> tuple[list[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """q, k, v and d_out of a tile, and bounds by which all is seen."""
    step = StepCase(TILE, TILE, group=1, head_dim=256, batch=1).draw(rng)
    operands = [np.asarray(x, np.float32) for x in step[:4]]
    return operands, (np.zeros((1, TILE), np.int32), np.full((1, TILE), TILE, np.int32))


def test_keys_at_the_end_of_a_long_sequence_are_found(rng):
    (q, k, v, _), seen = far_step(rng)
    want = reference.forward(q, k, v, *seen, scale=FAR.scale)
    bounds = np.stack(seen) + np.int32(TOKENS - TILE)
    nothing, out, lse = np.zeros(1, np.float32), *(np.zeros_like(x) for x in want)
    near = [there(x) for x in (bounds, LAST, nothing, nothing, out, lse)]
    pointers = there(q), there(k, TOKENS), there(v, TOKENS), *near
    interpret("forward", pointers, 1, replace(FAR, keys=TOKENS))
    np.testing.assert_allclose(out, want[0], atol=1e-5)
    np.testing.assert_allclose(lse, want[1], atol=1e-5)


def test_queries_at_the_end_of_a_long_sequence_are_found(rng):
    (q, k, v, d_out), seen = far_step(rng)
    _, lse = reference.forward(q, k, v, *seen, scale=FAR.scale)
    rows = np.asarray(lse), np.ones_like(lse)
    given = q, k, v, d_out, *rows, *seen
    _, *want = reference.backward(*given, scale=FAR.scale, dq=np.zeros_like(q))
    # Memory that is nowhere written is nowhere taken.
    all_lse, all_delta = (np.zeros((1, 1, TOKENS), np.float32) for _ in range(2))
    bounds = np.zeros((2, 1, TOKENS), np.int32)
    for x, end in zip((all_lse, all_delta, bounds), (*rows, seen), strict=True):
        x[..., -TILE:] = end
    dk, dv = np.zeros_like(k), np.zeros_like(v)
    near = [there(x) for x in (all_lse, all_delta, bounds, LAST, dk, dv)]
    pointers = there(q, TOKENS), there(k), there(v), there(d_out, TOKENS), *near
    interpret("backward_keys", pointers, 1, replace(FAR, queries=TOKENS))
    for got, exact in zip((dk, dv), want, strict=True):
        np.testing.assert_allclose(got, exact, atol=1e-4)


def attempt(
    launch: Launch,
    dtype: jnp.dtype = jnp.bfloat16,
    head_dim: int = 64,
    sizes: BlockSizes | None = None,
) -> None:
    """Traces a step, forward and backward; computes nothing."""
    backend = SimulatedGpu(launch)
    x = jax.ShapeDtypeStruct((1, 32, 2, head_dim), dtype)
    wide = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    row = jax.ShapeDtypeStruct((1, 2, 32), jnp.float32)
    bound = jax.ShapeDtypeStruct((1, 32), jnp.int32)
    how = {"scale": 0.1, "block_sizes": sizes}

    def both(x, wide, row, bound):
        given = x, x, x, x, row, row, bound, bound
        grads = functools.partial(backend.backward, *given, dq=wide, **how)
        attend = functools.partial(backend.forward, x, x, x, bound, bound, **how)
        for function in attend, grads:
            try:
                yield function()
            except (ValueError, NotImplementedError) as error:
                yield error

    found = []
    jax.eval_shape(lambda *given: found.extend(both(*given)), x, wide, row, bound)
    forward, backward = found
    if isinstance(forward, Exception):
        # Both refuse, and for one reason.
        assert (type(backward), str(backward)) == (type(forward), str(forward))
        raise forward


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float64, jnp.float8_e4m3fn])
def test_types_that_the_kernels_do_not_compute_in_are_refused(dtype):
    words = f"bfloat16, float16 or float32, got {jnp.dtype(dtype)}: cast"
    with jax.enable_x64(True), pytest.raises(ValueError, match=words):
        attempt(Launch(80, call=interpreted_call), dtype)


def test_heads_that_are_too_large_are_not_implemented():
    words = r"heads of up to 256 numbers, got q.shape=\(1, 32, 2, 257\): use impl"
    attempt(Launch(80, call=interpreted_call), head_dim=256)
    with pytest.raises(NotImplementedError, match=words):
        attempt(Launch(80, call=interpreted_call), head_dim=257)


@pytest.mark.parametrize("sizes", [(100, 64), (64, 48), (8, 64), (64, 8)])
def test_tiles_that_triton_does_not_have_are_refused(sizes):
    words = rf"block_q={sizes[0]}, block_k={sizes[1]}: Triton's tiles are powers of 2"
    with pytest.raises(ValueError, match=words):
        attempt(Launch(80, call=interpreted_call), sizes=BlockSizes(*sizes))


def test_gpus_before_ampere_are_not_implemented():
    with pytest.raises(NotImplementedError, match="8.0 or newer, this one has 7.5"):
        attempt(Launch(75, call=interpreted_call))


def test_without_a_gpu_it_is_not_implemented():
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU, or a mesh"):
        attempt(Launch())


def test_without_jax_triton_it_is_not_implemented(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    with pytest.raises(NotImplementedError, match="install -r requirements-gpu.txt"):
        attempt(Launch(90))


def test_triton_is_imported_only_when_a_step_is_asked_for():
    program = (
        "import sys, kernels.triton_gpu.launch; "
        "print({'triton', 'jax_triton', 'kernels.triton_gpu.kernels'} & {*sys.modules})"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout == "set()\n"
