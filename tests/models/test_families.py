"""Training of today's families: rings make the steps of one device."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from data.batch import Batch
from kernels.layouts import permute
from tests.cases import in_tiers, table
from tests.small.agents import drawn
from tests.small.models import Run, assert_same, budget_gib, rows
from tests.small.runs import KINDS
from training.sharding.mesh import MeshShape
from training.step import initial_state

STEPS = 10
SETTINGS = {
    # With 3e-3 the losses of ten steps fall so steeply that rounding grows to 1e-5.
    "optimizer__peak_lr": 1e-3,
    "optimizer__end_lr": 1e-4,
    # Above rounding: biases of keys have gradients of nearly 0 where RoPE turns slowly,
    # and Adam would make whole steps of what is left.
    "optimizer__epsilon": 1e-6,
    "train__steps": 50,
    # Of all tokens: other tests have chunks.
    "feed_forward_chunk_tokens": 0,
    "loss_chunk_tokens": 0,
}


def train(run: Run) -> tuple[np.ndarray, list[Any]]:
    """Losses of a run's STEPS, and parameters before and after them.

    All parameters matter from the first step on.
    """
    resolved = run.resolved
    like, step = resolved.state_like, resolved.train_step()
    first = jax.device_get(drawn(run.model, run.partition))
    placing = jax.tree.map(lambda leaf: leaf.sharding, like)
    state = jax.device_put(initial_state(first, resolved.optimizer), placing)
    sharding = run.partition.sharding(("batch", "sequence"), rows().tokens.shape)
    losses = []
    for number in range(STEPS):
        batch = Batch(*(permute(x, *run.order()) for x in rows(number % 2)))
        state, metrics = step(state, jax.device_put(batch, sharding))
        losses.append(float(metrics["loss"]))
    return np.array(losses), [first, jax.device_get(state.params)]


@functools.cache
def on_one_device(family: str, **fields: Any) -> tuple[np.ndarray, list[Any]]:
    run = Run(MeshShape(), "vanilla", family, **SETTINGS | fields)
    return train(run)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "family, attention, mesh, fields", in_tiers("models.txt", "steps")
)
def test_ten_steps_on_a_mesh_are_those_of_one_device(family, attention, mesh, fields):
    shape = MeshShape(**mesh)
    if fields is None:
        fields = {"remat": "nothing"}
        kept = Run(shape, attention, family, **fields).resolved.kept
        fields["remat_budget_gib"] = budget_gib(kept, "nothing", 1)
    run = Run(shape, attention, family, **SETTINGS | fields)
    losses, (first, last) = train(run)
    wanted, (same_first, wanted_last) = on_one_device(family)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert_same(last, wanted_last, 1e-5)
    jax.tree.map(np.testing.assert_array_equal, first, same_first)
    moved = jax.tree.map(
        lambda a, b: np.linalg.norm(b - a) / np.linalg.norm(a), first, last
    )
    assert min(jax.tree.leaves(moved)) > 2e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, more, mesh, tolerance", table("models.txt", "optimizer")
)
def test_losses_of_lean_optimizers_on_a_mesh_are_those_of_one_device(
    kind, more, mesh, tolerance
):
    optimizer = KINDS[kind] | more
    fields = {f"optimizer__{name}": value for name, value in optimizer.items()}
    losses, _ = train(Run(MeshShape(**mesh), "striped", **SETTINGS | fields))
    wanted, _ = on_one_device("llama", **fields)
    plain, _ = on_one_device("llama")
    np.testing.assert_allclose(losses, wanted, rtol=tolerance)
    # Muon's first updates are a fifth of AdamW's, which are of size 1 there.
    behind = 0.25 if optimizer.get("name") == "muon" else 0.05
    assert abs(losses / plain - 1).max() < behind
    assert losses[-2:].mean() < 0.95 * losses[:2].mean()  # of two batches
    assert (losses != plain).any()
