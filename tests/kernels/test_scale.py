"""Any scale gives the right results and gradients, in every type and implementation."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from tests.simulated import BACKENDS
from tests.steps import StepCase, answer, compiled, truth

pytestmark = pytest.mark.thorough

CASE = StepCase(60, 130, group=2, batch=1)
DIGITS = {jnp.float32: 1e-5, jnp.float16: 5e-4, jnp.bfloat16: 1e-2}
"""Largest norms of errors, relative to the norm of what is compared."""


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "name, dtype, scale",
    [
        ("reference", jnp.float16, 1e-5),
        ("blockwise", jnp.float16, 1e-5),
        slow("triton", jnp.float16, 1e-5),
        slow("hopper", jnp.float16, 1e-5),
        slow("hopper_deterministic", jnp.float16, -1e-5),
        ("pallas_tpu", jnp.float32, -1e-37),
        slow("pallas_tpu", jnp.bfloat16, 1e-44),
        slow("triton", jnp.float32, 1e-37),
        slow("blockwise", jnp.float32, -1e-44),
        slow("hopper", jnp.bfloat16, -1e-37),
        slow("hopper", jnp.bfloat16, 1e-44),
        slow("hopper_deterministic", jnp.bfloat16, 1e-37),
    ],
)
def test_small_scales_cost_no_digits(name, dtype, scale, rng):
    """Errors of dq and dk are relative to gradients as small as the scale."""
    case = dataclasses.replace(CASE, scale=scale)
    step = case.draw(rng, dtype)
    step = step._replace(dq=np.zeros_like(step.dq))
    if dtype != jnp.float16:
        # So that gradients are no denormal numbers, which are flushed to 0.
        step = step._replace(do=step.do * 2.0**20, delta=step.delta * 2.0**20)
    got = answer(compiled(BACKENDS[name], scale)(step.astype(dtype)), step)
    exact = truth(case, step)
    assert (np.isneginf(got.lse) == np.isneginf(exact.lse)).all()
    for field in ("out", "dv", "dq", "dk"):
        x, true = (getattr(answer, field) for answer in (got, exact))
        size = np.linalg.norm(true)
        assert size > 0
        # A scale that is no normal number leaves nothing of dq and dk.
        error = np.linalg.norm(x - true) / max(size, 1e-30)
        assert error <= DIGITS[dtype], (field, error)
