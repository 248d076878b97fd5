"""The Hopper backward kernels, interpreted, against the reference: values and races.

Pallas simulates a GPU here, as in `test_hopper`. Products of an operand in registers
and additions by TMA are emulated (see `kernels.hopper.emulation`).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels import reference
from kernels.cases import BFLOAT16_RATIO, QUICK
from kernels.hopper import backward as kernel
from kernels.hopper import launch as hopper
from kernels.hopper.launch import Launch
from tests.simulated_hopper import RACES, run_without_wait
from tests.steps import Step, StepCase

# Each head size, odd length and type, in a few programs. With a carry there are rows
# that see nothing here, but have an lse.
CASES = {
    "one query, scale of zero": (
        StepCase(1, 300, group=2, batch=1, scale=0.0),
        jnp.bfloat16,
    ),
    "far more keys": (
        StepCase(77, 400, group=1, bound_rows=2, has_carry=True, scale=-1e-5),
        jnp.float16,
    ),
    "far more queries": (
        StepCase(300, 130, group=3, head_dim=100, batch=1, has_carry=True),
        jnp.bfloat16,
    ),
    "wide heads, in a certain order": (
        StepCase(100, 70, group=2, head_dim=256, batch=1),
        jnp.bfloat16,
    ),
}

DETERMINISTIC_CASES = {
    "one query, several heads": (
        StepCase(1, 300, group=3, has_carry=True, scale=-1e-5),
        jnp.float16,
    ),
    "far more queries": (
        StepCase(300, 130, group=1, head_dim=128, batch=1, has_carry=True),
        jnp.bfloat16,
    ),
}

Gradients = tuple[jax.Array, jax.Array, jax.Array]


def with_lse(step: Step, scale: float) -> Step:
    """The step with the result over all keys in place of that over the others."""
    with jax.enable_x64(True):
        q, k, v, _, _, _, start, stop, carry = step.astype(jnp.float64)
        forward = functools.partial(reference.forward, scale=scale)
        forward = jax.jit(forward, compiler_options=QUICK)
        partial = forward(q, k, v, start, stop, carry=carry)
        return step._replace(carry=tuple(np.asarray(x) for x in partial))


def attend(backend, scale: float, step: Step, **options) -> Gradients:
    q, k, v, d_out, delta, dq, start, stop, (_, lse) = step
    given = q, k, v, d_out, lse, delta, start, stop
    return backend.backward(*given, scale=scale, dq=dq, **options)


def simulate(step: Step, scale: float, **launch) -> Gradients:
    launch = Launch(interpret=RACES, **launch)
    program = functools.partial(attend, hopper, scale, launch=launch)
    program = jax.jit(program, compiler_options=QUICK)
    return jax.block_until_ready(program(step))


def truth(step: Step, scale: float, dtype: jnp.dtype = jnp.float64) -> Gradients:
    """What the reference answers, in float64 or a narrower type."""
    with jax.enable_x64(dtype == jnp.float64):
        program = functools.partial(attend, reference, scale)
        program = jax.jit(program, compiler_options=QUICK)
        # Done when it returns: it may read the step's own memory.
        return jax.block_until_ready(program(step.astype(dtype)))


def errors(got: Gradients, exact: Gradients, step: Step) -> np.ndarray:
    """Relative norms of the errors of the share of dq, of dk and of dv."""
    before = step.dq, 0, 0
    found = []
    for x, true, old in zip(got, exact, before, strict=True):
        x, true = (np.asarray(y, np.float64) for y in (x, true))
        found.append(np.linalg.norm(x - true) / max(np.linalg.norm(true - old), 1e-2))
    return np.array(found)


def assert_true(
    rng: np.random.Generator, case: StepCase, dtype: jnp.dtype, **launch
) -> None:
    step = with_lse(case.draw(rng, dtype), case.scale)
    got = simulate(step.astype(dtype), case.scale, **launch)
    assert {x.dtype for x in got} == {np.dtype(np.float32)}
    exact = truth(step, case.scale)
    found = errors(got, exact, step)
    allowed = errors(truth(step, case.scale, dtype), exact, step)
    assert (found <= BFLOAT16_RATIO * allowed + 1e-6).all(), (found, allowed)


@pytest.mark.parametrize("name", CASES)
def test_step_is_as_exact_as_the_reference_and_races_with_nothing(name, capfd, rng):
    assert_true(rng, *CASES[name])
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize("name", DETERMINISTIC_CASES)
def test_deterministic_step_is_as_exact_and_races_with_nothing(name, capfd, rng):
    assert_true(rng, *DETERMINISTIC_CASES[name], is_deterministic=True)
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("head_dim", [64, 100, 128, 256])
@pytest.mark.parametrize("bound_rows", [1, 2])
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_step_of_any_shape_equals_the_reference(
    is_deterministic, bound_rows, head_dim, group, capfd, rng
):
    case = StepCase.of_any_length(rng, 512, group, head_dim, bound_rows)
    dtype = rng.choice(hopper.TYPES)
    assert_true(rng, case, dtype, is_deterministic=is_deterministic)
    assert "RACE DETECTED" not in capfd.readouterr().out


EITHER = pytest.mark.parametrize(
    "is_deterministic", [False, pytest.param(True, marks=pytest.mark.slow)]
)

GAPS = StepCase(512, 512, group=1, batch=1, head_dim=128)


def step_of_tiles(rng: np.random.Generator, *bounds: tuple[int, int]) -> Step:
    """Each 128 rows see what they are told."""
    start, stop = np.repeat(np.array(bounds, np.int32), 128, axis=0).T[:, None]
    step = GAPS.draw(rng, jnp.bfloat16)._replace(start=start, stop=stop)
    return with_lse(step, GAPS.scale)


@EITHER
def test_keys_that_no_tile_sees_and_rows_that_see_nothing_are_never_computed(
    is_deterministic,
    rng,
):
    """They are nan, and 0 · nan is nan: nothing of them may be multiplied."""
    step = step_of_tiles(rng, (130, 200), (130, 256), (256, 384), (448, 384))
    exact = truth(step, GAPS.scale)
    unseen = np.isin(np.arange(GAPS.keys) // 128, (0, 3))
    step.k[:, unseen] = step.v[:, unseen] = np.nan
    step.q[:, 384:] = step.d_out[:, 384:] = np.nan
    step_16 = step.astype(jnp.bfloat16)
    got = simulate(step_16, GAPS.scale, is_deterministic=is_deterministic)
    assert max(errors(got, exact, step)) <= 1e-2
    np.testing.assert_array_equal(got[0][:, 384:], step.dq[:, 384:])
    for gradient in got[1:]:
        np.testing.assert_array_equal(gradient[:, unseen], 0)


@EITHER
def test_rows_of_a_partial_tile_that_see_nothing_contribute_nothing(
    is_deterministic, rng
):
    """Whether they saw anything elsewhere (and have an lse) or not."""
    case = dataclasses.replace(GAPS, queries=100, keys=100)
    step = case.draw(rng, jnp.bfloat16)
    start = np.where(np.arange(100) < 50, 0, 100)[None].astype(np.int32)
    step = with_lse(step._replace(start=start, stop=start * 0 + 100), case.scale)
    lse = step.carry[1].copy()
    assert np.isneginf(lse[..., 50:]).all()
    lse[..., 75:] = 3.0
    step = step._replace(carry=(step.carry[0], lse))
    dq, dk, dv = simulate(
        step.astype(jnp.bfloat16), case.scale, is_deterministic=is_deterministic
    )
    np.testing.assert_array_equal(dq[:, 50:], step.dq[:, 50:])
    assert max(errors((dq, dk, dv), truth(step, case.scale), step)) <= 1e-2


@EITHER
def test_nan_shows_in_the_gradients_of_all_that_sees_it_and_of_nothing_else(
    is_deterministic,
    rng,
):
    step = step_of_tiles(rng, (0, 128), (128, 256), (128, 384), (384, 512))
    step.d_out[:, 200] = np.nan
    dq, dk, dv = simulate(
        step.astype(jnp.bfloat16), GAPS.scale, is_deterministic=is_deterministic
    )
    for gradient, reached in (dq, [200]), (dk, range(128, 256)), (dv, range(128, 256)):
        found = np.isnan(gradient).any(axis=(0, 2, 3))
        np.testing.assert_array_equal(np.flatnonzero(found), list(reached))


# By barrier, and number as they are traced. Of the others, those for keys and values
# are implied by those for queries here, and the rest order nothing in memory.
WAITS = {
    "queries": ("q_full", 0),
    "gradients of results": ("do_full", 0),
    "room for gradients of scores": ("ds_exchange", 0),
    "gradients of the last scores": ("ds_exchange", 1),
    "room for queries": ("q_empty", 0),
    "room for gradients of results": ("do_empty", 0),
}
QUICK_WAITS = "room for gradients of scores", "room for queries"


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK_WAITS else pytest.param(name, marks=pytest.mark.slow)
        for name in WAITS
    ],
)
def test_a_wait_that_is_left_out_is_reported(name, monkeypatch, capfd, rng):
    """So that the tests above could fail."""
    case = StepCase(256, 128, group=1, batch=1, head_dim=128)
    step = case.draw(rng, jnp.bfloat16)
    step = step._replace(start=step.start * 0, stop=step.stop * 0 + 128)
    step = with_lse(step, case.scale).astype(jnp.bfloat16)

    def run() -> None:
        simulate(step, case.scale)

    waits, failure = run_without_wait(kernel, *WAITS[name], run, monkeypatch)
    assert waits == {
        **{"k_full": 1, "v_full": 1, "q_full": 1, "do_full": 1},
        **{"q_empty": 2, "do_empty": 2, "ds_exchange": 2},
    }
    assert "phase" in failure or "RACE DETECTED" in capfd.readouterr().out


def backward(
    dtype: jnp.dtype, head_dim: int, interpret: plgpu.InterpretGPUParams | None
):
    """Refuses what the launcher refuses; computes nothing."""
    x = jax.ShapeDtypeStruct((1, 8, 1, head_dim), dtype)
    dq = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    row = jax.ShapeDtypeStruct((1, 1, 8), jnp.float32)
    bound = jax.ShapeDtypeStruct((1, 8), jnp.int32)

    def program(dq, *given):
        return hopper.backward(*given, scale=0.1, dq=dq, launch=Launch(None, interpret))

    jax.eval_shape(program, dq, x, x, x, x, row, row, bound, bound)


@pytest.mark.parametrize(
    "dtype, head_dim, interpret, error, words",
    [
        (jnp.float32, 64, RACES, ValueError, "bfloat16 or float16, got float32"),
        (jnp.bfloat16, 257, RACES, NotImplementedError, "heads of up to 256"),
        (jnp.bfloat16, 64, None, NotImplementedError, "needs an H100 or H200.*'cpu'"),
    ],
    ids=["type", "head size", "device"],
)
def test_what_there_is_no_kernel_for_is_refused(
    dtype, head_dim, interpret, error, words
):
    with pytest.raises(error, match=words):
        backward(dtype, head_dim, interpret)
