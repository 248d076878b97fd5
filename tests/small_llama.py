"""Small models for tests of caches and generation, and their forward without one."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from flax import nnx

from kernels import masks
from kernels.masks import Mask
from tasks import base, text
from tests.families import FAMILIES
from tests.runs import small_config
from tests.small_agent import drawn
from training.mesh import MeshShape, Partition, make_mesh

ROWS, SLOTS, VOCAB = 2, 64, 40


def config_of(
    attention: str, family: str = "llama", **overrides: Any
) -> ml_collections.ConfigDict:
    """Four query heads, two key/value heads, two layers or the family's."""
    fields = {"model__vocab_size": VOCAB, "implementation": "reference"}
    fields |= FAMILIES[family]
    return small_config("", "", attention=attention, **fields | overrides)


def partition_of(shape: MeshShape) -> Partition:
    count = math.prod(shape.axes.values())
    return Partition(make_mesh(shape, jax.devices()[:count]))


def parameters_on(partition: Partition, family: str = "llama") -> Any:
    """The same on every mesh."""
    return drawn(text.model(config_of("striped", family), partition), partition)


def assert_same(got: Any, want: Any, tolerance: float) -> None:
    """Every leaf, in its norm."""

    def check(path: tuple, a: np.ndarray, b: np.ndarray) -> None:
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error < tolerance, (jax.tree_util.keystr(path), error)

    jax.tree_util.tree_map_with_path(check, got, want)


@functools.cache
def whole_forward(
    dtype: str = "float32", family: str = "llama", mask: Mask = masks.causal()
) -> Callable[[np.ndarray], np.ndarray]:
    """From tokens (B, SLOTS) to logits (B, SLOTS, V): no cache, one device."""
    config = config_of("vanilla", family, compute_dtype=dtype)
    partition = partition_of(MeshShape())
    structure = text.model(config, partition).structure
    attend = base.ring_attention(config, partition)

    @jax.jit
    def forward(parameters: Any, tokens: jax.Array) -> jax.Array:
        llama = nnx.merge(structure, parameters)
        positions = jnp.tile(jnp.arange(SLOTS, dtype=jnp.int32), (ROWS, 1))
        hidden = llama(tokens, positions, functools.partial(attend, visible=mask))
        return llama.config.logits(hidden, llama.head_weight())

    parameters = parameters_on(partition, family)
    return lambda tokens: np.asarray(forward(parameters, tokens))
