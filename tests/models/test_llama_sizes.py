"""Sizes and executions of which no model can be made."""

import jax.numpy as jnp
import pytest

from models.memory import Execution
from models.sizes import LanguageModelConfig
from tests.cases import table

GOOD = {
    "vocab_size": 40,
    "hidden_size": 36,
    "feed_forward_size": 88,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
}


@pytest.mark.parametrize("changes, message", table("runs.txt", "sizes"))
def test_sizes_that_make_no_model_are_refused(changes, message):
    LanguageModelConfig(**GOOD)
    with pytest.raises(ValueError, match=message):
        LanguageModelConfig(**GOOD | changes)


@pytest.mark.parametrize(
    "remat, chunk, message",
    [("most", 0, "remat='most' must be one of"), ("nothing", -1, "chunk=-1 must be")],
)
def test_impossible_executions_are_refused(remat, chunk, message):
    with pytest.raises(ValueError, match=message):
        Execution(jnp.dtype("float32"), remat, chunk)
