"""The models that tests/fixtures/make_hf_llama.py made, and what ours make of them."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_collections
import numpy as np
from flax import nnx

from kernels import masks
from kernels.layouts import permute, unpermute
from kernels.ring_attention import make_ring_attention
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
    model, mesh = text.model(config, partition), partition.mesh
    layout, ring_size = base.attention_system(config).layout, mesh.shape["ring"]
    attend = make_ring_attention(mesh, layout=layout, implementation="reference")

    @jax.jit
    def compute(parameters: Any, tokens: jax.Array, index: jax.Array) -> jax.Array:
        visible = masks.causal()(index, index.shape[-1])
        llama = nnx.merge(model.structure, parameters)
        seeing = functools.partial(attend, visible=visible)
        return llama(tokens, index, seeing) @ llama.head_weight()

    def run(parameters: Any, tokens: np.ndarray) -> np.ndarray:
        index = np.arange(tokens.size, dtype=np.int32)
        rows = np.stack([tokens, index])[:, None].repeat(partition.shards("batch"), 1)
        placed = permute(rows, layout, ring_size, axis=2)
        return np.asarray(unpermute(compute(parameters, *placed), layout, ring_size)[0])

    return run
