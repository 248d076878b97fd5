"""Layers in loops over stacked parameters, on the host too, and adapters' gradients."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.adapters import multiply
from models.layers import through_stack
from models.lora import Lora
from models.memory import Execution
from tests.small.models import assert_same
from tools.lib.compiled.pods import aot_pod

FLOAT = jnp.dtype("float32")


class Layer(nnx.Module):
    """A product and its tanh."""

    def __init__(self, rngs: nnx.Rngs):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (64, 64)))

    def to_run(self, execution: Execution) -> "Layer":
        return self

    def __call__(self, x: jax.Array, factor: float) -> jax.Array:
        return x + factor * jnp.tanh(x @ self.weight[...])


def stack_of(layers: int) -> tuple[nnx.GraphDef, nnx.State]:
    keys = jax.random.split(jax.random.key(0), layers)
    return nnx.split(nnx.vmap(lambda key: Layer(nnx.Rngs(key)))(keys))


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["nothing", "products", "offload"])
def test_layers_on_the_host_have_the_gradients_of_those_on_the_device(policy):
    """Which are on the host too, and no stack of either is on the device."""
    structure, here = stack_of(8)

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        run = [(Execution(FLOAT, policy), 8)]
        return through_stack(nnx.merge(structure, parameters), run, [0.5], x).sum()

    def gradient(parameters: Any) -> tuple[Any, str]:
        placing = jax.tree.map(lambda leaf: leaf.sharding, parameters)
        program = jax.jit(jax.grad(loss), out_shardings=placing)
        x = jnp.linspace(-1, 1, 128).reshape(2, 64)
        lowered = program.trace(parameters, x).lower(lowering_platforms=("tpu",))
        return program(parameters, x), lowered.as_text()

    far = jax.device_put(here, jax.memory.Space.Host)
    (got, program), (want, _) = gradient(far), gradient(here)
    assert_same(jax.device_get(got), jax.device_get(want), 1e-6)
    (leaf,) = jax.tree.leaves(got)
    assert leaf.sharding.memory_kind == "pinned_host"
    # A layer on its way there, in both loops; its gradient, and the result of all.
    moved = re.findall(r'placement = "(\w+)".*tensor<(\w+)>\n', program)
    inputs = [("pinned_host", "2x64xf32"), ("device", "2x64xf32")]
    assert [one for one in moved if one not in inputs] == [
        *[("device", "1x64x64xf32")] * 2,
        *[("pinned_host", shape) for shape in ("64x64xf32", "8x64x64xf32")],
    ]


@pytest.mark.thorough
def test_layers_in_several_loops_and_of_several_kinds_copy_no_parameters():
    """Of gradients each loop writes its own, which are joined where they are read.

    So there is a stack of gradients, and at most parts of another one.
    """
    structure, parameters = stack_of(8)

    def size(*counts: int, kinds: int = 1) -> float:
        """Of the temporary memory, in stacks of parameters."""
        policies, factors = ("nothing", "attention"), [0.5 + n for n in range(kinds)]
        run = zip(policies, counts, strict=False)
        runs = [(Execution(FLOAT, policy), count) for policy, count in run]

        def norm(parameters: Any, x: jax.Array) -> jax.Array:
            def loss(p: Any) -> jax.Array:
                return through_stack(nnx.merge(structure, p), runs, factors, x).sum()

            leaves = jax.tree.leaves(jax.grad(loss)(parameters))
            return sum(jnp.square(leaf).sum() for leaf in leaves)

        compiled = jax.jit(norm).lower(parameters, jnp.ones((2, 64))).compile()
        return compiled.memory_analysis().temp_size_in_bytes / (8 * 64 * 64 * 4)

    assert size(5, 3) < 1.5
    assert size(8, kinds=2) < 1.5
    assert size(8, kinds=3) < 2  # two groups, and two layers that are left
    assert size(5, 3, kinds=2) < 3.5  # of groups of two XLA copies the parameters


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize(
    "counts, kinds", [((4, 3), 2), ((7,), 1), ((2, 5), 3), ((4, 3), 7), ((2, 5), 1)]
)
def test_layers_of_several_kinds_run_in_their_order(counts, kinds, rng):
    """One after the other by hand, and its gradient."""
    structure, parameters = stack_of(7)
    runs = [(Execution(FLOAT, "nothing"), count) for count in counts]
    factors = [0.1 + 0.3 * n for n in range(kinds)]
    x = jnp.asarray(rng.standard_normal((2, 64)), jnp.float32)

    def in_loops(p: Any) -> jax.Array:
        return through_stack(nnx.merge(structure, p), runs, factors, x)

    @jax.grad
    def by_hand(p: Any) -> jax.Array:
        y, (weights,) = x, jax.tree.leaves(p)
        for n, weight in enumerate(weights):
            y = y + factors[n % kinds] * jnp.tanh(y @ weight)
        return jnp.square(y).sum()

    got = jax.jit(jax.grad(lambda p: jnp.square(in_loops(p)).sum()))(parameters)
    (got,), (want,) = jax.tree.leaves(got), jax.tree.leaves(by_hand(parameters))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize("pattern, bodies", [((1, 1, 1, 0), 3), ((1, 0, 1), 4)])
def test_neighbours_of_the_second_stack_are_compiled_once(pattern, bodies, rng):
    """As by hand, one after the other; bodies: of the groups, and of those left."""
    stacks = [pattern[n % len(pattern)] for n in range(7)]
    structure, plain = stack_of(stacks.count(0))
    others, second = stack_of(stacks.count(1))
    x = jnp.asarray(rng.standard_normal((2, 64)), jnp.float32)
    factors = [0.3 + 0.2 * stack for stack in pattern]
    run = [(Execution(FLOAT, "nothing"), 7)]

    def in_loops(parameters: Any) -> jax.Array:
        plain, second = parameters
        layers = nnx.merge(structure, plain)
        more = nnx.merge(others, second)
        return jnp.square(through_stack(layers, run, factors, x, more, pattern)).sum()

    def by_hand(parameters: Any) -> jax.Array:
        weights = [iter(jax.tree.leaves(stack)[0]) for stack in parameters]
        y = x
        for n, stack in enumerate(stacks):
            y = y + factors[n % len(pattern)] * jnp.tanh(y @ next(weights[stack]))
        return jnp.square(y).sum()

    got = jax.jit(jax.grad(in_loops))((plain, second))
    assert_same(got, jax.grad(by_hand)((plain, second)), 1e-5)
    assert str(jax.make_jaxpr(in_loops)((plain, second))).count("tanh") == bodies


NAMES = "query", "key", "value"
TOKENS, INPUTS, OUTPUTS, RANK = 8192, 2048, 512, 16


@pytest.mark.thorough
def test_terms_of_an_inputs_gradient_are_summed_one_by_one():
    """Compiled for a GPU, where a sum of all six would hold them all."""
    mesh = Mesh(np.array(aot_pod("h200:1x1").devices).reshape(1), ("ring",))

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
