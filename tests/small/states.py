"""A small run's checkpoints, and what was logged of them."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from tests.small.runs import assert_equal_bits
from training.saved.checkpoint import Checkpoints

FINGERPRINT = {"model": {"layers": 2, "rope_theta": 1e4, "scaling": {"factor": 2.0}}}
STEPS = 10, 20, 30
# Orbax leaves coroutines behind where a read or a write fails.
LEAVES_COROUTINES = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("swept"),
]


def state(step: int) -> Any:
    """Arrays of some types, other ones at every step."""
    draw = np.random.default_rng(step).standard_normal
    return {
        "step": jnp.int32(step),
        "params": {
            "matrix": jnp.asarray(draw((64, 48)), jnp.float32),
            "half": jnp.asarray(draw((33,)), jnp.bfloat16),
        },
    }


def broken(step: int, value: float = np.nan) -> Any:
    """A state whose matrix has one element that is not finite."""
    changed = state(step)
    changed["params"]["matrix"] = changed["params"]["matrix"].at[3, 5].set(value)
    return changed


def abstract(tree: Any) -> Any:
    place = SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree
    )


def checkpoints(
    directory: Path, say: Any = print, keep: int = 3, sleep: Any = None
) -> Checkpoints:
    """By default an error that may pass fails the test, as nothing waits for it."""
    options = {"keep": keep, "fingerprint": FINGERPRINT, "say": say, "sleep": sleep}
    return Checkpoints(directory, **options)


def assert_restores(saved: Checkpoints, step: int) -> None:
    restored, meta = saved.restore(abstract(state(0)))
    assert meta["step"] == step
    assert_equal_bits(restored, state(step))
