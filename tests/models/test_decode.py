"""Cached, sharded generation against the whole forward on one device."""

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
from flax import nnx

import assemble
from kernels import masks
from kernels.cached import CachedAttention
from kernels.layout import order
from kernels.ring import make_ring_attention
from models import decode
from models.cache import EMPTY, Cache, appends_left, empty_cache
from models.decode import NOTHING, Generator
from models.sampling import Sampling
from tests.cases import QUICK
from tests.runs import small_config
from tools.generation import cache_shardings, generator
from training.mesh import MeshShape, Partition, StationaryPartition, make_mesh

ROWS, SLOTS, VOCAB = 2, 64, 40
NEW = SLOTS - 11 + 1
"""Tokens generated: to the cache's last slot, as the last is not put there."""

GREEDY = Sampling(temperature=0.0)

slow = pytest.mark.slow


def config_of(attention: str, **overrides: Any) -> ml_collections.ConfigDict:
    """Four query heads, two key/value heads, two layers."""
    fields = {"model__vocab_size": VOCAB, "implementation": "reference"}
    return small_config("", "", attention=attention, **fields | overrides)


def partition_of(shape: MeshShape) -> Partition:
    count = math.prod((shape.data, shape.fsdp, shape.ring, shape.tensor))
    return Partition(make_mesh(shape, jax.devices()[:count]))


def parameters_on(partition: Partition) -> Any:
    """Large enough for every part to matter; the same on every mesh."""
    rng = np.random.default_rng(1)
    model = assemble.model(config_of("striped"), partition)

    def draw(path: tuple, shape: jax.ShapeDtypeStruct, names: tuple) -> jax.Array:
        offset = 1.0 if "scale" in str(path[-1]) else 0.0
        values = (offset + 0.2 * rng.standard_normal(shape.shape)).astype(np.float32)
        return jax.device_put(values, partition.sharding(names, shape.shape))

    return jax.tree_util.tree_map_with_path(draw, model.shapes, model.axes)


@functools.cache
def whole_forward(dtype: str = "float32") -> Callable[[np.ndarray], np.ndarray]:
    """From tokens (B, SLOTS) to logits (B, SLOTS, V): no cache, one device."""
    config = config_of("vanilla", compute_dtype=dtype)
    partition = partition_of(MeshShape())
    structure = assemble.model(config, partition).structure
    attend = make_ring_attention(
        partition.mesh,
        layout=assemble.attention_system(config).layout,
        implementation="reference",
    )

    @jax.jit
    def forward(parameters: Any, tokens: jax.Array) -> jax.Array:
        llama = nnx.merge(structure, parameters)
        positions = jnp.tile(jnp.arange(SLOTS, dtype=jnp.int32), (ROWS, 1))
        causal = functools.partial(attend, visible=masks.causal())
        hidden = llama(tokens, positions, causal)
        head = llama.head[...].astype(hidden.dtype)
        return jnp.dot(hidden, head, preferred_element_type=jnp.float32)

    parameters = parameters_on(partition)
    return lambda tokens: np.asarray(forward(parameters, tokens))


def some_prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, VOCAB, length) for length in (11, 5)]


@functools.cache
def uncached() -> np.ndarray:
    """Greedy tokens of `some_prompts`, (NEW, ROWS): the whole row again every time."""
    lengths = np.array([len(prompt) for prompt in some_prompts()])
    tokens = np.zeros((ROWS, SLOTS + 1), np.int32)
    for row, prompt in enumerate(some_prompts()):
        tokens[row, : len(prompt)] = prompt
    rows = np.arange(ROWS)
    for _ in range(NEW):
        logits = whole_forward()(tokens[:, :-1])
        tokens[rows, lengths] = logits[rows, lengths - 1].argmax(axis=-1)
        lengths += 1
    return np.stack([tokens[rows, lengths - NEW + i] for i in range(NEW)])


@functools.cache
def generator_on(
    shape: MeshShape, attention: str, sampling: Sampling = GREEDY, slots: int = SLOTS
) -> tuple[Generator, Any]:
    """A generator and its parameters."""
    config, partition = config_of(attention), partition_of(shape)
    programs = generator(config, partition, sampling, rows=ROWS, cache_tokens=slots)
    return programs, parameters_on(partition)


def generated(
    programs: tuple[Generator, Any], max_tokens: int = NEW, **options: Any
) -> np.ndarray:
    """(tokens, ROWS)."""
    one, parameters = programs
    options = {"seed": 0} | options
    return np.stack(
        list(one.generate(parameters, some_prompts(), max_tokens, **options))
    )


@pytest.mark.parametrize(
    "attention, shape",
    [
        ("striped", MeshShape(ring=4)),
        ("ring", MeshShape(ring=8)),
        ("striped", MeshShape(fsdp=2, ring=2, tensor=2)),
        pytest.param("striped", MeshShape(), marks=slow),
        pytest.param("striped", MeshShape(ring=2), marks=slow),
        pytest.param("striped", MeshShape(ring=8), marks=slow),
        pytest.param("ring", MeshShape(ring=2), marks=slow),
        pytest.param("ring", MeshShape(ring=4), marks=slow),
        pytest.param("zigzag", MeshShape(ring=4), marks=slow),
        pytest.param("zigzag", MeshShape(data=2, ring=2, tensor=2), marks=slow),
        pytest.param("vanilla", MeshShape(tensor=2), marks=slow),
    ],
    ids=str,
)
def test_cached_tokens_are_those_of_the_whole_forward_each_time(attention, shape):
    got = generated(generator_on(shape, attention))
    np.testing.assert_array_equal(got, uncached())
    assert len(np.unique(got)) > 5


@dataclass(frozen=True)
class Teacher:
    """Logits of given tokens: some at once, the others appended, a few at a time."""

    dtype: str
    shape: MeshShape = MeshShape(ring=2, tensor=2)

    @functools.cached_property
    def partition(self) -> Partition:
        return partition_of(self.shape)

    @functools.cached_property
    def operations(self) -> CachedAttention:
        return CachedAttention(self.partition.mesh)

    def _model(self, partition: Partition) -> Any:
        config = config_of("striped", compute_dtype=self.dtype)
        return assemble.model(config, partition).structure

    def empty(self) -> Cache:
        sizes = config_of("striped").model
        shape = sizes.num_layers, ROWS, SLOTS, sizes.num_kv_heads, sizes.head_dim
        ring = self.shape.ring
        cache = empty_cache(shape, jnp.dtype(self.dtype), ring)
        return jax.device_put(cache, cache_shardings(self.partition, shape))

    @functools.cached_property
    def prefill(self) -> Callable[..., tuple[jax.Array, Cache]]:
        config, mesh = config_of("striped"), self.partition.mesh
        layout = assemble.attention_system(config).layout
        ring = make_ring_attention(mesh, layout=layout, implementation="reference")
        models = self._model(self.partition), self._model(StationaryPartition(mesh))

        def prefill(parameters, tokens, index, cache):
            llama, few = (nnx.merge(model, parameters) for model in models)
            lengths = (index != EMPTY).sum(axis=1, keepdims=True, dtype=jnp.int32)
            visible = masks.causal() & masks.padding(lengths)
            attend = functools.partial(ring, visible=visible)
            hidden, cache = decode.prefill(
                llama, tokens, index, cache, attend, self.operations
            )
            return decode.logits(few, hidden), cache

        return jax.jit(prefill, compiler_options=QUICK)

    @functools.cached_property
    def append(self) -> Callable[..., tuple[jax.Array, Cache]]:
        model = self._model(StationaryPartition(self.partition.mesh))

        def append(parameters, tokens, index, cache):
            llama = nnx.merge(model, parameters)
            hidden, cache = decode.append(llama, tokens, index, cache, self.operations)
            return decode.logits(llama, hidden), cache

        return jax.jit(append, donate_argnums=3, compiler_options=QUICK)

    def logits(
        self, tokens: np.ndarray, lengths: Sequence[int], counts: Sequence[int]
    ) -> tuple[np.ndarray, Cache]:
        """Of `lengths[r] + sum(counts)` tokens of row r, (B, SLOTS, V), nan elsewhere.

        lengths: of the rows' prompts. counts: how many tokens are appended each time.
        """
        length = 12
        index = np.tile(np.arange(length, dtype=np.int32), (ROWS, 1))
        index[index >= np.array(lengths)[:, None]] = EMPTY
        layout = assemble.attention_system(config_of("striped")).layout
        slots = order(layout, self.shape.ring, length)
        parameters = parameters_on(self.partition)
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


@functools.cache
def teacher(dtype: str) -> Teacher:
    return Teacher(dtype)


def some_tokens() -> np.ndarray:
    return np.random.default_rng(3).integers(0, VOCAB, (ROWS, SLOTS), np.int32)


def largest_difference(got: np.ndarray, want: np.ndarray) -> float:
    """Of the logits that there are: those of rows of 11 and 5 tokens and 20 more."""
    there = ~np.isnan(got)
    assert there.all(axis=-1).sum(axis=1).tolist() == [31, 25]
    return np.abs(got - want)[there].max()


def test_cached_logits_are_those_of_the_teacher_forced_forward():
    tokens = some_tokens()
    got, _ = teacher("float32").logits(tokens, (11, 5), (4, 1, 4, 4, 1, 1, 1, 4))
    want = whole_forward()(tokens)
    assert largest_difference(got, want) < 1e-4
    assert np.abs(want).max() > 1


@slow
def test_cached_logits_in_bfloat16_are_near():
    tokens = some_tokens()
    got, cache = teacher("bfloat16").logits(tokens, (11, 5), (4, 4, 4, 4, 4))
    assert cache.keys.dtype == cache.values.dtype == jnp.bfloat16
    plain = np.abs(whole_forward("bfloat16")(tokens) - whole_forward()(tokens)).max()
    assert largest_difference(got, whole_forward()(tokens)) < 2 * plain


def test_four_tokens_at_once_are_as_one_by_one():
    tokens = some_tokens()
    at_once, cache = teacher("float32").logits(tokens, (11, 5), (4,) * 5)
    one_by_one, other = teacher("float32").logits(tokens, (11, 5), (1,) * 20)
    assert largest_difference(at_once, one_by_one) < 1e-5

    def by_index(cache: Cache, row: int) -> tuple[np.ndarray, np.ndarray]:
        index = np.asarray(cache.index[row])
        slots = np.argsort(index)[: (index != EMPTY).sum()]
        return index[slots], np.asarray(cache.keys)[:, row, slots]

    for row, length in enumerate((31, 25)):
        index, keys = by_index(cache, row)
        np.testing.assert_array_equal(index, np.arange(length))
        np.testing.assert_allclose(keys, by_index(other, row)[1], atol=1e-5)


def test_members_of_the_ring_fill_evenly():
    # The longer row's 11 tokens are 6 and 5; so the first four go to the second member.
    fills = {(4,): [6, 9], (4, 4): [10, 9], (1,): [6, 6], (1,) * 8: [10, 9]}
    for counts, filled in fills.items():
        _, cache = teacher("float32").logits(some_tokens(), (11, 5), counts)
        assert np.asarray(cache.filled).tolist() == filled
        taken = (np.asarray(cache.index) != EMPTY).sum(axis=1)
        assert taken.tolist() == [11 + sum(counts), 5 + sum(counts)]


def test_rows_without_new_tokens_stay_as_they_were():
    tokens, one = some_tokens(), teacher("float32")
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


def test_room_is_counted_by_member():
    assert appends_left(np.array([6, 9]), 64, 1) == 64 - 15
    assert appends_left(np.array([6, 9]), 64, 4) == 6 + 5
    assert appends_left(np.array([32, 30]), 64, 4) == 0


def step_program(ring: int, slots: int) -> Any:
    one, parameters = generator_on(MeshShape(ring=ring), "striped", slots=slots)
    of_rows = np.zeros(ROWS, np.int32)
    return one.step.lower(parameters, one.empty(), of_rows, of_rows, 0).compile()


def test_a_step_moves_neither_the_cache_nor_parameters():
    slots = 4096
    programs = {ring: step_program(ring, slots) for ring in (2, 8)}
    sizes = config_of("striped").model
    for ring, program in programs.items():
        text = program.as_text()
        collectives = re.findall(
            r"= [a-z]+\d+\[([\d,]*)\]\S* "
            r"(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
            r"(?:-start)?\(",
            text,
        )
        assert {kind for _, kind in collectives} == {"all-gather", "all-reduce"}
        largest = max(
            math.prod(map(int, shape.split(","))) for shape, _ in collectives if shape
        )
        # Of a row: the feed-forward's width is more than its logits or its queries.
        assert largest <= ROWS * sizes.feed_forward_size
        # The cache is written where it is, and not copied.
        local = sizes.num_layers, ROWS, slots // ring, sizes.num_kv_heads
        shape = ",".join(map(str, (*local, sizes.head_dim)))
        whole = set(re.findall(rf"\[{shape}\]\S* ([a-z][\w-]*)\(", text))
        assert "dynamic-update-slice" in whole
        assert whole <= {
            "dynamic-update-slice",
            "fusion",
            "get-tuple-element",
            "parameter",
        }
    memory = {ring: program.memory_analysis() for ring, program in programs.items()}
    stack = sizes.num_layers * ROWS * slots * sizes.num_kv_heads * sizes.head_dim * 4
    for ring, found in memory.items():
        assert found.alias_size_in_bytes >= 2 * stack // ring
        # One layer's keys and values and what is small; never all layers'.
        assert found.temp_size_in_bytes < 1.3 * 2 * stack // sizes.num_layers // ring
    assert memory[8].temp_size_in_bytes < memory[2].temp_size_in_bytes


def test_all_steps_and_prompts_of_like_lengths_share_a_program():
    one, parameters = generator_on(MeshShape(ring=4), "striped")
    compiled = {name: getattr(one, name)._cache_size() for name in ("step", "prefill")}
    generated((one, parameters))
    prompts = [prompt[:-1] for prompt in some_prompts()]
    assert len(list(one.generate(parameters, prompts, NEW, seed=0))) == NEW
    for name, before in compiled.items():
        assert getattr(one, name)._cache_size() == max(before, 1)


def test_a_row_that_has_ended_gets_nothing_and_others_go_on():
    want = uncached()
    stop = int(want[6, 0])
    ends = [int(np.argmax(np.append(want[:, row], stop) == stop)) for row in (0, 1)]
    got = generated(generator_on(MeshShape(ring=4), "striped"), stop_tokens=[stop])
    assert len(got) == min(max(ends) + 1, NEW) and ends[0] != ends[1]
    for row, end in enumerate(ends):
        np.testing.assert_array_equal(got[: end + 1, row], want[: end + 1, row])
        assert (got[end + 1 :, row] == NOTHING).all()


WARM = Sampling(temperature=1.5)


def test_draws_follow_the_seed():
    one = generator_on(MeshShape(ring=2), "ring", WARM)
    first, again, other = (generated(one, seed=seed) for seed in (7, 7, 8))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any() and (first != uncached()).any()


@slow
def test_draws_do_not_depend_on_the_mesh():
    one = generator_on(MeshShape(ring=2), "ring", WARM)
    other = generator_on(MeshShape(fsdp=2, ring=2), "striped", WARM)
    np.testing.assert_array_equal(generated(one, seed=7), generated(other, seed=7))


def test_the_cache_can_be_used_to_its_last_slot():
    one = generator_on(MeshShape(ring=4), "striped")
    assert len(generated(one, NEW)) == NEW
    with pytest.raises(ValueError) as caught:
        generated(one, NEW + 1)
    message = str(caught.value)
    assert f"prompt of 11 tokens and max_tokens={NEW + 1} do not go" in message
    assert "cache of 64 tokens" in message and f"at most {NEW} tokens" in message


def test_what_cannot_be_generated_is_refused():
    one, parameters = generator_on(MeshShape(ring=4), "striped")
    prompt = np.arange(3)
    with pytest.raises(ValueError, match="1 prompts are not the 2 rows"):
        one.generate(parameters, [prompt], 5, seed=0)
    with pytest.raises(ValueError, match="prompt 1 has no tokens"):
        one.generate(parameters, [prompt, prompt[:0]], 5, seed=0)
    with pytest.raises(ValueError, match="max_tokens=0 must be at least 1"):
        one.generate(parameters, [prompt, prompt], 0, seed=0)


def test_sizes_that_do_not_divide_over_the_mesh_are_refused():
    config = config_of("striped")
    partition = partition_of(MeshShape(fsdp=2, ring=4))
    with pytest.raises(ValueError, match="3 batch do not divide"):
        generator(config, partition, GREEDY, rows=3, cache_tokens=SLOTS)
    with pytest.raises(ValueError, match="cache of 0 tokens"):
        generator(config, partition, GREEDY, rows=2, cache_tokens=0)
    with pytest.raises(ValueError, match="30 slots .* ring of 4: make them 32"):
        empty_cache((2, 2, 30, 2, 8), jnp.float32, 4)
