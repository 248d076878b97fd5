"""The five attention systems of the papers: one loss, one gradient, one curve.

They differ in what they hold and send: the ring's compiled programs are searched for
collectives that would hold a whole sequence, or more of the keys than they must.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_collections
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from data.batch import Batch
from kernels import layouts as layout
from models.abstract import Model
from tasks import base, batch_rows, text
from tests.numbered_corpus import assert_same_batch
from tests.runs import small_config
from tests.small_llama import assert_same
from training.feed import place
from training.mesh import Partition
from training.optimizer import make_optimizer
from training.step import make_train_step

# Devices along data, fsdp, ring and tensor.
MESHES = {
    "vanilla": (2, 2, 1, 2),
    "memory_efficient": (1, 4, 1, 2),
    "blockwise": (4, 1, 1, 2),
    "ring": (1, 2, 4, 1),
    "striped": (1, 2, 4, 1),
}
RING_SYSTEMS = ("ring", "striped")
RING_SIZE = 4
ROWS = 2  # of each of 2 devices along fsdp
FORWARD_HOPS = 2 * (RING_SIZE - 1)  # keys and values
BACKWARD_HOPS = 2 * RING_SIZE  # their gradients; keys and values travel again
OTHERS = [name for name in MESHES if name != "vanilla"]

STEPS = 20
CONTEXT_TOKENS = 80
"""No size of the model is a multiple of it, nor of any batch's part of it."""


@dataclass(frozen=True)
class System:
    """A system of the small config, not yet compiled.

    loss_sum: from parameters, loss weights (B, T) and a batch, whose own weights do
      not count, to the summed loss.
    """

    config: ml_collections.ConfigDict
    partition: Partition
    model: Model
    loss_sum: Callable[[Any, jax.Array, Batch], jax.Array]

    def batch(self, step: int) -> Batch:
        """The global batch of a step, placed."""
        return place(
            self.batches[step],
            batch_rows.batch_sharding(self.config, self.partition),
            batch_rows.batch_shape(self.config, self.partition),
        )

    @functools.cached_property
    def batches(self) -> Any:
        return text.batches(self.config, self.partition, "train")

    @functools.cached_property
    def parameters_sharding(self) -> Any:
        return jax.tree.map(
            lambda shape, names: self.partition.sharding(names, shape.shape),
            self.model.shapes,
            self.model.axes,
        )

    @functools.cached_property
    def lowered(self) -> jax.stages.Lowered:
        """From parameters, weights and batch to the loss and both gradients."""
        batch = self.batch(0)
        weights = batch.loss_weights.sharding
        scalar = NamedSharding(self.partition.mesh, PartitionSpec())
        program = jax.jit(
            jax.value_and_grad(self.loss_sum, argnums=(0, 1)),
            in_shardings=(self.parameters_sharding, weights, weights),
            out_shardings=(scalar, (self.parameters_sharding, weights)),
        )
        return program.lower(self.model.shapes, batch.loss_weights, batch)

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        return self.lowered.compile()

    def loss_and_gradients(self, parameters: Any, step: int) -> tuple[float, Any, Any]:
        """Mean loss, its gradients, and the loss of each token in the batch's order."""
        batch = self.batch(step)
        parameters = jax.device_put(parameters, self.parameters_sharding)
        loss, grads = self.compiled(parameters, batch.loss_weights, batch)
        loss, (grads, token_losses) = jax.device_get((loss, grads))
        total = np.asarray(batch.loss_weights).sum()
        return loss / total, jax.tree.map(lambda g: g / total, grads), token_losses


def make_system(name: str, corpus: Path, **overrides: Any) -> System:
    axes = (f"mesh__{axis}" for axis in ("data", "fsdp", "ring", "tensor"))
    fields = dict(zip(axes, MESHES[name], strict=True), attention=name)
    # Less than a device's tokens, so that there is more than one chunk.
    fields |= {"feed_forward_chunk_tokens": 16, "loss_chunk_tokens": 16}
    fields |= {"data__context_tokens": CONTEXT_TOKENS}
    config = small_config(corpus, Path("unused"), **fields | overrides)
    partition = base.partition(config, jax.devices())
    model = text.model(config, partition)
    loss_of_batch = text.loss_function(config, model, partition)

    def loss_sum(parameters: Any, weights: jax.Array, batch: Batch) -> jax.Array:
        return loss_of_batch(parameters, batch._replace(loss_weights=weights))

    return System(config, partition, model, loss_sum)


@pytest.fixture(scope="module")
def systems(corpus: Path) -> Callable[[str], System]:
    """A system by name; each is compiled once, when it is needed."""
    return functools.cache(lambda name: make_system(name, corpus))


@pytest.fixture(scope="module")
def parameters(corpus: Path) -> Any:
    """Initial parameters on the host, the same for all systems."""
    model = make_system("vanilla", corpus).model
    rng = np.random.default_rng(0)

    def draw(shape: jax.ShapeDtypeStruct, names: tuple) -> np.ndarray:
        if set(names) == {None}:
            return np.ones(shape.shape, shape.dtype)
        return (0.05 * rng.standard_normal(shape.shape)).astype(shape.dtype)

    return jax.tree.map(draw, model.shapes, model.axes)


def in_striped_order(x: np.ndarray) -> np.ndarray:
    return layout.permute(x, layout.Striped(), RING_SIZE)


def descend(system: System, parameters: Any) -> Iterator[tuple[float, Any, Any]]:
    """Plain gradient descent, so that no more programs need to be compiled.

    Yields loss, gradients and token losses of each step.
    """
    for step in range(STEPS):
        found = system.loss_and_gradients(parameters, step)
        yield found
        parameters = jax.tree.map(
            lambda p, g: p - np.float32(0.1) * g, parameters, found[1]
        )


@pytest.fixture(scope="module")
def truth(systems: Callable[[str], System], parameters: Any) -> list[tuple]:
    return list(descend(systems("vanilla"), parameters))


@pytest.mark.thorough
@pytest.mark.parametrize("name", OTHERS)
def test_curve_and_first_gradients_are_vanillas(systems, parameters, truth, name):
    found = list(descend(systems(name), parameters))
    (loss, grads, losses), (true_loss, true_grads, true_losses) = found[0], truth[0]
    assert loss == pytest.approx(true_loss, rel=1e-6)
    assert_same(grads, true_grads, 1e-6)
    if name == "striped":
        true_losses = in_striped_order(true_losses)
    assert_same(losses, true_losses, 1e-6)

    curve, true_curve = ([step[0] for step in steps] for steps in (found, truth))
    assert np.mean(true_curve[-5:]) < true_curve[0] - 1
    np.testing.assert_allclose(curve, true_curve, rtol=1e-5)


@pytest.mark.thorough
def test_ulysses_beneath_the_ring_gives_vanillas_curve(corpus, parameters, truth):
    """Heads and tokens over 2 devices each, tokens in the order of a ring of 2."""
    system = make_system("striped", corpus, mesh__ring=2, mesh__ulysses=2)
    found = list(descend(system, parameters))
    assert_same(found[0][1], truth[0][1], 1e-6)
    true_losses = layout.permute(truth[0][2], layout.Striped(), 2)
    assert_same(found[0][2], true_losses, 1e-6)
    curve, true_curve = ([step[0] for step in steps] for steps in (found, truth))
    np.testing.assert_allclose(curve, true_curve, rtol=1e-5)


def test_only_the_striped_batch_is_permuted(systems):
    for step in (0, 3):
        batches = {
            name: jax.tree.map(np.asarray, systems(name).batch(step)) for name in MESHES
        }
        truth = batches["vanilla"]
        rows = np.arange(CONTEXT_TOKENS)
        seen = truth.k_end[truth.k_start < truth.k_end] - 1
        assert (seen == np.broadcast_to(rows, truth.k_end.shape).ravel()).all()
        orders = dict.fromkeys(OTHERS, truth)
        orders["striped"] = jax.tree.map(in_striped_order, truth)
        for name, true in orders.items():
            assert_same_batch(batches[name], true)
    assert (batches["striped"].tokens != truth.tokens).any()


# Collectives of a compiled program: kind, and the shape of each result.
COLLECTIVE = re.compile(
    r"= (?P<results>.*?) (?P<kind>all-gather|all-to-all|all-reduce|reduce-scatter|"
    r"collective-permute|collective-broadcast|ragged-all-to-all)(-start)?\("
)
SHAPE = re.compile(r"\b([a-z]+[0-9]+\w*|pred)\[([0-9,]*)\]")


def collectives(compiled: jax.stages.Compiled) -> Counter:
    """How often each (kind, type, shape) is the result of a collective."""
    found: Counter = Counter()
    for line in compiled.as_text().splitlines():
        match = COLLECTIVE.search(line)
        for dtype, sizes in SHAPE.findall(match["results"]) if match else ():
            shape = tuple(int(size) for size in sizes.split(",") if size)
            found[match["kind"], dtype, shape] += 1
    return found


def whole_sequences(found: Counter) -> list:
    """Collectives with as many tokens along an axis as a row, or rows, have."""
    return [key for key in found if any(s and s % CONTEXT_TOKENS == 0 for s in key[2])]


@pytest.mark.thorough
def test_a_gathered_sequence_is_found(systems):
    system = systems("striped")
    whole = NamedSharding(system.partition.mesh, PartitionSpec("fsdp", None))
    gather = jax.jit(lambda x: 2 * x, out_shardings=whole)
    compiled = gather.lower(system.batch(0).positions).compile()
    assert whole_sequences(collectives(compiled)) == [("all-gather", "s32", (2, 80))]


@pytest.mark.thorough
@pytest.mark.parametrize("name", RING_SYSTEMS)
def test_no_collective_of_a_ring_holds_a_whole_sequence(systems, name):
    found = collectives(systems(name).compiled)
    assert {"all-gather", "collective-permute"} <= {kind for kind, *_ in found}
    assert whole_sequences(found) == []


@pytest.mark.thorough
def test_nothing_puts_striped_tokens_back_into_order(systems):
    """Another order would take collectives, or gathers, that the plain ring has not."""
    ring, striped = systems("ring"), systems("striped")
    assert collectives(striped.compiled) == collectives(ring.compiled)
    for operation in ("gather", "sort", "scatter", "transpose", "dynamic_slice"):
        pattern = rf"stablehlo\.{operation}\b"
        both = [len(re.findall(pattern, s.lowered.as_text())) for s in (ring, striped)]
        assert both[0] == both[1], operation


@pytest.mark.thorough
@pytest.mark.parametrize("name", RING_SYSTEMS)
def test_keys_and_values_travel_with_their_own_heads_and_no_hop_too_far(systems, name):
    found = collectives(systems(name).compiled)
    permute = "collective-permute"
    shard = (ROWS, 2, CONTEXT_TOKENS // RING_SIZE, 8)  # 2 of the 4 heads are K heads
    # Layers are scanned, so the program has each hop of a layer once.
    hops = {key: times for key, times in found.items() if key[0] == permute}
    assert hops == {(permute, "f32", shard): 2 * FORWARD_HOPS + BACKWARD_HOPS}


def permutes_when_lowered(function: Callable, *arguments: Any) -> int:
    text = jax.jit(function).lower(*arguments).as_text()
    return len(re.findall(r"stablehlo\.collective_permute\b", text))


@pytest.mark.thorough
@pytest.mark.parametrize(("remat", "forwards"), [("attention", 1), ("nothing", 2)])
def test_remat_decides_how_often_the_ring_runs(corpus, remat, forwards):
    system = make_system("striped", corpus, remat=remat)
    batch = system.batch(0)
    arguments = system.model.shapes, batch.loss_weights, batch
    forward = permutes_when_lowered(system.loss_sum, *arguments)
    assert forward == FORWARD_HOPS
    both = permutes_when_lowered(jax.value_and_grad(system.loss_sum), *arguments)
    assert both == (forwards + 1) * FORWARD_HOPS + BACKWARD_HOPS


@pytest.mark.slow
@pytest.mark.parametrize("name", RING_SYSTEMS)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_no_collective_of_a_whole_step_holds_a_whole_sequence(
    corpus, name, microbatches
):
    system = make_system(name, corpus, train__microbatches=microbatches)
    config, partition, model = system.config, system.partition, system.model
    optimizer, _ = make_optimizer(base.optimizer_settings(config))
    state = base.abstract_state(model, optimizer, partition)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    loss_sum = text.loss_function(config, model, partition)
    step = jax.jit(
        make_train_step(loss_sum, optimizer, microbatches=microbatches),
        out_shardings=(shardings, shardings.step),
        donate_argnums=0,
    )
    found = collectives(step.lower(state, system.batch(0)).compile())
    assert whole_sequences(found) == []
    travelling = {shape for kind, _, shape in found if kind == "collective-permute"}
    shard = ROWS // microbatches, CONTEXT_TOKENS // RING_SIZE, 2, 8
    assert travelling == {shard}
