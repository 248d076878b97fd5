"""Logits and greedy tokens of every family equal transformers'."""

import itertools

import jax
import numpy as np
import pytest

from models.sampling import Sampling
from tasks import text
from tasks.generation import generator
from tests.tools import hf_models
from training.mesh import MeshShape, Partition, make_mesh

BOUND = 2e-5
"""Between float32 logits of up to 6, in layers of the same operations."""
LAYOUTS = {"contiguous": "ring", "striped": "striped", "zigzag": "zigzag"}
NAMES = hf_models.NAMES

# Each model on a ring; the slow tests have all the others.
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
