"""Layers that keep more within a budget, and chunks chosen: the same training."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.layers import through_stack
from models.memory import Execution, Kept
from models.sizes import DecoderConfig
from tasks.execution import execution, kept_of
from tests.models.test_language_model import Run, rows
from tests.small_agent import drawn
from tests.small_llama import assert_same
from training.mesh import MeshShape

SIZES = DecoderConfig(
    hidden_size=64,
    feed_forward_size=160,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)
FLOAT, KEY = jnp.dtype("float32"), jax.random.key(0)
KEPT = Kept(SIZES, tokens=100, tensor=2, itemsize=2)
INPUT, RESULT = 100 * 64 * 2, 100 * (2 * 16 * 2 + 2 * 4)
PRODUCTS = 100 * 2 * ((2 + 2) * 16 + 64 + 2 * 80)


def test_policies_keep_inputs_results_and_products():
    kept = [KEPT.of_layer(p) for p in ("nothing", "offload", "attention", "products")]
    assert kept == [INPUT, INPUT, INPUT + RESULT, INPUT + RESULT + PRODUCTS]
    in_chunks = Kept(SIZES, 100, 2, 2, feed_forward_chunk=50)
    without = PRODUCTS - 100 * 2 * 2 * 80
    assert in_chunks.of_layer("products") == INPUT + RESULT + without
    for norms in ("after", "both"):  # which need down's product in the backward
        sizes = dataclasses.replace(SIZES, norms=norms)
        kept = [
            dataclasses.replace(one, sizes=sizes).of_layer("products")
            - one.of_layer("products")
            for one in (KEPT, in_chunks)
        ]
        assert kept == [100 * 64 * 2, 0]


@pytest.mark.parametrize(
    ("policy", "budget", "found"),
    [
        ("nothing", 0, [("nothing", 6)]),
        ("nothing", RESULT - 1, [("nothing", 6)]),
        ("nothing", RESULT, [("nothing", 5), ("attention", 1)]),
        ("nothing", 6 * RESULT - 1, [("nothing", 1), ("attention", 5)]),
        ("nothing", 6 * RESULT, [("attention", 6)]),
        ("nothing", 6 * RESULT + PRODUCTS, [("attention", 5), ("products", 1)]),
        ("attention", 2.9 * PRODUCTS, [("attention", 4), ("products", 2)]),
        ("attention", 6 * PRODUCTS, [("products", 6)]),
        ("attention", 2**60, [("products", 6)]),
        ("products", 2**60, [("products", 6)]),
        ("tail", RESULT, [("tail", 4), ("attention", 2)]),
        ("offload", 0, [("offload", 6)]),
    ],
)
def test_layers_climb_one_by_one_within_the_budget(policy, budget, found):
    assert KEPT.climb(policy, budget) == found


@pytest.mark.parametrize("policy", ["nothing", "tail", "attention"])
def test_a_budget_of_so_many_steps_lets_them_climb(policy):
    layers, rungs = SIZES.num_layers, KEPT.rungs(policy)
    assert KEPT.budget(policy, 0) == 0
    for steps in range(1, layers * len(rungs) + 1):
        climbed = KEPT.climb(policy, float(f"{KEPT.budget(policy, steps):.4g}"))
        kept = sum(count * KEPT.of_layer(p) for p, count in climbed)
        whole, rest = divmod(steps, layers)
        more = layers * sum(rungs[:whole]) + (rest and rest * rungs[whole])
        assert kept == layers * KEPT.of_layer(policy) + more


def run_with(steps: int, remat: str = "nothing", **fields) -> Run:
    """Of three layers, as many steps up the ladder."""
    chunks = dict.fromkeys(("feed_forward_chunk_tokens", "loss_chunk_tokens"), 0)
    fields = {"model__num_layers": 3, "remat": remat} | chunks | fields
    run = Run(MeshShape(), "striped", **fields)
    budget = kept_of(run.config, run.partition).budget(remat, steps) / 2**30
    return Run(MeshShape(), "striped", remat_budget_gib=budget, **fields)


def settings(run: Run) -> Execution:
    return execution(run.config, run.partition, run.model.config.vocab_size)


def test_settings_of_a_budget_are_chosen_and_said():
    run = run_with(4)
    tokens = kept_of(run.config, run.partition).tokens
    end = f"products, feed-forward of all tokens; logits of {tokens} tokens at a time"
    begin = f"remat attention, feed-forward of {tokens} tokens at a time; last 1 layers"
    assert str(settings(run)) == f"{begin} {end}"
    assert str(settings(run_with(6))) == f"remat {end}"


def losses_and_gradient(run: Run) -> tuple[list[float], Any]:
    """Of a few steps of gradient descent, and the gradient of the first."""
    parameters, found = drawn(run.model, run.partition), []
    for _ in range(4):
        loss, gradient = jax.device_get(run.program(parameters, rows(), run.frozen()))
        found.append((float(loss), gradient))
        move = 0.02 / np.sqrt(sum(np.vdot(g, g) for g in jax.tree.leaves(gradient)))
        parameters = jax.tree.map(lambda x, g, m=move: x - m * g, parameters, gradient)
    return [loss for loss, _ in found], found[0][1]


@pytest.mark.thorough
def test_neither_budget_nor_chunks_change_training():
    chunks = {"feed_forward_chunk_tokens": 24, "loss_chunk_tokens": 50}
    runs = run_with(0, **chunks), run_with(5)
    said = [str(settings(run)) for run in runs]
    assert "feed-forward of 24 tokens" in said[0] and "last 2 layers" in said[1]
    (want, gradient), (got, other) = map(losses_and_gradient, runs)
    assert want[-1] < want[0]
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert_same(other, gradient, 1e-5)


class Layer(nnx.Module):
    """A product and its tanh."""

    def __init__(self, rngs: nnx.Rngs):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (64, 64)))

    def to_run(self, execution: Execution) -> "Layer":
        return self

    def __call__(self, x: jax.Array, factor: float) -> jax.Array:
        return x + factor * jnp.tanh(x @ self.weight[...])


@functools.cache
def small_stack() -> Any:
    stack = nnx.vmap(lambda key: Layer(nnx.Rngs(key)))(jax.random.split(KEY, 8))
    return nnx.split(stack)


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["nothing", "products", "offload"])
def test_layers_on_the_host_have_the_gradients_of_those_on_the_device(policy):
    """Which are on the host too, and no stack of either is on the device."""
    structure, here = small_stack()

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        run = [(Execution(FLOAT, policy), 8)]
        return through_stack(nnx.merge(structure, parameters), run, [(0.5,)], x).sum()

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
    structure, parameters = small_stack()

    def size(*counts: int, kinds: int = 1) -> float:
        """Of the temporary memory, in stacks of parameters."""
        policies, factors = ("nothing", "attention"), [(0.5 + n,) for n in range(kinds)]
        run = zip(policies, counts, strict=False)
        runs = [(Execution(FLOAT, policy), count) for policy, count in run]

        def norm(parameters: Any, x: jax.Array) -> jax.Array:
            def loss(p: Any) -> jax.Array:
                return through_stack(nnx.merge(structure, p), runs, factors, x).sum()

            leaves = jax.tree.leaves(jax.grad(loss)(parameters))
            return sum(jnp.square(leaf).sum() for leaf in leaves)

        compiled = jax.jit(norm).lower(parameters, jnp.ones((2, 64))).compile()
        return compiled.memory_analysis().temp_size_in_bytes / (8 * 64 * 64 * 4)

    assert size(8) < 1.5
    assert size(5, 3) < 1.5
    assert size(8, kinds=2) < 1.5
    assert size(8, kinds=3) < 2  # two groups, and two layers that are left
    assert size(5, 3, kinds=2) < 3.5  # of groups of two XLA copies the parameters


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize("counts", [(7,), (4, 3), (2, 5)])
@pytest.mark.parametrize("kinds", [1, 2, 3, 7])
def test_layers_of_several_kinds_run_in_their_order(counts, kinds, rng):
    """One after the other by hand, and its gradient."""
    stack = nnx.vmap(lambda key: Layer(nnx.Rngs(key)))(jax.random.split(KEY, 7))
    structure, parameters = nnx.split(stack)
    runs = [(Execution(FLOAT, "nothing"), count) for count in counts]
    factors = [(0.1 + 0.3 * n,) for n in range(kinds)]
    x = jnp.asarray(rng.standard_normal((2, 64)), jnp.float32)

    def in_loops(p: Any) -> jax.Array:
        return through_stack(nnx.merge(structure, p), runs, factors, x)

    def by_hand(p: Any) -> jax.Array:
        y, (weights,) = x, jax.tree.leaves(p)
        for n, weight in enumerate(weights):
            y = y + factors[n % kinds][0] * jnp.tanh(y @ weight)
        return y

    def results(function: Callable) -> Callable:
        def squares(p: Any) -> tuple[jax.Array, jax.Array]:
            return jnp.square(function(p)).sum(), function(p)

        return jax.grad(squares, has_aux=True)

    found = jax.jit(results(in_loops))(parameters), results(by_hand)(parameters)
    for got, want in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
