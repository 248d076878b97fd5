"""The models that tests/fixtures/make_hf_llama.py made, and what ours make of them."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from flax import nnx

from kernels import masks
from kernels.layouts import permute, unpermute
from kernels.ring import make_ring_attention
from tasks import base, text
from tests.runs import small_config
from tools.convert_hf import settings_of
from tools.lib.hf.config import llama_config
from training.mesh import Partition

DIRECTORY = Path(__file__).parents[1] / "fixtures" / "hf_llama"
PROMPT = 16
"""Tokens that were given; those after them follow greedily."""


def fields(name: str) -> dict[str, Any]:
    """A model's config.json."""
    return json.loads((DIRECTORY / name / "config.json").read_text())


def expected(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int32 (48,), and Hugging Face's logits float32 (48, V) for them."""
    arrays = np.load(DIRECTORY / name / "expected.npz")
    return arrays["tokens"], arrays["logits"]


def run_config(name: str, **overrides: Any) -> ml_collections.ConfigDict:
    """A config whose model is the fixture's."""
    config = small_config(Path(), Path(), compute_dtype="float32", **overrides)
    config.update_from_flattened_dict(settings_of(llama_config(fields(name))))
    return config


def logits(
    config: ml_collections.ConfigDict, partition: Partition
) -> Callable[[Any, np.ndarray], np.ndarray]:
    """A program from parameters and tokens (T,) to logits (T, V), on the ring."""
    model = text.model(config, partition)
    layout = base.attention_system(config).layout
    ring_size = partition.mesh.shape["ring"]
    attend = make_ring_attention(
        partition.mesh, layout=layout, implementation="reference"
    )

    @jax.jit
    def compute(parameters: Any, tokens: jax.Array, index: jax.Array) -> jax.Array:
        visible = masks.causal()(index, index.shape[-1])
        llama = nnx.merge(model.structure, parameters)
        seeing = functools.partial(attend, visible=visible)
        return llama(tokens, index, seeing) @ llama.head[...]

    def run(parameters: Any, tokens: np.ndarray) -> np.ndarray:
        rows = partition.shards("batch")
        index = np.arange(tokens.size, dtype=np.int32)
        tokens, index = (
            permute(jnp.tile(row, (rows, 1)), layout, ring_size)
            for row in (tokens, index)
        )
        result = compute(parameters, tokens, index)
        return np.asarray(unpermute(result, layout, ring_size)[0])

    return run
