"""Small models of every family, on a mesh and in an attention system of their own."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from flax import nnx

from data.batch import Batch
from kernels import masks
from kernels.layouts import Layout, permute
from kernels.masks import Mask
from models.abstract import Model
from models.memory import Kept
from tasks.systems import attention_system
from tasks.text import TextRun
from tests.small.agents import drawn
from tests.small.families import FAMILIES
from tests.small.runs import small_config
from training.sharding.mesh import MeshShape, Partition, make_mesh

ROWS, SLOTS, VOCAB = 2, 64, 40
"""Rows and slots of caches, and the tokens' ids."""
BATCH_ROWS, LENGTH = 4, 32
PADDED = np.array([[32], [32], [32], [21]], np.int32)
"""Tokens in each row of a batch before its padding."""


def config_of(
    attention: str, family: str = "llama", **overrides: Any
) -> ml_collections.ConfigDict:
    """Four query heads, two key/value heads, two layers or the family's."""
    fields = {"model__vocab_size": VOCAB, "implementation": "reference"}
    fields |= FAMILIES[family]
    return small_config("", "", attention=attention, **fields | overrides)


def partition_of(shape: MeshShape, permutes: bool = False) -> Partition:
    count = math.prod(shape.axes.values())
    return Partition(make_mesh(shape, jax.devices()[:count]), permutes)


def budget_gib(kept: Kept, policy: str, steps: int) -> float:
    """GiB that let layers climb `steps` rungs in all, and half a rung more."""
    each = [size for size in kept.rungs(policy) for _ in range(kept.sizes.num_layers)]
    return (sum(each[:steps]) + min(each) / 2) / 2**30 if steps else 0.0


def parameters_on(partition: Partition, family: str = "llama") -> Any:
    """The same on every mesh."""
    return drawn(TextRun(config_of("striped", family), partition).model, partition)


def assert_same(got: Any, want: Any, tolerance: float) -> None:
    """Every leaf, in its norm."""

    def check(path: tuple, a: np.ndarray, b: np.ndarray) -> None:
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error < tolerance, (jax.tree_util.keystr(path), error)

    jax.tree_util.tree_map_with_path(check, got, want)


@functools.cache
def rows(seed: int = 2) -> Batch:
    """Rows of packed documents, the last one padded, in natural order."""
    rng = np.random.default_rng(seed)
    shape = BATCH_ROWS, LENGTH
    tokens, targets = rng.integers(0, VOCAB, (2, *shape), np.int32)
    ids = np.sort(rng.integers(0, 4, shape), axis=1).astype(np.int32)
    index = np.tile(np.arange(LENGTH, dtype=np.int32), (BATCH_ROWS, 1))
    visible = (masks.documents(ids) & masks.padding(PADDED))(index, LENGTH)
    weights = rng.random(shape, np.float32) * (index < PADDED) * (ids != 2)
    return Batch(tokens, targets, weights, index - visible.k_start, *visible)


class Run:
    """A model, its loss, and their gradients for `rows`.

    Its hidden size of 36 divides over a ring of 4, but not over fsdp 2 x ring 4.
    permutes: whether its gradients are scattered in permutes.
    """

    def __init__(
        self,
        shape: MeshShape,
        attention: str,
        family: str = "llama",
        permutes: bool = False,
        **fields: Any,
    ):
        narrow = {"model__hidden_size": 36}
        narrow |= {"feed_forward_chunk_tokens": 6, "loss_chunk_tokens": 5}
        self.config = config_of(attention, family, **narrow | fields)
        self.partition = partition_of(shape, permutes)
        self.resolved = TextRun(self.config, self.partition)

    @functools.cached_property
    def model(self) -> Model:
        return self.resolved.model

    @functools.cached_property
    def loss(self) -> Callable:
        return self.resolved.loss_function()

    def order(self) -> tuple[Layout, int]:
        """Layout and ring size."""
        layout = attention_system(self.config).layout
        return layout, self.partition.ring_size

    @functools.cached_property
    def parameters(self) -> Any:
        return drawn(self.model, self.partition)

    @functools.cached_property
    def frozen(self) -> Any:
        """The parameters that are not trained, if any."""
        shapes, axes = self.model.frozen_shapes, self.model.frozen_axes
        model = dataclasses.replace(self.model, shapes=shapes, axes=axes)
        return drawn(model, self.partition)

    def batch(self, step: int = 2) -> Batch:
        """The batch of a step, in layout order, on the mesh."""
        batch = Batch(*(permute(x, *self.order()) for x in rows(step)))
        names = "batch", "sequence"
        return jax.device_put(batch, self.partition.sharding(names, batch.tokens.shape))

    @functools.cached_property
    def lowered(self) -> jax.stages.Lowered:
        """From parameters, a batch and what is frozen to loss and gradients."""
        step = jax.jit(jax.value_and_grad(self.loss))
        return step.lower(self.parameters, self.batch(), self.frozen)

    @functools.cached_property
    def program(self) -> jax.stages.Compiled:
        return self.lowered.compile()

    def answer(self) -> tuple[np.ndarray, Any]:
        """Loss and gradients."""
        given = self.parameters, self.batch(), self.frozen
        return jax.device_get(self.program(*given))


run_on = functools.cache(Run)


@functools.cache
def whole_forward(
    family: str = "llama", mask: Mask = masks.causal()
) -> Callable[[np.ndarray], np.ndarray]:
    """From tokens (B, SLOTS) to logits (B, SLOTS, V): no cache, one device."""
    config = config_of("vanilla", family)
    partition = partition_of(MeshShape())
    run = TextRun(config, partition)
    structure, attend = run.model.structure, run.attention

    @jax.jit
    def forward(parameters: Any, tokens: jax.Array) -> jax.Array:
        llama = nnx.merge(structure, parameters)
        positions = jnp.tile(jnp.arange(SLOTS, dtype=jnp.int32), (ROWS, 1))
        see = functools.partial(attend, visible=mask)
        hidden = llama(tokens, positions, see, run.mix)
        return llama.config.logits(hidden, llama.head_weight())

    parameters = parameters_on(partition, family)
    return lambda tokens: np.asarray(forward(parameters, tokens))
