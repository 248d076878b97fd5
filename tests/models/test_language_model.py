"""Models against the same written out in float64, on one device and on meshes."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.layers import FeedForward
from tests.cases import in_tiers
from tests.small.families import FAMILIES
from tests.small.models import BATCH_ROWS, LENGTH, Run, assert_same, rows, run_on
from tests.support.written_out import WrittenOut
from training.sharding.mesh import MeshShape

slow = pytest.mark.slow


def one_device(family: str = "llama") -> Run:
    return run_on(MeshShape(), "vanilla", family)


@functools.cache
def expected(family: str = "llama") -> tuple[np.ndarray, Any]:
    """Loss and gradients on one device, with all scores."""
    return one_device(family).answer()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in ("llama", "every_part") else slow)
        for name in FAMILIES
        if name != "qwen3_5"  # see tests/kernels/test_delta.py
    ],
)
def test_loss_and_its_slopes_are_those_of_the_family_written_out(family, rng):
    """A slope along each parameter alone."""
    loss, gradients = expected(family)
    run, step = one_device(family), 1e-5
    sizes, start = run.model.config, jax.device_get(run.parameters)
    leaves, tree = jax.tree.flatten(start)
    assert loss == pytest.approx(WrittenOut(sizes, start)(rows())[1], rel=1e-5)
    named = jax.tree_util.tree_leaves_with_path(gradients)
    for number, (path, gradient) in enumerate(named):
        along = rng.standard_normal(gradient.shape)

        def loss_after(steps: int, number: int = number, d: Any = along) -> float:
            moved = [leaf.astype(np.float64) for leaf in leaves]
            moved[number] += steps * step * d
            return WrittenOut(sizes, jax.tree.unflatten(tree, moved))(rows())[1]

        slope = (loss_after(1) - loss_after(-1)) / (2 * step)
        error = abs(np.vdot(gradient, along) - slope)
        assert error < 1e-3 * np.linalg.norm(gradient), path


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize("attention, mesh", in_tiers("models.txt", "mesh"), ids=str)
def test_every_mesh_gives_the_loss_and_gradients_of_one_device(attention, mesh):
    assert_same(run_on(MeshShape(**mesh), attention).answer(), expected(), 1e-5)


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
@pytest.mark.parametrize("family, remat", in_tiers("models.txt", "parts"))
def test_heads_in_parts_give_the_same_and_never_are_all_there(family, remat):
    """Every part has a share of each device's heads; in layers of one kind."""
    shape, fields = MeshShape(tensor=2), {"family": family, "remat": remat}
    fields |= {"model__num_heads": 8, "model__num_kv_heads": 4}
    fields |= {"model__layer_pattern": "", "model__window": 0}
    whole, in_parts = (
        Run(shape, "striped", attention_parts=parts, **fields) for parts in (1, 2)
    )
    assert_same(in_parts.answer(), whole.answer(), 1e-5)
    all_heads, half = (
        f"f32[{BATCH_ROWS},{LENGTH},{heads},{whole.model.config.head_dim}]"
        for heads in (4, 2)
    )
    assert all_heads in whole.program.as_text()
    assert half in in_parts.program.as_text()
    assert remat == "attention" or all_heads not in in_parts.program.as_text()


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
def test_feed_forwards_gradient_in_bfloat16_does_not_suffer_from_chunks(rng):
    """Weights are cast in every chunk, so that their gradients add up in float32."""
    tokens, run = 2048, one_device()
    sizes = run.model.config, run.partition
    structure, weights = nnx.split(FeedForward(*sizes, 8, rngs=nnx.Rngs(0)))
    x, ahead = rng.standard_normal((2, 1, tokens, 36))

    def gradient(dtype: jnp.dtype) -> Any:
        def ahead_of(weights: Any) -> jax.Array:
            y = nnx.merge(structure, weights)(jnp.asarray(x, dtype))
            return (y.astype(jnp.float32) * jnp.asarray(ahead, jnp.float32)).sum()

        return jax.device_get(jax.jit(jax.grad(ahead_of))(weights))

    assert_same(gradient(jnp.bfloat16), gradient(jnp.float32), 9e-3)
