"""Parameters and operations against the model itself and published numbers."""

import dataclasses
import re
from typing import Any

import jax
import numpy as np
import pytest

from configs import base, models
from models.flops import num_adapter_parameters, num_matrix_parameters, train_flops
from models.lora import Lora
from models.sizes import LanguageModelConfig
from tasks.text import TextRun
from tests.cases import table
from tests.small.models import partition_of
from training.sharding.mesh import MeshShape

GROUPED = LanguageModelConfig(
    vocab_size=50,
    hidden_size=12,
    feed_forward_size=20,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
)


@pytest.mark.parametrize("name, billions", table("models.txt", "billions"))
def test_models_have_the_parameters_of_the_published_ones(name, billions):
    config = base.get_config()
    config.model.update(models.fields_of(name))
    run = TextRun(config, partition_of(MeshShape()))
    assert round(run.num_parameters / 1e9, 3) == billions


@pytest.mark.parametrize("changes, message", table("runs.txt", "sizes"))
def test_sizes_that_make_no_model_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(GROUPED, **{"num_heads": 4, "num_kv_heads": 2} | changes)


PARTS: tuple[dict[str, Any], ...] = (
    {},
    {"qkv_bias": True, "output_bias": True, "attention_sinks": True},
    {"qk_norm": "head", "norms": "both", "tied_embeddings": True},
    {"qk_norm": "all", "norms": "after"},
    {"layer_pattern": "wwf", "window": 4, "norm_unit_offset": True},
)


@pytest.mark.parametrize("parts", PARTS, ids=lambda parts: ",".join(parts))
def test_counts_are_those_of_the_parameters_of_every_kind_of_model(parts):
    sizes = dataclasses.replace(GROUPED, **parts)
    config = base.get_config()
    config.model.update({name: getattr(sizes, name) for name in config.model})
    shapes = TextRun(config, partition_of(MeshShape())).model.shapes
    counts = {
        jax.tree_util.keystr(path): leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
    }
    is_vector = re.compile("norm|bias|sinks" + "|embedding" * ("head" in shapes))
    matrices = [size for path, size in counts.items() if not is_vector.search(path)]
    assert num_matrix_parameters(sizes) == sum(matrices)
    assert train_flops(sizes, 7, 9) == train_flops(GROUPED, 7, 9)


def test_first_layers_without_experts_count_what_they_have():
    parts = {"experts": 4, "experts_per_token": 2, "shared_expert_size": 8}
    alike = dataclasses.replace(GROUPED, **parts, lora=Lora(rank=2, targets="down"))
    dense = {"dense_layers": 1, "dense_feed_forward_size": 40}
    mixed = dataclasses.replace(alike, **dense)
    of_experts = 12 * 4 + 3 * 12 * (2 * 20 + 8)
    more = num_matrix_parameters(mixed) - num_matrix_parameters(alike)
    assert more == 3 * 12 * 40 - of_experts
    adapters = num_adapter_parameters(mixed) - num_adapter_parameters(alike)
    assert adapters == 2 * (12 + 40) - 2 * 2 * (12 + 20)


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
    # Gate and up of 2 experts, of rank 3 with one A: E = 12 to 20 each.
    of_experts = dataclasses.replace(GROUPED, experts=4, experts_per_token=2)
    lora = Lora(rank=2, targets="gate,up", gate_up_rank=3)
    shared = dataclasses.replace(of_experts, lora=lora)
    assert num_adapter_parameters(shared) == 3 * 2 * 3 * (12 + 20 + 20)
    # 8B at 128 Ki tokens; without adapters 5.902e15 of matrices and 13.511e15.
    config = models.get_config("llama3_8b/lora_h200")
    length, model = 131_072, config.model
    model = LanguageModelConfig(**model, lora=Lora(config.lora.rank, config.lora.alpha))
    full = dataclasses.replace(model, lora=Lora())
    found = [train_flops(m, length, length * (length + 1) / 2) for m in (model, full)]
    np.testing.assert_allclose(found, [1.7479e16, 1.9413e16], rtol=1e-4)
