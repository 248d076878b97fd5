"""The models that tests/fixtures/make_hf_models.py made, and what ours make of them."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_collections
import numpy as np
from flax import nnx

from configs import base as base_config
from kernels import masks
from kernels.layouts import permute, unpermute
from models.abstract import Model
from models.sizes import LanguageModelConfig
from tasks.systems import attention_system
from tasks.text import TextRun
from tests.small.runs import small_config
from tools import convert_hf
from tools.lib.hf.config import WITH_IMAGES, experts_form, fused, model_config
from tools.lib.hf.names import text_name, weights_of
from tools.lib.hf.reading import load
from tools.lib.hf.tensor_files import TensorFiles
from training.sharding.mesh import Partition

DIRECTORY = Path(__file__).parents[1] / "fixtures" / "hf_models"
NAMES = (
    *("llama", "llama_gqa", "llama_tied", "llama_scaled", "mistral"),
    *("qwen2", "qwen3", "gemma2", "gemma3", "olmo2", "olmo3", "smollm3"),
    *("granite", "gemma", "ministral", "seed_oss", "phi3", "qwen3_5"),
    *("phi3_longrope", "ministral3", "qwen3_5_yarn"),
    *("mistral3", "qwen2_5_vl", "qwen3_vl"),
    *("mixtral", "olmoe", "qwen3_moe", "gpt_oss", "qwen3_5_moe"),
    *("glm4_moe", "glm4_moe_norm"),
)
PROMPT = 16
"""Tokens that were given; those after them follow greedily."""


def fields(name: str) -> dict[str, Any]:
    """A model's config.json."""
    return json.loads((DIRECTORY / name / "config.json").read_text())


def expected(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int32 (48,), and Hugging Face's logits float32 (48, V) for them."""
    arrays = np.load(DIRECTORY / name / "expected.npz")
    return arrays["tokens"], arrays["logits"]


def exact(name: str) -> np.ndarray | None:
    """The same logits in float64, of a model with Gated DeltaNet."""
    return np.load(DIRECTORY / name / "expected.npz").get("exact")


def run_config(
    model: str | LanguageModelConfig, **overrides: Any
) -> ml_collections.ConfigDict:
    """A config whose model is the fixture of this name, or of this record."""
    overrides = {"implementation": "reference", "compute_dtype": "float32"} | overrides
    config = small_config(Path(), Path(), **overrides)
    plain = base_config.get_config()
    config.model, config.rope_scaling = plain.model, plain.rope_scaling
    if isinstance(model, str):
        model = model_config(fields(model))
    config.update(convert_hf.settings_of(model))
    return config


def loaded(name: str, model: Model, partition: Partition) -> Any:
    """The fixture's parameters, as `model` has them."""
    with TensorFiles(DIRECTORY / name) as files:
        if fields(name)["model_type"] in WITH_IMAGES:
            files.rename(text_name)
        form = experts_form(fields(name))
        weights = weights_of(model, fused(fields(name)), form)
        return load(files, weights, model, partition)


def logits(
    config: ml_collections.ConfigDict, partition: Partition
) -> Callable[[Any, np.ndarray], np.ndarray]:
    """A program from parameters and tokens (T,) to logits (T, V), on the ring."""
    run = TextRun(config, partition)
    model, mesh = run.model, partition.mesh
    layout, ring_size = attention_system(config).layout, mesh.shape["ring"]
    attend, mix = run.attention, run.mix

    @jax.jit
    def compute(parameters: Any, tokens: jax.Array, index: jax.Array) -> jax.Array:
        visible = masks.causal()(index, index.shape[-1])
        module = nnx.merge(model.structure, parameters)
        see = functools.partial(attend, visible=visible)
        hidden = module(tokens, index, see, mix)
        return model.config.logits(hidden, module.head_weight())

    def of(parameters: Any, tokens: np.ndarray) -> np.ndarray:
        index = np.arange(tokens.size, dtype=np.int32)
        rows = np.stack([tokens, index])[:, None].repeat(partition.shards("batch"), 1)
        placed = permute(rows, layout, ring_size, axis=2)
        return np.asarray(unpermute(compute(parameters, *placed), layout, ring_size)[0])

    return of
