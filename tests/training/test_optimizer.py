"""The schedule's values, the decay mask, clipping, and refused settings."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tasks.text import TextRun
from tests.families import FAMILIES
from tests.small_llama import config_of, partition_of
from training.mesh import MeshShape
from training.optimizer import OptimizerSettings, decayed, make_optimizer

SETTINGS = OptimizerSettings(
    peak_lr=1e-2, end_lr=1e-3, warmup_steps=10, total_steps=110, clip_norm=math.inf
)


def test_schedule_rises_linearly_then_falls_as_a_cosine_and_stays():
    _, schedule = make_optimizer(SETTINGS)
    quarter = 1e-3 + 9e-3 * 0.5 * (1 + math.cos(math.pi / 4))
    expected = {0: 0.0, 5: 5e-3, 10: 1e-2, 35: quarter, 60: 5.5e-3}
    expected |= dict.fromkeys((110, 111, 10**6), 1e-3)
    for step, rate in expected.items():
        assert float(schedule(step)) == pytest.approx(rate, rel=1e-6, abs=1e-9)
    # Traced with the state's step.
    assert float(jax.jit(schedule)(jnp.int32(5))) == pytest.approx(5e-3, rel=1e-6)
    _, at_once = make_optimizer(dataclasses.replace(SETTINGS, warmup_steps=0))
    assert float(at_once(0)) == pytest.approx(1e-2, rel=1e-6)


def test_decayed_are_the_matrices_of_a_model_with_every_part():
    parts = FAMILIES["gpt_oss"] | FAMILIES["gemma3"]
    parts |= {"model__tied_embeddings": False}
    model = TextRun(config_of("striped", **parts), partition_of(MeshShape())).model
    found = set()

    def check(path, is_decayed, axes):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        # Every matrix has an axis of the hidden size, and another one.
        is_matrix = "embed" in axes and len(set(axes) - {None}) > 1
        assert is_decayed == is_matrix, (path, axes)
        found.add(name)

    jax.tree_util.tree_map_with_path(check, decayed(model.shapes), model.axes)
    assert {"sinks", "scale", "query_bias", "output_bias", "head", "gate"} <= found


def test_updates_follow_adamw_written_out():
    """Clipped by the norm over all leaves."""
    settings = OptimizerSettings(1e-2, 1e-3, warmup_steps=2, total_steps=9)
    adam = {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3}
    settings = dataclasses.replace(settings, weight_decay=0.2, clip_norm=0.5, **adam)
    optimizer, schedule = make_optimizer(settings)
    rng = np.random.default_rng(1)
    weight = rng.normal(size=(4, 6))
    params = dict(zip("ab", np.float32(np.split(weight, 2)), strict=True))
    state = optimizer.init(params)
    mean, square = np.zeros((4, 6)), np.zeros((4, 6))
    for count in range(5):
        grad = rng.normal(size=(4, 6))
        grads = dict(zip("ab", np.float32(np.split(grad, 2)), strict=True))
        params, state = jax.jit(optimizer.update)(grads, state, params)
        clipped = grad * min(1.0, 0.5 / np.linalg.norm(grad))
        mean = 0.8 * mean + 0.2 * clipped
        square = 0.9 * square + 0.1 * clipped**2
        unbiased = mean / (1 - 0.8 ** (count + 1))
        root = np.sqrt(square / (1 - 0.9 ** (count + 1)))
        step = unbiased / (root + 1e-3) + 0.2 * weight
        weight = weight - float(schedule(count)) * step
    found = np.concatenate([params["a"], params["b"]])
    np.testing.assert_allclose(found, weight, rtol=1e-5, atol=1e-6)


BAD = {
    "peak_lr=0.0": "peak_lr=0.0 must be a finite rate above 0",
    "peak_lr=nan": "peak_lr=nan",
    "peak_lr=inf": "peak_lr=inf",
    "end_lr=0.02": "end_lr=0.02 must be .*peak_lr=0.01",
    "end_lr=-0.0001": "end_lr=-0.0001",
    "total_steps=0": "total_steps=0",
    "warmup_steps=110": "warmup_steps=110 total_steps=110: .* lower warmup",
    "warmup_steps=-1": "warmup_steps=-1",
    "weight_decay=-0.1": "weight_decay=-0.1 must be a finite",
    "beta1=1.0": "beta1=1.0",
    "beta2=-0.1": "beta2=-0.1",
    "epsilon=0.0": "epsilon=0.0",
    "clip_norm=0.0": "clip_norm=0.0 must be above 0; inf",
}


@pytest.mark.parametrize("field", BAD)
def test_bad_settings_are_refused_with_a_remedy(field):
    name, value = field.split("=")
    number = int(value) if name.endswith("steps") else float(value)
    with pytest.raises(ValueError, match=BAD[field]):
        dataclasses.replace(SETTINGS, **{name: number})
