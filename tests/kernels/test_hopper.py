"""The Hopper kernels, interpreted, against the reference: values, races, refusals.

Pallas simulates a GPU's shared memory and barriers here. Memory holds nan until it is
written, and what reads or writes without an order between them is reported. Products
of an operand in registers are emulated (see `kernels.hopper.emulation`).
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import reference
from kernels.block_sizes import BlockSizes
from kernels.cases import BFLOAT16_RATIO, QUICK
from kernels.hopper import forward as kernel
from kernels.hopper import launch as hopper
from kernels.hopper.launch import HopperBlocks, Launch
from kernels.merge import Partial
from tests.simulated_hopper import RACES, run_without_wait
from tests.steps import Step, StepCase

SMALL = HopperBlocks(64, 2)
"""Blocks of which short problems have several."""

# Each head size, odd length and type, with a carry and without, in a few programs.
CASES = {
    "one query, scale of zero": (
        StepCase(1, 300, group=2, batch=1, scale=0.0),
        None,
        jnp.bfloat16,
    ),
    "far more keys": (
        StepCase(77, 500, group=1, bound_rows=2, has_carry=True, scale=-0.1),
        SMALL,
        jnp.float16,
    ),
    "far more queries": (
        StepCase(300, 130, group=1, head_dim=100, batch=1, has_carry=True),
        None,
        jnp.bfloat16,
    ),
    "wide heads, a scale that is flushed to zero": (
        StepCase(100, 257, group=4, head_dim=256, batch=1, scale=-1e-42),
        None,
        jnp.bfloat16,
    ),
}


def attend(step: Step, scale: float, **options) -> Partial:
    q, k, v, _, _, _, start, stop, carry = step
    return hopper.forward(q, k, v, start, stop, scale=scale, carry=carry, **options)


def simulate(step: Step, scale: float, blocks: HopperBlocks | None) -> Partial:
    launch = Launch(blocks, RACES)
    program = functools.partial(attend, scale=scale, launch=launch)
    program = jax.jit(program, compiler_options=QUICK)
    return jax.block_until_ready(program(step))


def truth(step: Step, scale: float, dtype: jnp.dtype = jnp.float64) -> Partial:
    """What the reference answers, in float64 or a narrower type."""

    def program(step: Step) -> Partial:
        q, k, v, _, _, _, start, stop, carry = step
        return reference.forward(q, k, v, start, stop, scale=scale, carry=carry)

    with jax.enable_x64(dtype == jnp.float64):
        program = jax.jit(program, compiler_options=QUICK)
        # Done when it returns: it may read the step's own memory.
        return jax.block_until_ready(program(step.astype(dtype)))


def errors(got: Partial, exact: Partial) -> np.ndarray:
    """Relative norms of the errors of out and lse."""
    got, exact = (
        [np.asarray(x, np.float64) for x in partial] for partial in (got, exact)
    )
    seen = np.isfinite(exact[1])
    np.testing.assert_array_equal(np.isneginf(got[1]), ~seen)
    pairs = (got[0], exact[0]), (got[1][seen], exact[1][seen])
    return np.array(
        [
            np.linalg.norm(x - truth) / max(np.linalg.norm(truth), 1e-2)
            for x, truth in pairs
        ]
    )


def assert_true(
    rng: np.random.Generator,
    case: StepCase,
    blocks: HopperBlocks | None,
    dtype: jnp.dtype,
) -> None:
    step = case.draw(rng, dtype)
    got = simulate(step.astype(dtype), case.scale, blocks)
    assert {x.dtype for x in got} == {np.dtype(np.float32)}
    exact = truth(step, case.scale)
    found = errors(got, exact)
    allowed = errors(truth(step, case.scale, dtype), exact)
    assert (found <= BFLOAT16_RATIO * allowed + 1e-6).all(), (found, allowed)


@pytest.mark.parametrize("name", CASES)
def test_step_is_as_exact_as_the_reference_and_races_with_nothing(name, capfd, rng):
    assert_true(rng, *CASES[name])
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 100, 128, 256])
@pytest.mark.parametrize("bound_rows", [1, 2])
def test_step_of_any_shape_equals_the_reference(
    bound_rows, head_dim, group, capfd, rng
):
    case = StepCase.of_any_length(rng, 512, group, head_dim, bound_rows)
    assert_true(rng, case, None, rng.choice(hopper.TYPES))
    assert "RACE DETECTED" not in capfd.readouterr().out


GAPS = StepCase(512, 512, group=1, batch=1)


def step_of_tiles(rng: np.random.Generator, *bounds: tuple[int, int]) -> Step:
    """Each 128 rows see what they are told."""
    start, stop = np.repeat(np.array(bounds, np.int32), 128, axis=0).T[:, None]
    return GAPS.draw(rng, jnp.bfloat16)._replace(start=start, stop=stop)


def test_keys_that_no_tile_sees_and_rows_that_see_nothing_are_never_computed(rng):
    """They are nan, and 0 · nan is nan: nothing of them may be multiplied."""
    step = step_of_tiles(rng, (70, 120), (70, 128), (256, 384), (448, 384))
    exact = truth(step, GAPS.scale)
    unseen = np.isin(np.arange(GAPS.keys) // 64, (0, 2, 3, 6, 7))
    step.k[:, unseen] = step.v[:, unseen] = np.nan
    step.q[:, 384:] = np.nan
    got = simulate(step.astype(jnp.bfloat16), GAPS.scale, SMALL)
    assert max(errors(got, exact)) <= 1e-2
    np.testing.assert_array_equal(got[0][:, 384:], 0)
    np.testing.assert_array_equal(got[1][..., 384:], -np.inf)


def test_nan_shows_in_every_row_that_sees_it_and_in_no_other(rng):
    step = step_of_tiles(rng, (0, 64), (0, 128), (64, 200), (128, 512))
    step.k[:, 100] = np.nan
    out, lse = simulate(step.astype(jnp.bfloat16), GAPS.scale, SMALL)
    reached = np.repeat([False, True, True, False], 128)
    np.testing.assert_array_equal(np.isnan(out).any(axis=(0, 2, 3)), reached)
    np.testing.assert_array_equal(np.isnan(lse).any(axis=(0, 1)), reached)


def test_rows_that_see_nothing_keep_their_carry(rng):
    step = dataclasses.replace(GAPS, has_carry=True).draw(rng, jnp.bfloat16)
    step = step._replace(start=step.start * 0 + 5, stop=step.stop * 0)
    step = step.astype(jnp.bfloat16)
    got = simulate(step, GAPS.scale, SMALL)
    for x, before in zip(got, step.carry, strict=True):
        np.testing.assert_array_equal(x, before)


# By barrier, and number as they are traced. Of the other waits, that for the queries is
# beyond the interpreter, and the rest order nothing in memory.
WAITS = {
    "first keys": ("k_full", 0),
    "keys": ("k_full", 1),
    "values": ("v_full", 0),
    "last values": ("v_full", 1),
    "room for keys": ("k_empty", 0),
    "room for values": ("v_empty", 0),
    "room for the last values": ("v_empty", 1),
}
QUICK_WAITS = "values", "room for keys"


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK_WAITS else pytest.param(name, marks=pytest.mark.slow)
        for name in WAITS
    ],
)
def test_a_wait_that_is_left_out_is_reported(name, monkeypatch, capfd, rng):
    """So that the tests above could fail."""
    case = StepCase(128, 512, group=1, batch=1)
    step = case.draw(rng, jnp.bfloat16)
    step = step._replace(start=step.start * 0, stop=step.stop * 0 + 512)

    def run() -> None:
        simulate(step.astype(jnp.bfloat16), case.scale, SMALL)

    waits, failure = run_without_wait(kernel, *WAITS[name], run, monkeypatch)
    assert waits == {
        **{"q_full": 1, "schedule": 2},
        **{"k_full": 2, "v_full": 2, "k_empty": 2, "v_empty": 3},
    }
    assert "phase" in failure or "RACE DETECTED" in capfd.readouterr().out


def forward(
    dtype: jnp.dtype = jnp.bfloat16,
    head_dim: int = 64,
    sizes: BlockSizes | None = None,
    **launch,
) -> None:
    """Refuses what the launcher refuses; computes nothing."""
    x = jax.ShapeDtypeStruct((1, 8, 1, head_dim), dtype)
    bound = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    how = {"scale": 0.1, "block_sizes": sizes, "launch": Launch(**launch)}
    jax.eval_shape(functools.partial(hopper.forward, **how), x, x, x, bound, bound)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32, jnp.float8_e4m3fn])
def test_types_that_the_kernels_do_not_multiply_are_refused(dtype):
    words = f"bfloat16 or float16, got {jnp.dtype(dtype).name}: cast"
    with pytest.raises(ValueError, match=words):
        forward(dtype, interpret=RACES)


@pytest.mark.parametrize(
    "sizes, words",
    [
        ((64, 128), r"block_q .* must be 128, got BlockSizes\(block_q=64"),
        ((128, 96), "a multiple of 64, got .*block_k=96.*: the next is 128"),
        ((128, 640), "at most 232448 bytes, got 671904 of .*block_k=640.*: make"),
    ],
)
def test_tiles_that_do_not_fit_are_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        forward(sizes=BlockSizes(*sizes), interpret=RACES)


def test_heads_that_are_too_large_are_not_implemented():
    words = re.escape("up to 256 numbers, got q.shape=(1, 8, 1, 257): name another")
    with pytest.raises(NotImplementedError, match=words):
        forward(head_dim=257, interpret=RACES)


def test_without_a_hopper_gpu_it_is_not_implemented():
    with pytest.raises(NotImplementedError, match="needs an H100 or H200.*'cpu'"):
        forward()
