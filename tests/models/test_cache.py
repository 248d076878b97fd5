"""Tokens at once, a few at a time and one by one: the same logits, the same cache."""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
from flax import nnx

from kernels import masks
from kernels.decode_attention import CachedAttention
from kernels.layouts import order
from models import cache as caches
from models.cache import EMPTY, Cache, empty_cache
from tasks import base, text
from tasks.generation import cache_shardings
from tests.small_llama import (
    ROWS,
    SLOTS,
    VOCAB,
    config_of,
    parameters_on,
    partition_of,
    whole_forward,
)
from training.mesh import MeshShape, Partition, StationaryPartition


@dataclass(frozen=True)
class Teacher:
    """Logits of given tokens: some at once, the others appended, a few at a time."""

    shape: MeshShape = MeshShape(ring=2, tensor=2)
    family: str = "llama"

    @property
    def config(self) -> ml_collections.ConfigDict:
        return config_of("striped", self.family)

    @functools.cached_property
    def partition(self) -> Partition:
        return partition_of(self.shape)

    @functools.cached_property
    def operations(self) -> CachedAttention:
        return CachedAttention(self.partition.mesh, **base.scores(self.config))

    def _model(self, partition: Partition) -> Any:
        return text.model(self.config, partition).structure

    def empty(self) -> Cache:
        sizes = self.config.model
        shape = sizes.num_layers, ROWS, SLOTS, sizes.num_kv_heads, sizes.head_dim
        ring = self.shape.ring
        cache = empty_cache(shape, jnp.float32, ring)
        return jax.device_put(cache, cache_shardings(self.partition, shape))

    @functools.cached_property
    def prefill(self) -> Callable[..., tuple[jax.Array, Cache]]:
        ring = base.ring_attention(self.config, self.partition)
        few = StationaryPartition(self.partition.mesh)
        models = self._model(self.partition), self._model(few)

        def prefill(parameters, tokens, index, cache):
            llama, few = (nnx.merge(model, parameters) for model in models)
            lengths = (index != EMPTY).sum(axis=1, keepdims=True, dtype=jnp.int32)
            visible = masks.causal() & masks.padding(lengths)
            attend = functools.partial(ring, visible=visible)
            x = llama.embed(tokens)
            hidden, cache = caches.fill(llama, x, index, cache, attend, self.operations)
            return few.logits(hidden), cache

        return jax.jit(prefill)

    @functools.cached_property
    def append(self) -> Callable[..., tuple[jax.Array, Cache]]:
        model = self._model(StationaryPartition(self.partition.mesh))

        def append(parameters, tokens, index, cache):
            llama = nnx.merge(model, parameters)
            x = llama.embed(tokens)
            hidden, cache = caches.append(llama, x, index, cache, self.operations)
            return llama.logits(hidden), cache

        return jax.jit(append, donate_argnums=3)

    def logits(
        self, tokens: np.ndarray, lengths: Sequence[int], counts: Sequence[int]
    ) -> tuple[np.ndarray, Cache]:
        """Of `lengths[r] + sum(counts)` tokens of row r, (B, SLOTS, V), nan elsewhere.

        lengths: of the rows' prompts. counts: how many tokens are appended each time.
        """
        length = 12
        index = np.tile(np.arange(length, dtype=np.int32), (ROWS, 1))
        index[index >= np.array(lengths)[:, None]] = EMPTY
        layout = base.attention_system(self.config).layout
        slots = order(layout, self.shape.ring, length)
        parameters = parameters_on(self.partition, self.family)
        found, cache = self.prefill(
            parameters, tokens[:, slots], index[:, slots], self.empty()
        )
        logits = np.full((ROWS, SLOTS, VOCAB), np.nan, np.float32)
        logits[:, slots] = found
        logits[:, :length][index == EMPTY] = np.nan
        rows, behind = np.arange(ROWS)[:, None], np.array(lengths)
        for count in counts:
            places = (behind[:, None] + np.arange(count)).astype(np.int32)
            found, cache = self.append(parameters, tokens[rows, places], places, cache)
            logits[rows, places] = found
            behind += count
        return logits, cache


teacher = functools.cache(Teacher)


def some_tokens() -> np.ndarray:
    return np.random.default_rng(3).integers(0, VOCAB, (ROWS, SLOTS), np.int32)


slow = pytest.mark.slow
OTHERS = "mistral", "gemma2", "gemma3", "olmo2", "gpt_oss"


@pytest.mark.parametrize(
    "family, shape",
    [
        ("llama", MeshShape(ring=2, tensor=2)),
        # Past its window.
        pytest.param("every_part", MeshShape(ring=4), marks=pytest.mark.thorough),
        pytest.param("every_part", MeshShape(), marks=slow),
        *(
            pytest.param(family, MeshShape(ring=ring), marks=slow)
            for family in OTHERS
            for ring in (1, 4)
        ),
    ],
)
def test_cached_logits_are_those_of_the_teacher_forced_forward(family, shape):
    tokens = some_tokens()
    counts = 4, 1, 4, 4, 1, 1, 1, 4
    got, _ = teacher(shape, family).logits(tokens, (11, 5), counts)
    want, there = whole_forward("float32", family)(tokens), ~np.isnan(got)
    assert there.all(axis=-1).sum(axis=1).tolist() == [31, 25]
    assert np.abs(got - want)[there].max() < 1e-4
    assert np.abs(want).max() > 1


def test_members_of_the_ring_fill_evenly():
    # The longer row's 11 tokens are 6 and 5; so the first four go to the second member.
    fills = {(4,): [6, 9], (4, 4): [10, 9], (1,): [6, 6], (1,) * 8: [10, 9]}
    for counts, filled in fills.items():
        _, cache = teacher().logits(some_tokens(), (11, 5), counts)
        assert np.asarray(cache.filled).tolist() == filled
        taken = (np.asarray(cache.index) != EMPTY).sum(axis=1)
        assert taken.tolist() == [11 + sum(counts), 5 + sum(counts)]


def test_rows_without_new_tokens_stay_as_they_were():
    tokens, one = some_tokens(), teacher()
    want, _ = one.logits(tokens, (11, 5), (4,))
    _, cache = one.logits(tokens, (11, 5), ())
    parameters = parameters_on(one.partition)
    for row, length in enumerate((11, 5)):
        places = np.full((ROWS, 4), EMPTY, np.int32)
        places[row] = length + np.arange(4)
        new = np.where(places == EMPTY, 0, tokens[row, length : length + 4])
        logits, cache = one.append(parameters, new, places, cache)
        expected = want[row, length : length + 4]
        np.testing.assert_allclose(logits[row], expected, atol=1e-5)
    counts = (np.asarray(cache.index) != EMPTY).sum(axis=1)
    assert counts.tolist() == [15, 9]


@pytest.mark.parametrize(
    "shape, ring",
    [
        ((0, 2, 32, 2, 8), 4),
        ((2, 0, 32, 2, 8), 4),
        ((2, 2, 0, 2, 8), 4),
        ((2, 2, 32, 0, 8), 4),
        ((2, 2, 32, 2, 0), 4),
        ((2, 2, 30, 2, 8), 4),
        ((2, 2, 32, 2, 8), 0),
    ],
)
def test_a_cache_of_nothing_or_of_uneven_shares_is_refused(shape, ring):
    with pytest.raises(ValueError, match=f"over the ring of {ring}, got .{shape[0]}, "):
        empty_cache(shape, jnp.float32, ring)


@pytest.mark.parametrize("run", [caches.fill, caches.append])
@pytest.mark.parametrize("index", [np.zeros((2, 3), np.int32), np.zeros((2, 4))])
def test_an_index_that_is_not_one_of_each_token_is_refused(run, index):
    x = jnp.ones((2, 4, 8))
    rest = [None] * (len(inspect.signature(run).parameters) - 3)
    with pytest.raises(ValueError, match=r"index must be int32 \(2, 4\).*got"):
        run(None, x, index, *rest)
