"""A small LLaMA for tests of caches and generation, and its forward without one."""

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
from kernels.ring_attention import make_ring_attention
from tasks import base, text
from tests.runs import small_config
from tests.small_agent import drawn
from training.mesh import MeshShape, Partition, make_mesh

ROWS, SLOTS, VOCAB = 2, 64, 40


def config_of(attention: str, **overrides: Any) -> ml_collections.ConfigDict:
    """Four query heads, two key/value heads, two layers."""
    fields = {"model__vocab_size": VOCAB, "implementation": "reference"}
    return small_config("", "", attention=attention, **fields | overrides)


def partition_of(shape: MeshShape) -> Partition:
    count = math.prod(shape.axes.values())
    return Partition(make_mesh(shape, jax.devices()[:count]))


def parameters_on(partition: Partition) -> Any:
    """The same on every mesh."""
    return drawn(text.model(config_of("striped"), partition), partition)


def assert_same(got: Any, want: Any, tolerance: float) -> None:
    """Every leaf, in its norm."""

    def check(path: tuple, a: np.ndarray, b: np.ndarray) -> None:
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error < tolerance, (jax.tree_util.keystr(path), error)

    jax.tree_util.tree_map_with_path(check, got, want)


@functools.cache
def whole_forward(dtype: str = "float32") -> Callable[[np.ndarray], np.ndarray]:
    """From tokens (B, SLOTS) to logits (B, SLOTS, V): no cache, one device."""
    config = config_of("vanilla", compute_dtype=dtype)
    partition = partition_of(MeshShape())
    structure = text.model(config, partition).structure
    attend = make_ring_attention(
        partition.mesh,
        layout=base.attention_system(config).layout,
        implementation="reference",
    )

    @jax.jit
    def forward(parameters: Any, tokens: jax.Array) -> jax.Array:
        llama = nnx.merge(structure, parameters)
        positions = jnp.tile(jnp.arange(SLOTS, dtype=jnp.int32), (ROWS, 1))
        causal = functools.partial(attend, visible=masks.causal())
        hidden = llama(tokens, positions, causal)
        head = llama.head_weight().astype(hidden.dtype)
        return jnp.dot(hidden, head, preferred_element_type=jnp.float32)

    parameters = parameters_on(partition)
    return lambda tokens: np.asarray(forward(parameters, tokens))
