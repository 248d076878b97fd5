"""Rings of GPU kernels, the steps of all devices on one, against float64.

On a GPU these are the kernels that it has; elsewhere they are interpreted.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.backends.triton_gpu.launch import Launch
from tests.cases.attention import (
    BFLOAT16_RATIO,
    COVERING,
    FLOAT32_TOLERANCE,
    Answer,
    Case,
    Problem,
    solve,
)
from tests.rings import one_device_ring, solve_on_ring
from tests.simulated import BACKENDS
from tests.simulated_triton import LARGE_BLOCKS, SimulatedGpu, interpreted_call

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("steps_in_a_loop")]

IS_SIMULATED = jax.default_backend() == "cpu"
# Interpreted, a step takes a second or more: these are few, the others are slow tests.
QUICK = {
    "hopper": (Case(2, "zigzag", "none", 4, 31, 100, "sinks-cap", heads=4),),
    "triton": (
        Case(2, "zigzag", "none", 4, 31, 100, "sinks-cap"),
        Case(3, "zigzag", "documents", 8, 31, 64, "cap"),
        Case(2, "striped4", "documents", 1, 1, 64, "sinks"),
        Case(1, "zigzag", "documents", 1, 257, 128, heads=2),
    ),
}


def each_case(implementation: str):
    """Returns the cases as parameters of a test."""
    quick = QUICK[implementation]
    slow = [case for case in COVERING if case not in quick]
    marks = [pytest.mark.slow, pytest.mark.timeout(3600)] if IS_SIMULATED else []
    marked = [pytest.param(case, marks=marks) for case in slow]
    return pytest.mark.parametrize("case", [*quick, *marked], ids=lambda it: it.name)


@each_case("triton")
def test_ring_of_triton_in_float32_matches_one_device_in_float64(
    case: Case, rng: np.random.Generator
):
    problem = Problem.of(rng, case)
    backend = BACKENDS["triton"]
    if IS_SIMULATED and case.length > 1000:
        backend = SimulatedGpu(Launch(80, LARGE_BLOCKS, interpreted_call))
    answer = solve_on_ring(case, problem, backend, jnp.float32, one_device_ring)
    errors = answer.errors(solve(problem, jnp.float64))
    assert max(errors.values()) <= FLOAT32_TOLERANCE, errors


HOPPER = ("hopper", "hopper_deterministic"), (jnp.bfloat16, jnp.float16)
KERNELS = list(itertools.product(*HOPPER))
if IS_SIMULATED:  # a case takes minutes: each backward in one of the types
    deterministic = pytest.param(*KERNELS[-1], marks=pytest.mark.slow)
    KERNELS = [KERNELS[0], deterministic]


@each_case("hopper")
@pytest.mark.parametrize(("implementation", "dtype"), KERNELS)
def test_ring_of_hopper_is_as_exact_as_one_device_in_its_type(
    case: Case, implementation: str, dtype: jnp.dtype, rng: np.random.Generator
):
    problem = Problem.of(rng, case, dtype)
    backend = BACKENDS[implementation]
    answer = solve_on_ring(case, problem, backend, dtype, one_device_ring)
    truth = solve(problem, jnp.float64)
    allowed = solve(problem, dtype).errors(truth)
    errors = answer.errors(truth)
    if case.has_sinks:
        del errors["d_sinks"]
        assert_sums(problem, answer)
    for name, error in errors.items():
        assert error <= BFLOAT16_RATIO * allowed[name] + 1e-6, (name, error, allowed)


def assert_sums(problem: Problem, answer: Answer) -> None:
    """Holds d_sinks to the sums that they are, of the answer's own out and lse.

    Errors of out, which is judged by itself, are multiplied by do, which is random:
    what they add up to is of any size, by chance small in the reference. What is left
    is the rounding of n numbers added in float32: of at most about n · 2⁻²⁴ of the sum
    of their magnitudes, and in practice far less.
    """
    products = (problem.do * answer.out).swapaxes(1, 2)  # (B, H, T, D)
    terms = np.concatenate([products, -problem.d_lse[..., None]], axis=-1)
    terms *= -np.exp(problem.sinks[:, None] - answer.lse)[..., None]
    errors = abs(answer.d_sinks - terms.sum((0, 2, 3)))
    sizes = abs(terms).sum((0, 2, 3))
    assert (errors <= FLOAT32_TOLERANCE * sizes).all(), (errors, sizes)
