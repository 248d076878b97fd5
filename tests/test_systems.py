"""The five attention systems of the papers: one loss and one gradient.

They differ in what they hold and send: the ring's compiled programs are searched for
collectives that would hold a whole sequence, or more of the keys than they must.
"""

import functools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from data.batch import Batch
from kernels import layouts as layout
from tests.numbered_corpus import assert_same_batch
from tests.small_llama import Run, assert_same
from training.feed import place
from training.mesh import MeshShape

MESHES = {
    "vanilla": MeshShape(data=2, fsdp=2, tensor=2),
    "memory_efficient": MeshShape(fsdp=4, tensor=2),
    "blockwise": MeshShape(data=4, tensor=2),
    "ring": MeshShape(fsdp=2, ring=4),
    "striped": MeshShape(fsdp=2, ring=4),
}
RING_SYSTEMS = ("ring", "striped")
RING_SIZE = 4
ROWS = 2  # of each of 2 devices along fsdp
FORWARD_HOPS = 2 * (RING_SIZE - 1)  # keys and values
BACKWARD_HOPS = 2 * RING_SIZE  # their gradients; keys and values travel again
OTHERS = [name for name in MESHES if name != "vanilla"]

CONTEXT_TOKENS = 80
"""No size of the model is a multiple of it, nor of any batch's part of it."""
FIELDS = {
    "data__context_tokens": CONTEXT_TOKENS,
    "model__vocab_size": 0,  # the corpus's
    "model__hidden_size": 32,
    # Less than a device's tokens, so that there is more than one chunk.
    "feed_forward_chunk_tokens": 16,
    "loss_chunk_tokens": 16,
    "implementation": "",
}


class System(Run):
    """A system of the small model, on batches of a corpus."""

    def __init__(self, name: str, corpus: Path):
        super().__init__(MESHES[name], name, **FIELDS)
        self.config.data.corpus = str(corpus)

    @functools.cached_property
    def batches(self) -> Any:
        return self.resolved.batches("train")

    def batch(self, step: int = 0) -> Batch:
        """The global batch of a step, placed."""
        sharding, shape = self.resolved.sharding, self.resolved.shape
        return place(self.batches[step], sharding, shape)


@pytest.fixture(scope="module")
def systems(corpus):
    """A system by name; each is compiled once, when it is needed."""
    return functools.cache(lambda name: System(name, corpus))


@pytest.mark.thorough
@pytest.mark.parametrize("name", OTHERS)
def test_loss_and_gradients_are_vanillas(systems, name):
    loss, gradients = systems(name).answer()
    true_loss, true_gradients = systems("vanilla").answer()
    assert loss == pytest.approx(true_loss, rel=1e-6)
    assert_same(gradients, true_gradients, 1e-6)


def in_striped_order(x: np.ndarray) -> np.ndarray:
    return layout.permute(x, layout.Striped(), RING_SIZE)


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
    found = Counter()
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
@pytest.mark.parametrize("name", RING_SYSTEMS)
def test_keys_and_values_travel_with_their_own_heads_and_no_hop_too_far(systems, name):
    """And no collective of a ring holds a whole sequence."""
    found = collectives(systems(name).program)
    assert "all-gather" in {kind for kind, *_ in found}
    assert whole_sequences(found) == []
    permute = "collective-permute"
    shard = (ROWS, 2, CONTEXT_TOKENS // RING_SIZE, 8)  # 2 of the 4 heads are K heads
    # Layers are scanned, so the program has each hop of a layer once.
    hops = {key: times for key, times in found.items() if key[0] == permute}
    assert hops == {(permute, "f32", shard): 2 * FORWARD_HOPS + BACKWARD_HOPS}


@pytest.mark.thorough
def test_nothing_puts_striped_tokens_back_into_order(systems):
    """Another order would take collectives, or gathers, that the plain ring has not."""
    ring, striped = systems("ring"), systems("striped")
    assert collectives(striped.program) == collectives(ring.program)
    for operation in ("gather", "sort", "scatter", "transpose", "dynamic_slice"):
        pattern = rf"stablehlo\.{operation}\b"
        both = [len(re.findall(pattern, s.lowered.as_text())) for s in (ring, striped)]
        assert both[0] == both[1], operation
