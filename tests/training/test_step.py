"""Updates, metrics and skipped updates of a step, with a toy model."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from data.batch import Batch
from kernels import masks
from tests.small.runs import assert_equal_bits
from tools.lib.compiled.pods import aot_pod, compile_for
from training.sharding.mesh import MeshShape, Partition, make_mesh
from training.step import (
    Losses,
    TrainState,
    count_tokens,
    initial_state,
    make_train_step,
)
from training.update.at_once import AtOnce
from training.update.optimizer import OptimizerSettings, make_optimizer

ROWS, LENGTH, VOCAB = 8, 12, 5
RATE = 0.1


def loss_sum(params: Any, batch: Batch) -> jax.Array:
    """Weighted squares of what a table says of the tokens."""
    said = params["table"][batch.tokens] + params["bias"]
    wanted = batch.targets.astype(jnp.float32)
    return (batch.loss_weights * jnp.square(said - wanted)).sum()


def make_batch(rng: np.random.Generator) -> Batch:
    """Packed rows with padding; of very unlike weights, some rows without any."""
    shape = ROWS, LENGTH
    tokens, targets = rng.integers(0, VOCAB, (2, *shape), np.int32)
    ids = np.sort(rng.integers(0, 3, shape), axis=1).astype(np.int32)
    index = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    lengths = rng.integers(3, LENGTH + 1, (ROWS, 1), np.int32)
    visible = (masks.documents(ids) & masks.padding(lengths))(index, LENGTH)
    row_weights = np.array([[0], [1], [9], [0], [2], [0.5], [3], [1]])
    weights = rng.random(shape) * row_weights
    return Batch(
        tokens, targets, weights.astype(np.float32), index - visible.k_start, *visible
    )


def make_params(rng: np.random.Generator) -> dict[str, jax.Array]:
    table = rng.standard_normal(VOCAB)
    return {"table": jnp.asarray(table, jnp.float32), "bias": jnp.float32(0.5)}


def expected(params: dict, batch: Batch) -> tuple[float, dict]:
    """The mean loss of a weighted token and its gradients, in float64."""
    table, bias = (np.asarray(params[name], np.float64) for name in ("table", "bias"))
    weights = batch.loss_weights / batch.loss_weights.sum(dtype=np.float64)
    error = table[batch.tokens] + bias - batch.targets
    slope = 2 * weights * error
    by_token = np.bincount(batch.tokens.ravel(), slope.ravel(), VOCAB)
    return (weights * error**2).sum(), {"table": by_token, "bias": slope.sum()}


OPTIMIZER = AtOnce(optax.sgd(RATE, momentum=0.9))

STEPS = {
    n: jax.jit(make_train_step(loss_sum, OPTIMIZER, microbatches=n)) for n in (1, 2, 8)
}


def assert_close(got: Any, want: Any, tolerance: float = 2e-6) -> None:
    options = {"rtol": tolerance, "atol": tolerance}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **options), got, want)


@pytest.mark.parametrize("microbatches", STEPS)
def test_update_follows_the_mean_of_all_weighted_tokens(microbatches, rng):
    """However the rows are cut, and however unlike or small their weights are."""
    params, whole = make_params(rng), make_batch(rng)
    for scale in 1, 1 / 1024:
        batch = whole._replace(loss_weights=whole.loss_weights * np.float32(scale))
        state, metrics = STEPS[microbatches](initial_state(params, OPTIMIZER), batch)
        loss, gradients = expected(params, batch)
        moved = {n: np.float64(params[n]) - RATE * gradients[n] for n in params}
        assert_close(state.params, moved)
        (trace, _) = state.optimizer_state  # the momentum is that of all rows too
        assert_close(trace.trace, gradients)
        assert int(state.step) == 1
        assert_close(metrics["loss"], loss)
        norm = np.sqrt(sum(np.square(g).sum() for g in gradients.values()))
        assert_close(metrics["grad_norm"], norm)
    batch = whole._replace(loss_weights=np.zeros_like(whole.loss_weights))
    state, metrics = STEPS[microbatches](initial_state(params, OPTIMIZER), batch)
    assert_close(state.params, params, 0)
    assert not any(metrics[name] for name in ("loss", "grad_norm"))


def test_metrics_count_tokens_but_padding_and_the_pairs_that_are_visible(rng):
    batch = make_batch(rng)
    _, metrics = STEPS[1](initial_state(make_params(rng), OPTIMIZER), batch)
    names = {"loss", "grad_norm", "tokens", "pairs", "skipped", "skipped_in_row"}
    assert set(metrics) == names
    assert {(x.shape, x.dtype) for x in metrics.values()} == {((), np.dtype("f4"))}
    assert float(metrics["pairs"]) == (batch.k_end - batch.k_start).clip(0).sum()
    seeing = int((batch.k_end > batch.k_start).sum())
    assert float(metrics["tokens"]) == seeing < batch.tokens.size
    index = np.arange(2**20, dtype=np.int32)[None]  # more pairs than an int32 counts
    pairs = count_tokens(Batch(*[0 * index] * 4, 0 * index, index + 1)).pairs
    assert float(pairs) == pytest.approx(2**39, rel=1e-5)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_parts_of_the_loss_are_told_apart_and_add_up(microbatches, rng):
    """Of two parts, one of them the odd tokens; the update is that of the whole."""
    params, batch = make_params(rng), make_batch(rng)

    def parts(batch):
        odd = (batch.tokens % 2).astype(np.float32)
        weights = batch.loss_weights * (1 - odd), batch.loss_weights * odd
        return [batch._replace(loss_weights=w) for w in weights]

    def losses_of_parts(params, batch):
        return jnp.stack([loss_sum(params, part) for part in parts(batch)])

    def count(batch):
        weights = jnp.stack([part.loss_weights.sum() for part in parts(batch)])
        return count_tokens(batch)._replace(weights=weights)

    options = {"microbatches": microbatches, "count": count}
    step = make_train_step(losses_of_parts, OPTIMIZER, **options)
    with jax.numpy_dtype_promotion("standard"):
        state, metrics = jax.jit(step)(initial_state(params, OPTIMIZER), batch)
    whole_state, whole = STEPS[1](initial_state(params, OPTIMIZER), batch)
    assert_close(state.params, whole_state.params)
    assert_close(metrics["loss"], whole["loss"])
    losses = [expected(params, part)[0] for part in parts(batch)]
    assert_close(metrics["loss_parts"], losses, 1e-5)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_what_is_minimised_beside_the_loss_is_no_part_of_it(microbatches, rng):
    """Figures are means by weight, and gradients those of both."""
    params, batch = make_params(rng), make_batch(rng)

    def losses(params, batch):
        weight = batch.loss_weights.sum()
        squares = [jnp.square(leaf).sum() for leaf in jax.tree.leaves(params)]
        figures = {"experts_balance": 7 * weight}
        return Losses(loss_sum(params, batch), weight * sum(squares) / 2, figures)

    step = jax.jit(make_train_step(losses, OPTIMIZER, microbatches=microbatches))
    state, metrics = step(initial_state(params, OPTIMIZER), batch)
    plain_state, plain = STEPS[1](initial_state(params, OPTIMIZER), batch)
    assert_close(metrics["loss"], plain["loss"])
    assert_close(metrics["experts_balance"], 7.0)
    moved = jax.tree.map(jnp.subtract, plain_state.params, state.params)
    wanted = jax.tree.map(lambda leaf: RATE * leaf, params)
    assert_close(moved, wanted, 1e-4)


def test_no_row_moves_to_another_device_for_its_microbatch(rng):
    partition = Partition(make_mesh(MeshShape(fsdp=4, data=2), jax.devices()))
    rows = partition.sharding(("batch", "sequence"), (16, LENGTH))
    state = initial_state(make_params(rng), OPTIMIZER)
    state = jax.device_put(state, partition.sharding((), ()))
    batch = jax.tree.map(lambda *x: np.concatenate(x), make_batch(rng), make_batch(rng))
    program = STEPS[2].lower(state, jax.device_put(batch, rows)).compile().as_text()
    moves = "all-gather|all-to-all|collective-permute|collective-broadcast"
    assert not re.findall(f"(?:{moves})(?:-start)?\\(", program)
    assert "all-reduce" in program
    # Eight rows, one a device, are all that a round of the loop reads.
    assert f"s32[1,{LENGTH}]" in program


ADAMW, _ = make_optimizer(OptimizerSettings(0.1, 0.01, 3, total_steps=20))

GUARDED = jax.jit(make_train_step(loss_sum, ADAMW))
"""A step of AdamW, which counts its updates for a schedule."""


def first() -> TrainState:
    return initial_state(make_params(np.random.default_rng(1)), ADAMW)


def with_weight(weight: float, seed: int = 0) -> Batch:
    """weight: of the first token; nan, or so much that squares overflow, is bad."""
    batch = make_batch(np.random.default_rng(seed))
    batch.loss_weights[0, 0] = weight
    return batch


@pytest.mark.parametrize("weight", [np.nan, np.inf, -np.inf])
def test_a_run_with_a_bad_batch_ends_as_one_without_it(weight):
    """The optimizer's counts, and so its schedule, do not see it."""
    good = [with_weight(1, seed) for seed in range(4)]
    states = []
    for batches in (good, [*good[:2], with_weight(weight), *good[2:]]):
        state = first()
        for batch in batches:
            before = state
            state, metrics = GUARDED(state, batch)
            if not np.isfinite(batch.loss_weights).all():
                assert_equal_bits(state.params, before.params)
                assert_equal_bits(state.optimizer_state, before.optimizer_state)
                assert metrics["skipped"] == metrics["skipped_in_row"] == 1
        states.append(state)
    assert_equal_bits(states[0].params, states[1].params)
    assert_equal_bits(states[0].optimizer_state, states[1].optimizer_state)
    assert [int(state.step) for state in states] == [4, 5]
    assert metrics["skipped"] == 1 and metrics["skipped_in_row"] == 0
    # A loss that is not finite is not remembered either.
    np.testing.assert_array_equal(states[0].guard.losses, states[1].guard.losses)


def test_overflowing_gradients_of_a_finite_loss_are_skipped():
    def steep(params, batch):
        return jnp.sqrt(params["table"]).sum()

    state = initial_state({"table": jnp.zeros(6)}, ADAMW)
    after, metrics = jax.jit(make_train_step(steep, ADAMW))(state, with_weight(1))
    assert np.isfinite(metrics["loss"]) and not np.isfinite(metrics["grad_norm"])
    assert_equal_bits(after.params, state.params)
    assert int(after.guard.skipped) == 1


@pytest.mark.thorough
def test_the_guard_holds_no_second_copy_of_the_parameters(monkeypatch):
    """In a program for a TPU, beside one that skips no update."""
    mesh = Mesh(np.array(aot_pod("v4:2x2x1").devices[:1]), ("chip",))
    size = 1 << 20
    params = {"table": jnp.zeros(size), "more": jnp.zeros(2 * size)}
    batch = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, with_weight(1)))

    def cost(params, batch):
        parts = [jnp.square(jnp.sin(x) - 1).sum() for x in params.values()]
        return sum(parts) * batch.loss_weights.sum()

    def peak() -> int:
        state = jax.eval_shape(lambda: initial_state(params, ADAMW))
        step = jax.jit(
            make_train_step(cost, ADAMW),
            donate_argnums=0,
            out_shardings=NamedSharding(mesh, PartitionSpec()),
        )
        memory = compile_for(mesh, step, state, batch).memory_analysis()
        assert memory.alias_size_in_bytes >= 3 * 4 * 3 * size
        return memory.peak_memory_in_bytes

    guarded = peak()
    monkeypatch.setattr("training.step.judge", lambda guard, *_: (True, guard))
    assert guarded < peak() + 0.1 * 4 * size
