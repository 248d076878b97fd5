"""Parameters and operations against the model itself and published numbers."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from configs import base, models
from models.flops import num_matrix_parameters, num_parameters, train_flops
from models.sizes import LanguageModelConfig, Lora
from tasks import text
from training.mesh import MeshShape, Partition, make_mesh

each_size = pytest.mark.parametrize("name", models.PAPER_SIZES)

BILLIONS = {
    "1b": 1.244,
    "3b": 3.426,
    "7b": 6.738,
    "13b": 13.016,
    "30b": 32.529,
    "65b": 65.286,
}

# At 4 Ki, 128 Ki and 1 Mi tokens of one causal sequence: TFLOP a token, attention's
# share in percent, and how many times more it is if every key counts.
LENGTHS = (4096, 128 * 1024, 1024 * 1024)
TABLE = {
    "1b": ((0.008, 0.043, 0.291), (14, 83, 98), (1.14, 1.83, 1.98)),
    "3b": ((0.022, 0.085, 0.543), (9, 77, 96), (1.09, 1.77, 1.96)),
    "7b": ((0.043, 0.143, 0.864), (8, 72, 95), (1.08, 1.72, 1.95)),
    "13b": ((0.082, 0.238, 1.366), (6, 68, 94), (1.06, 1.68, 1.94)),
    "30b": ((0.204, 0.508, 2.706), (5, 62, 93), (1.05, 1.62, 1.93)),
    "65b": ((0.406, 0.906, 4.513), (4, 57, 91), (1.04, 1.57, 1.91)),
}

GROUPED = LanguageModelConfig(
    vocab_size=50,
    hidden_size=12,
    feed_forward_size=20,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
)


def llama(name: str) -> LanguageModelConfig:
    return LanguageModelConfig(**models.fields_of(name))


@pytest.fixture(scope="module")
def one_device() -> Partition:
    return Partition(make_mesh(MeshShape(), jax.devices()[:1]))


@each_size
def test_counts_are_the_published_ones_and_those_of_the_models_parameters(
    name, one_device
):
    config = base.get_config()
    config.model.update(models.fields_of(name))
    shapes = text.model(config, one_device).shapes
    sizes = jax.tree.map(lambda leaf: leaf.size, shapes)
    assert num_parameters(llama(name)) == sum(jax.tree.leaves(sizes))
    assert round(num_parameters(llama(name)) / 1e9, 3) == BILLIONS[name]
    matrices = jax.tree_util.tree_leaves_with_path(sizes)
    multiplied = [
        size
        for path, size in matrices
        if "norm" not in str(path) and "embedding" not in str(path)
    ]
    assert num_matrix_parameters(llama(name)) == sum(multiplied)


PARTS: tuple[dict[str, Any], ...] = (
    {"qkv_bias": True, "output_bias": True, "attention_sinks": True},
    {"qk_norm": "head", "norms": "both", "tied_embeddings": True},
    {"qk_norm": "all", "norms": "after"},
    {"layer_pattern": "wwf", "window": 4, "norm_unit_offset": True},
)


@pytest.mark.parametrize("parts", PARTS, ids=lambda parts: ",".join(parts))
def test_counts_are_those_of_the_parameters_of_every_kind_of_model(parts, one_device):
    sizes = dataclasses.replace(GROUPED, **parts)
    config = base.get_config()
    config.model.update({name: getattr(sizes, name) for name in config.model})
    shapes = jax.tree.leaves(text.model(config, one_device).shapes)
    assert num_parameters(sizes) == sum(leaf.size for leaf in shapes)
    # The head's product is there whether it is the embedding or not.
    assert num_matrix_parameters(sizes) == num_matrix_parameters(GROUPED)
    assert train_flops(sizes, 7, 9) == train_flops(GROUPED, 7, 9)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama3_8b", 8.030), ("qwen3_8b", 8.191), ("gemma3_12b", 11.766)],
)
def test_families_have_the_parameters_of_the_published_ones(name, billions):
    config = models.get_config(f"{name}/v5p")
    assert round(num_parameters(text.sizes(config)) / 1e9, 3) == billions


@each_size
@pytest.mark.parametrize("column", range(len(LENGTHS)))
def test_operations_of_a_token_are_those_of_the_table(name, column):
    length = LENGTHS[column]
    tera, share, ratio = (values[column] for values in TABLE[name])
    causal = train_flops(llama(name), length, length * (length + 1) / 2)
    attention = causal - train_flops(llama(name), length, 0)
    every_key = train_flops(llama(name), length, length**2)
    assert round(causal / length / 1e12, 3) == tera
    assert round(100 * attention / causal) == share
    assert round(every_key / causal, 2) == ratio


def naive_train_flops(config: LanguageModelConfig, visible: np.ndarray) -> int:
    """Counts the products of a forward one by one, and triples them.

    visible: bool (T, T), which query attends to which key.
    """
    embed, depth = config.hidden_size, config.head_dim
    of_token = 0
    for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads):
        of_token += 2 * embed * heads * depth  # query, key, value
    of_token += 2 * config.num_heads * depth * embed  # output
    of_token += 3 * 2 * embed * config.feed_forward_size  # gate, up, down
    # A score and a share of the result, for every pair and head.
    of_pair = config.num_heads * (2 * depth + 2 * depth)
    layer = len(visible) * of_token + int(visible.sum()) * of_pair
    logits = len(visible) * 2 * embed * config.vocab_size
    return 3 * (config.num_layers * layer + logits)


def test_operations_of_packed_documents_are_those_counted_one_by_one():
    ids = np.array([0] * 5 + [1] * 2 + [2] * 9)
    token = np.arange(ids.size)
    visible = (ids[:, None] == ids) & (token[:, None] >= token)
    pairs = sum(n * (n + 1) // 2 for n in (5, 2, 9))
    assert train_flops(GROUPED, ids.size, pairs) == naive_train_flops(GROUPED, visible)


def test_frozen_matrices_have_no_gradients_to_count():
    """Adapters of an eighth of the width: of 3 products of a matrix, 2 are left."""
    adapted = dataclasses.replace(GROUPED, lora=Lora(rank=2, targets="q,down"))
    tokens, pairs = 7, 9
    whole = train_flops(GROUPED, tokens, pairs)
    frozen = 2 * num_matrix_parameters(GROUPED) * tokens  # one product of each matrix
    # A and B of query (12 to 6 x 4) and down (20 to 12), in 3 layers, 6 a parameter.
    own = 6 * 3 * 2 * (12 + 24 + 20 + 12) * tokens
    assert train_flops(adapted, tokens, pairs) == whole - frozen + own
    # 8B at 128 Ki tokens; without adapters 5.902e15 of matrices and 13.511e15.
    config = models.get_config("llama3_8b/lora_h200")
    length, model = 131_072, config.model
    model = LanguageModelConfig(**model, lora=Lora(config.lora.rank, config.lora.alpha))
    full = dataclasses.replace(model, lora=Lora())
    found = [train_flops(m, length, length * (length + 1) / 2) for m in (model, full)]
    np.testing.assert_allclose(found, [1.7479e16, 1.9413e16], rtol=1e-4)
