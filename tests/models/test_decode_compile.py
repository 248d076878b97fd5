"""The decode step, compiled for described TPUs and GPUs: no copy of the cache there."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from models.sampling import Sampling
from tasks import systems
from tasks.generation import cache_shardings, generator
from tasks.text import TextRun
from tests.small.runs import small_config
from tools.lib.compiled.pods import aot_pod, compile_for

pytestmark = pytest.mark.thorough

RING, SLOTS, LAYERS, HEADS, DEPTH = 4, 65_536, 3, 8, 128
SIZES = {
    "model__num_layers": LAYERS,
    "model__num_heads": HEADS,
    "model__num_kv_heads": HEADS,
    "model__head_dim": DEPTH,
    "model__hidden_size": 1024,
    "model__feed_forward_size": 2816,
    "mesh__fsdp": 1,
    "mesh__ring": RING,
    "compute_dtype": "bfloat16",
}


EXPERTS = {"model__experts": 8, "model__experts_per_token": 2}


def compile_step(
    topology: str, is_block: bool = False, **changes: int
) -> tuple[jax.stages.Compiled, int]:
    """Compiles a step of a new token, or of a block of them; and how many they are."""
    pod, config = aot_pod(topology), small_config("", "", **SIZES | changes)
    partition = systems.partition(config, pod.devices)
    model = TextRun(config, partition).model
    greedy = Sampling(temperature=0.0)
    programs = generator(TextRun(config, partition), greedy, rows=1, cache_tokens=SLOTS)

    def placed(shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding):
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    def sharded(shape: jax.ShapeDtypeStruct, names: tuple):
        return placed(shape, partition.sharding(names, shape.shape))

    parameters = jax.tree.map(sharded, model.shapes, model.axes)
    shape = LAYERS, 1, SLOTS, HEADS, DEPTH
    cache = jax.tree.map(
        placed, jax.eval_shape(programs.empty), cache_shardings(partition, shape)
    )
    block = programs.block if is_block else 1
    of_rows = jax.ShapeDtypeStruct((1, block), jnp.int32)
    seed = jax.ShapeDtypeStruct((), jnp.int32)
    program = compile_for(
        partition.mesh, programs.step, parameters, cache, of_rows, of_rows, seed
    )
    return program, block


def test_a_step_with_experts_has_no_kernel_that_xla_cannot_cut():
    """On a chip of two cores, for which training has kernels of JAX."""
    program, _ = compile_step("v4:2x2x1", **EXPERTS)
    assert "gmm" not in program.as_text()


@pytest.mark.parametrize("is_block", [False, True], ids=["step", "block"])
@pytest.mark.parametrize(
    "topology", ["v4:2x2x1", pytest.param("h200:1x4", marks=pytest.mark.slow)]
)
def test_a_step_needs_less_than_a_layer_beside_the_cache(topology, is_block):
    """And a block of new tokens twice its scores besides, of 256 MiB at most."""
    program, block = compile_step(topology, is_block)
    memory = program.memory_analysis()
    layer = SLOTS // RING * HEADS * DEPTH * 2  # bytes of a device's keys
    assert memory.alias_size_in_bytes >= 2 * LAYERS * layer
    scores = is_block * block * HEADS * SLOTS // RING * 4
    assert scores <= 1 << 28 and block == (256 if is_block else 1)
    assert memory.temp_size_in_bytes < layer + 2 * scores
    # What is sent is of the new tokens alone: neither the cache nor parameters move.
    collective = (
        r"\[([\d,]+)\][^=\n]* (all-gather|all-reduce|all-to-all|collective-permute|"
        r"reduce-scatter)(?:-start)?\("
    )
    found = re.findall(collective, program.as_text())
    assert {kind for _, kind in found} <= {"all-gather", "all-reduce"}
    largest = max(math.prod(map(int, shape.split(","))) for shape, _ in found)
    assert largest <= 2 * block * SIZES["model__feed_forward_size"]
