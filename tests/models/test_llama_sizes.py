"""Sizes and executions of which no model can be made."""

import jax.numpy as jnp
import pytest

from models.memory import Execution
from models.sizes import LanguageModelConfig

GOOD = {
    "vocab_size": 40,
    "hidden_size": 36,
    "feed_forward_size": 88,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
}


@pytest.mark.parametrize(
    "changes, message",
    [
        *(({name: 0}, f"at least 1, .*: {name}=0") for name in GOOD),
        (
            {"num_layers": -1, "head_dim": 0},
            "at least 1, .*: num_layers=-1, head_dim=0",
        ),
        ({"num_kv_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
        ({"num_kv_heads": 8}, "num_heads=4 must be a multiple of num_kv_heads=8"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"rope_theta": 0.0}, "rope_theta=0.0 must be a number above 0"),
        ({"norm_epsilon": -1e-6}, "norm_epsilon=-1e-06 must be a number above 0"),
    ],
)
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
