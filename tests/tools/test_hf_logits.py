"""Logits and greedy tokens of every family equal transformers', and no part is idle."""

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from flax import traverse_util

from models.rope import RopeScaling
from models.sampling import Sampling
from models.sizes import LanguageModelConfig
from tasks import text
from tasks.generation import generator
from tests.tools import hf_models
from tools.lib.hf.config import model_config
from training.mesh import MeshShape, Partition, make_mesh

BOUND = 2e-5
"""Between float32 logits of up to 6, in layers of the same operations."""
LAYOUTS = {"contiguous": "ring", "striped": "striped", "zigzag": "zigzag"}
NAMES = hf_models.NAMES

# Each model on one device (below) and on a ring; the slow tests have all the others.
FAST = {
    (name, (4, 8)[number % 2], (*LAYOUTS,)[number % 3])
    for number, name in enumerate(NAMES)
}
ALL = [
    pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)
    for case in itertools.product(NAMES, (4, 8), LAYOUTS)
]


def ring_of(size: int) -> Partition:
    return Partition(make_mesh(MeshShape(ring=size), jax.devices()[:size]))


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize(("name", "ring", "layout"), ALL)
def test_logits_and_greedy_tokens_equal_transformers(name, ring, layout):
    """48 tokens, with windows of 7 and 8."""
    config = hf_models.run_config(name, attention=LAYOUTS[layout])
    partition = ring_of(ring)
    model = text.model(config, partition)
    parameters = hf_models.loaded(name, model, partition)
    tokens, expected = hf_models.expected(name)
    logits = hf_models.logits(config, partition)(parameters, tokens)
    np.testing.assert_allclose(logits, expected, atol=BOUND, rtol=0)
    # Every token is the likeliest after those before it, as greedy decoding has it.
    followers = tokens[hf_models.PROMPT :]
    assert followers.size == 32
    best = logits.argmax(axis=-1)[hf_models.PROMPT - 1 : -1]
    np.testing.assert_array_equal(best, followers)


@pytest.mark.parametrize(
    "name",
    [
        name if name == "mistral" else pytest.param(name, marks=pytest.mark.slow)
        for name in NAMES
    ],
)
def test_greedy_tokens_from_the_sharded_cache_equal_transformers(name):
    """Each from those before it, past the windows."""
    config, partition = hf_models.run_config(name, attention="zigzag"), ring_of(4)
    model = text.model(config, partition)
    parameters = hf_models.loaded(name, model, partition)
    tokens, _ = hf_models.expected(name)
    prompt, followers = np.split(tokens, [hf_models.PROMPT])
    sampling = Sampling(temperature=0.0)
    programs = generator(config, partition, sampling, rows=1, cache_tokens=tokens.size)
    found = programs.generate(parameters, [prompt], followers.size, seed=0)
    np.testing.assert_array_equal(np.concatenate(list(found)), followers)


# Of each model, fields without which it would be another one, and what they would be.
PARTS: dict[str, dict[str, Any]] = {
    "llama": {"norm_epsilon": 1e-3},
    "llama_gqa": {"rope_theta": 1e4},
    "llama_tied": {"logit_scale": 0.5, "logit_soft_cap": 30.0},
    "llama_scaled": {
        "qkv_bias": False,
        "output_bias": False,
        "rope_scaling": RopeScaling(),
    },
    "mistral": {"layer_pattern": "", "window": 7},
    "qwen2": {"qkv_bias": False, "layer_pattern": "w", "window": 9},
    "qwen3": {"qk_norm": "", "rope_scaling": RopeScaling("linear", 4.0)},
    "olmo2": {"norms": "before", "qk_norm": ""},
    "gemma2": {
        "attention_scale": 0.0,
        "attention_soft_cap": 0.0,
        "norm_unit_offset": False,
        "activation": "silu",
        "embedding_scale": 1.0,
        "logit_soft_cap": 0.0,
        "norms": "before",
        "layer_pattern": "fw",
        "window": 8,
    },
    "gemma3": {
        "window_rope_theta": 0.0,
        "qk_norm": "",
        "norms": "after",
        "layer_pattern": "wf",
        "embedding_scale": 5.5,
    },
}
FIRST = {
    field: next(name for name in PARTS if field in PARTS[name])
    for name in PARTS
    for field in PARTS[name]
}
"""The model in which the fast tests change a field."""
CHANGES = [
    pytest.param(name, field, marks=() if FIRST[field] == name else pytest.mark.slow)
    for name in PARTS
    for field in PARTS[name]
]


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_logits_on_one_device_equal_transformers(name):
    assert error(name, model_config(hf_models.fields(name))) <= BOUND


@pytest.mark.thorough(quick=2)
@pytest.mark.parametrize(("name", "field"), CHANGES)
def test_each_part_of_a_model_matters(name, field):
    """Without it, the error is 100 bounds."""
    value = PARTS[name][field]
    changes = {field: value}
    if changes == {"layer_pattern": ""}:
        changes |= {"window": 0}
    record = model_config(hf_models.fields(name))
    assert getattr(record, field) != value
    assert error(name, dataclasses.replace(record, **changes)) > 100 * BOUND


def error(name: str, record: LanguageModelConfig) -> float:
    """Returns the largest error of the logits of a model like the fixture, or not.

    It has the fixture's parameters; norms that stand elsewhere are those there.
    """
    partition = ring_of(1)
    plain = model_config(hf_models.fields(name))
    configs = [hf_models.run_config(r, attention="vanilla") for r in (plain, record)]
    models = [text.model(config, partition) for config in configs]
    found = hf_models.loaded(name, models[0], partition)
    found = traverse_util.flatten_dict(found)
    own = {
        path: found[path] if path in found else found[elsewhere(path)]
        for path in traverse_util.flatten_dict(models[1].shapes)
    }
    tokens, expected = hf_models.expected(name)
    run = hf_models.logits(configs[1], partition)
    return abs(run(traverse_util.unflatten_dict(own), tokens) - expected).max()


def elsewhere(path: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part.replace("_norm", "_post_norm") for part in path)
