"""Models against the same written out in float64, on one device and on meshes."""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from data.batch import Batch
from kernels import masks
from kernels.layouts import permute
from models.layers import FeedForward
from tasks import base, text
from tests.cases.attention import QUICK
from tests.families import FAMILIES
from tests.runs import small_config
from tests.small_agent import drawn
from tests.small_llama import assert_same, partition_of
from tests.written_out import WrittenOut
from training.mesh import MeshShape

ROWS, LENGTH, VOCAB = 4, 32, 40
PADDED = np.array([[32], [32], [32], [21]], np.int32)
"""Tokens in each row before its padding."""

slow = pytest.mark.slow


class Run:
    """A small model and its loss, on a mesh and in an attention system of its own.

    Its hidden size of 36 divides over a ring of 4, but not over fsdp 2 x ring 4.
    """

    def __init__(
        self,
        shape: MeshShape,
        attention: str,
        family: str = "llama",
        **overrides: Any,
    ):
        fields = {
            "model__vocab_size": VOCAB,
            "model__hidden_size": 36,
            "feed_forward_chunk_tokens": 6,
            "loss_chunk_tokens": 5,
            "implementation": "reference",
        }
        fields |= FAMILIES[family] | overrides
        config = small_config("", "", attention=attention, **fields)
        self.config = config
        self.partition = partition_of(shape)
        self.model = text.model(config, self.partition)
        self.loss = text.loss_function(config, self.model, self.partition)

    def order(self) -> tuple[Any, int]:
        """Layout and ring size."""
        layout = base.attention_system(self.config).layout
        return layout, self.partition.ring_size

    @functools.cached_property
    def program(self) -> Any:
        """Compiled, from parameters and a batch in order to loss and gradients."""

        def placed(x: Any, names: tuple) -> jax.ShapeDtypeStruct:
            sharding = self.partition.sharding(names, x.shape)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        arguments = (
            jax.tree.map(placed, self.model.shapes, self.model.axes),
            jax.tree.map(lambda x: placed(x, ("batch", "sequence")), rows()),
            jax.tree.map(placed, self.model.frozen_shapes, self.model.frozen_axes),
        )
        lowered = jax.jit(jax.value_and_grad(self.loss)).lower(*arguments)
        return lowered.compile(compiler_options=QUICK)

    def answer(self) -> tuple[np.ndarray, Any]:
        """Loss and gradients of `text`, with `parameters`."""
        batch = jax.tree.map(lambda x: permute(x, *self.order()), rows())
        arguments = drawn(self.model, self.partition), batch, self.frozen()
        arguments = jax.device_put(arguments, self.program.input_shardings[0])
        return jax.device_get(self.program(*arguments))

    def frozen(self) -> Any:
        """The parameters that are not trained, if any."""
        shapes, axes = self.model.frozen_shapes, self.model.frozen_axes
        model = dataclasses.replace(self.model, shapes=shapes, axes=axes)
        return drawn(model, self.partition)


run_on = functools.cache(Run)


def one_device(family: str = "llama") -> Run:
    return run_on(MeshShape(), "vanilla", family)


def parameters(family: str = "llama") -> Any:
    run = one_device(family)
    return jax.device_get(drawn(run.model, run.partition))


@functools.cache
def rows(seed: int = 2) -> Batch:
    """Rows of packed documents, the last one padded, in natural order."""
    rng = np.random.default_rng(seed)
    shape = ROWS, LENGTH
    tokens, targets = rng.integers(0, VOCAB, (2, *shape), np.int32)
    ids = np.sort(rng.integers(0, 4, shape), axis=1).astype(np.int32)
    index = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    visible = (masks.documents(ids) & masks.padding(PADDED))(index, LENGTH)
    weights = rng.random(shape, np.float32) * (index < PADDED) * (ids != 2)
    return Batch(tokens, targets, weights, index - visible.k_start, *visible)


@functools.cache
def expected(family: str = "llama") -> tuple[np.ndarray, Any]:
    """Loss and gradients on one device, with all scores and no chunks."""
    return one_device(family).answer()


@functools.cache
def hidden_program():
    """(parameters, batch in order) -> hidden states, on one device."""
    run = one_device()

    def hidden(parameters: Any, batch: Batch) -> jax.Array:
        llama = nnx.merge(run.model.structure, parameters)
        attend = base.make_ring_attention(
            run.partition.mesh, layout=run.order()[0], implementation="reference"
        )
        visible = masks.Visible(batch.k_start, batch.k_end)
        attend = functools.partial(attend, visible=visible)
        return llama(batch.tokens, batch.positions, attend)

    return jax.jit(hidden, compiler_options=QUICK)


def test_hidden_states_are_those_of_llama_written_out():
    got = hidden_program()(parameters(), rows())
    want, _ = WrittenOut(one_device().model.config, parameters())(rows())
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in ("llama", "every_part") else slow)
        for name in FAMILIES
    ],
)
def test_loss_and_its_slopes_are_those_of_the_family_written_out(family, rng):
    """A slope along each parameter alone."""
    loss, gradients = expected(family)
    sizes, start, step = one_device(family).model.config, parameters(family), 1e-5
    leaves, tree = jax.tree.flatten(start)
    assert loss == pytest.approx(WrittenOut(sizes, start)(rows())[1], rel=1e-5)
    for number, gradient in enumerate(jax.tree.leaves(gradients)):
        along = rng.standard_normal(gradient.shape)

        def loss_after(steps: int, number: int = number, d: Any = along) -> float:
            moved = [leaf.astype(np.float64) for leaf in leaves]
            moved[number] += steps * step * d
            return WrittenOut(sizes, jax.tree.unflatten(tree, moved))(rows())[1]

        slope = (loss_after(1) - loss_after(-1)) / (2 * step)
        size = np.linalg.norm(gradient)
        path = jax.tree_util.tree_flatten_with_path(start)[0][number][0]
        assert abs(np.vdot(gradient, along) - slope) < 1e-3 * size, path


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize(
    "attention, shape",
    [
        # Parameters are sharded over the ring alone: see Run.
        ("striped", MeshShape(fsdp=2, ring=4)),
        ("striped", MeshShape(fsdp=2, ring_outer=2, ring=2)),
        ("zigzag", MeshShape(data=2, ring=2, tensor=2)),
        # More devices than key/value heads, and half of a query head for each.
        ("striped", MeshShape(ring=1, ulysses=8)),
        pytest.param("zigzag", MeshShape(fsdp=2, ring=2, ulysses=2), marks=slow),
        pytest.param("striped", MeshShape(ring=2, ulysses=2, tensor=2), marks=slow),
        pytest.param("ring", MeshShape(data=2, ring=2, tensor=2), marks=slow),
        pytest.param("zigzag", MeshShape(ring=4), marks=slow),
        pytest.param("ring", MeshShape(ring=2), marks=slow),
        pytest.param("zigzag", MeshShape(ring=2), marks=slow),
        pytest.param("striped", MeshShape(ring=2), marks=slow),
        pytest.param("ring", MeshShape(ring=4), marks=slow),
        pytest.param("striped", MeshShape(ring=4), marks=slow),
        pytest.param("striped", MeshShape(tensor=2), marks=slow),
        pytest.param("striped", MeshShape(fsdp=2), marks=slow),
        pytest.param("striped", MeshShape(data=2), marks=slow),
        pytest.param("striped", MeshShape(fsdp=2, ring=2, tensor=2), marks=slow),
    ],
    ids=str,
)
def test_every_mesh_gives_the_loss_and_gradients_of_one_device(attention, shape):
    assert_same(run_on(shape, attention).answer(), expected(), 1e-5)


def test_parameters_are_gathered_once_a_pass_and_nothing_else_is():
    run = run_on(MeshShape(fsdp=2, ring=4), "striped")
    program = run.program.as_text()

    def results(kind: str) -> list[int]:
        shapes = re.findall(rf"= f32\[([\d,]+)\]\S* {kind}\(", program)
        return sorted(math.prod(map(int, shape.split(","))) for shape in shapes)

    def whole(leaf: jax.ShapeDtypeStruct, names: tuple) -> int:
        stacked = len(names) == len(leaf.shape) and names[0] is None
        return leaf.size // (run.model.config.num_layers if stacked else 1)

    matrices = jax.tree.map(whole, run.model.shapes, run.model.axes)
    layers = matrices["layers"]
    layer = [*layers["attention"].values(), *layers["feed_forward"].values()]
    ends = [matrices["embedding"], matrices["head"]]
    # A layer's again in the backward: it would be as large as the model to keep them.
    assert results("all-gather") == sorted(2 * layer + ends)
    ring = run.partition.ring_size
    assert results("reduce-scatter") == sorted(n // ring for n in layer + ends)
    assert not re.search(r" all-to-all(-start)?\(", program)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "family, remat",
    [
        ("gpt_oss", "nothing"),  # biases and sinks are shared out too
        pytest.param("gpt_oss", "attention", marks=slow),
        pytest.param("llama", "nothing", marks=slow),
        pytest.param("llama", "attention", marks=slow),
    ],
)
def test_heads_in_parts_give_the_same_and_never_are_all_there(family, remat):
    """Every part has a share of each device's heads; in layers of one kind."""
    shape, fields = MeshShape(ring=2, tensor=2), {"family": family, "remat": remat}
    fields |= {"model__num_heads": 8, "model__num_kv_heads": 4}
    fields |= {"model__layer_pattern": "", "model__window": 0}
    whole, in_parts = (
        Run(shape, "striped", attention_parts=parts, **fields) for parts in (1, 2)
    )
    assert_same(in_parts.answer(), whole.answer(), 1e-5)
    all_heads, half = (
        f"f32[{ROWS},{LENGTH // 2},{heads},{whole.model.config.head_dim}]"
        for heads in (4, 2)
    )
    assert all_heads in whole.program.as_text()
    assert half in in_parts.program.as_text()
    assert remat == "attention" or all_heads not in in_parts.program.as_text()


# A chunk of 6 leaves a remainder.
@pytest.mark.thorough
@pytest.mark.parametrize(
    "chunk", [6, pytest.param(1, marks=slow), pytest.param(1000, marks=slow)]
)
def test_chunks_and_blocks_change_neither_loss_nor_gradients(chunk):
    fields = {"implementation": "", "feed_forward_chunk_tokens": chunk}
    run = Run(MeshShape(), "blockwise", **fields)
    assert_same(run.answer(), expected(), 1e-5)


@pytest.mark.thorough
def test_bfloat16_is_near_float32_and_leaves_gradients_in_float32():
    run = Run(MeshShape(), "striped", compute_dtype="bfloat16")
    loss, gradients = run.answer()
    assert loss == pytest.approx(expected()[0], rel=2e-2)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves((loss, gradients))}
    assert dtypes == {np.dtype(np.float32)}
    assert_same(gradients, expected()[1], 0.1)
    assert loss != expected()[0]


@pytest.mark.thorough
@pytest.mark.parametrize("chunks", [1, 256])
def test_feed_forwards_gradient_in_bfloat16_does_not_suffer_from_chunks(chunks, rng):
    """Weights are cast in every chunk, so that their gradients add up in float32."""
    tokens, run = 2048, one_device()
    module = FeedForward(
        run.model.config, run.partition, tokens // chunks, rngs=nnx.Rngs(0)
    )
    structure, weights = nnx.split(module)
    x, ahead = rng.standard_normal((2, 1, tokens, 36))

    def gradient(dtype: jnp.dtype) -> Any:
        def ahead_of(weights: Any) -> jax.Array:
            y = nnx.merge(structure, weights)(jnp.asarray(x, dtype))
            return (y.astype(jnp.float32) * jnp.asarray(ahead, jnp.float32)).sum()

        return jax.device_get(jax.jit(jax.grad(ahead_of))(weights))

    assert_same(gradient(jnp.bfloat16), gradient(jnp.float32), 9e-3)


def test_changed_token_changes_only_what_follows_it_in_its_document():
    batch = rows()
    before = np.asarray(hidden_program()(parameters(), batch))
    tokens = batch.tokens.copy()
    row, place = 1, LENGTH // 2
    tokens[row, place] = (tokens[row, place] + 1) % VOCAB
    after = np.asarray(hidden_program()(parameters(), batch._replace(tokens=tokens)))
    changed = (before != after).any(axis=-1)
    attends = masks.in_interval(batch.k_start, place, batch.k_end)
    np.testing.assert_array_equal(changed, attends & (np.arange(ROWS)[:, None] == row))
    assert 1 < changed.sum() < LENGTH - place


def test_names_of_axes_fit_the_parameters():
    run = one_device()
    sizes = run.model.config
    length_of = {
        "vocab": sizes.vocab_size,
        "embed": sizes.hidden_size,
        "heads": sizes.num_heads,
        "kv_heads": sizes.num_kv_heads,
        "mlp": sizes.feed_forward_size,
    }

    def check(path: tuple, leaf: jax.ShapeDtypeStruct, names: tuple) -> None:
        named = [(n, size) for n, size in zip(names, leaf.shape, strict=True) if n]
        assert all(length_of[name] == size for name, size in named), path
        if "scale" not in str(path[-1]):
            assert [name for name, _ in named].count("embed") == 1, path
        if "layers" in str(path[0]):
            assert leaf.shape[0] == sizes.num_layers and names[0] is None, path

    jax.tree_util.tree_map_with_path(check, run.model.shapes, run.model.axes)
