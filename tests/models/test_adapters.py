"""Memory of adapters' gradients; their values are in `tests.tools` beside PEFT's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.adapters import multiply
from models.sizes import Lora
from tools.lib.compiled.pods import aot_pod

pytestmark = pytest.mark.thorough

NAMES = "query", "key", "value"
TOKENS, INPUTS, OUTPUTS, RANK = 8192, 2048, 512, 16


def test_terms_of_an_inputs_gradient_are_summed_one_by_one():
    """Compiled for a GPU, where a sum of all six would hold them all."""
    mesh = Mesh(np.array(aot_pod("h200:1x1x1").devices).reshape(1), ("ring",))

    def array(*shape: int, dtype: jnp.dtype = jnp.float32) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    weights = {}
    for name in NAMES:
        weights[name] = array(INPUTS, OUTPUTS, dtype=jnp.bfloat16)
        weights[f"{name}_a"] = array(RANK, INPUTS)
        weights[f"{name}_b"] = array(RANK, OUTPUTS)

    def loss(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
        x, lora = jnp.tanh(x), Lora(RANK)
        products = (multiply(x, weights, name, lora) for name in NAMES)
        return sum(jnp.sin(y).astype(jnp.float32).sum() for y in products)

    x = array(TOKENS, INPUTS, dtype=jnp.bfloat16)
    compiled = jax.jit(jax.grad(loss)).lower(x, weights).compile()
    taken = compiled.memory_analysis().temp_size_in_bytes
    assert 2 < taken / (TOKENS * INPUTS * 2) < 4  # x itself, and two terms at a time
