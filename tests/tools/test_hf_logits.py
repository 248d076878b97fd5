"""Logits and greedy tokens of every family equal transformers'."""

import itertools

import numpy as np
import pytest

from tasks.text import TextRun
from tests.small_llama import partition_of
from tests.tools import hf_models
from training.mesh import MeshShape

BOUND = 2e-5
"""Between float32 logits of up to 6, in layers of the same operations."""
SYSTEMS = "ring", "striped", "zigzag"
NAMES = hf_models.NAMES

# Each model on a ring; the slow tests have all the others.
FAST = {
    (name, (4, 8)[number % 2], SYSTEMS[number % 3]) for number, name in enumerate(NAMES)
}
ALL = [
    pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)
    for case in itertools.product(NAMES, (4, 8), SYSTEMS)
]


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize(("name", "ring", "attention"), ALL)
def test_logits_and_greedy_tokens_equal_transformers(name, ring, attention):
    """48 tokens, with windows of 7 and 8."""
    config = hf_models.run_config(name, attention=attention)
    partition = partition_of(MeshShape(ring=ring))
    model = TextRun(config, partition).model
    parameters = hf_models.loaded(name, model, partition)
    tokens, expected = hf_models.expected(name)
    logits = hf_models.logits(config, partition)(parameters, tokens)
    np.testing.assert_allclose(logits, expected, atol=BOUND, rtol=0)
    # Every token is the likeliest after those before it, as greedy decoding has it.
    followers = tokens[hf_models.PROMPT :]
    assert followers.size == 32
    best = logits.argmax(axis=-1)[hf_models.PROMPT - 1 : -1]
    np.testing.assert_array_equal(best, followers)
