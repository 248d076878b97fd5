"""Tests run on 8 simulated CPU devices with strict numeric promotion.

Unless JAX_PLATFORMS names an accelerator: then they run on it. ANNULUS_TEST_SEED=N
gives the fixture `rng` the seed that a failed test printed.
"""

import os
import secrets

import jax
import numpy as np
import pytest

# Nearly all that tests compute is small: compiling takes the time. A third of it goes.
COMPILE_FAST = (
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

if os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + COMPILE_FAST
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Returns a generator with a seed of its own for each test; failures show it."""
    seed = int(os.environ.get("ANNULUS_TEST_SEED") or secrets.randbits(32))
    request.node.add_report_section("setup", "rng", f"ANNULUS_TEST_SEED={seed}")
    return np.random.default_rng(seed)
