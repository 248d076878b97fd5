"""Rings of GPU kernels, the steps of all devices on one, against float64.

On a GPU these are the kernels that it has; elsewhere they are interpreted.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.backends.triton_gpu.launch import Launch
from tests.cases.attention import COVERING, Case
from tests.rings import assert_as_on_one_device, one_device_ring
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
    backend = BACKENDS["triton"]
    if IS_SIMULATED and case.length > 1000:
        backend = SimulatedGpu(Launch(80, LARGE_BLOCKS, interpreted_call))
    assert_as_on_one_device(rng, case, backend, make=one_device_ring)


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
    backend = BACKENDS[implementation]
    assert_as_on_one_device(rng, case, backend, dtype, one_device_ring)
