"""Bad steps change nothing, and the run knows of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from data.batch import Batch
from tests.runs import assert_equal_bits
from tools.lib.compiled.pods import aot_pod, compile_for
from training.guard import (
    SPIKE_WINDOW,
    BadSteps,
    GuardSettings,
    Replay,
    check_skipped,
    compare_replays,
    initial_guard,
    judge,
)
from training.optimizer import OptimizerSettings, make_optimizer
from training.step import initial_state, make_replay, make_train_step

SIZE = 6
OPTIMIZER, _ = make_optimizer(OptimizerSettings(0.1, 0.01, 3, total_steps=20))


def loss_sum(params: Any, batch: Batch) -> jax.Array:
    said = params["table"][batch.tokens]
    wanted = batch.targets.astype(jnp.float32)
    return (batch.loss_weights * jnp.square(said - wanted)).sum()


def make_batch(weight: float = 1.0, seed: int = 0) -> Batch:
    """weight: of the first token; nan, or so much that squares overflow, is bad."""
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, SIZE, (2, 4, 8), np.int32)
    weights = np.ones((4, 8), np.float32)
    weights[0, 0] = weight
    index = np.tile(np.arange(8, dtype=np.int32), (4, 1))
    return Batch(tokens, targets, weights, index, 0 * index, index + 1)


def make_params() -> dict[str, jax.Array]:
    return {"table": jnp.arange(SIZE, dtype=jnp.float32) / 3}


@pytest.fixture(scope="module")
def step() -> Any:
    return jax.jit(make_train_step(loss_sum, OPTIMIZER))


@pytest.mark.parametrize("weight", [np.nan, np.inf, -np.inf])
def test_a_bad_batch_changes_nothing_but_the_number_of_the_step(
    step: Any, weight: float
) -> None:
    state, _ = step(initial_state(make_params(), OPTIMIZER), make_batch())
    after, metrics = step(state, make_batch(weight))
    assert_equal_bits(after.params, state.params)
    assert_equal_bits(after.optimizer_state, state.optimizer_state)
    assert int(after.step) == 2
    assert metrics["skipped"] == metrics["skipped_in_row"] == 1
    assert not np.isfinite(metrics["loss"]) or not np.isfinite(metrics["grad_norm"])


def test_a_run_with_a_bad_batch_ends_as_one_without_it(step: Any) -> None:
    """The optimizer's counts, and so its schedule, do not see it."""
    good = [make_batch(seed=i) for i in range(6)]
    states = []
    for batches in (good, [*good[:3], make_batch(np.nan), *good[3:]]):
        state = initial_state(make_params(), OPTIMIZER)
        for batch in batches:
            state, metrics = step(state, batch)
        states.append(state)
    assert_equal_bits(states[0].params, states[1].params)
    assert_equal_bits(states[0].optimizer_state, states[1].optimizer_state)
    assert [int(state.step) for state in states] == [6, 7]
    assert metrics["skipped"] == 1 and metrics["skipped_in_row"] == 0
    # The loss that is no number is not remembered either.
    np.testing.assert_array_equal(states[0].guard.losses, states[1].guard.losses)


def test_overflowing_gradients_of_a_finite_loss_are_skipped() -> None:
    def steep(params: Any, batch: Batch) -> jax.Array:
        return 1e30 * jnp.square(params["table"] * 1e-20).sum() * 1e15

    state = initial_state({"table": jnp.full(SIZE, 1e20)}, OPTIMIZER)
    after, metrics = jax.jit(make_train_step(steep, OPTIMIZER))(state, make_batch())
    assert not np.isfinite(metrics["grad_norm"]) or not np.isfinite(metrics["loss"])
    assert_equal_bits(after.params, state.params)
    assert int(after.guard.skipped) == 1


def judged(losses: np.ndarray, sigmas: float) -> list[bool]:
    decide = jax.jit(judge, static_argnums=3)
    guard, results = initial_guard(), []
    for loss in losses.astype(np.float32):
        is_good, guard = decide(guard, loss, np.float32(1), sigmas)
        results.append(bool(is_good))
    return results


def test_a_spike_is_judged_by_mean_and_deviation_of_the_window(
    rng: np.random.Generator,
) -> None:
    losses = rng.normal(3, 0.1, 3 * SPIKE_WINDOW)
    at = 2 * SPIKE_WINDOW + 5
    before = losses[at - SPIKE_WINDOW : at]
    for sigmas, expected in ((5.9, True), (6.1, False), (-20, True)):
        losses[at] = before.mean() + sigmas * before.std()
        results = judged(losses, 6.0)
        assert results[at] == expected, sigmas
        assert sum(results) == len(results) - (not expected)


def test_no_spike_is_seen_before_the_window_is_full_nor_without_being_asked() -> None:
    losses = np.full(SPIKE_WINDOW + 2, 2.0) + 0.01 * np.arange(SPIKE_WINDOW + 2)
    losses[SPIKE_WINDOW - 1] = 100
    assert all(judged(losses, 6.0))
    losses[SPIKE_WINDOW + 1] = 1e6
    assert not judged(losses, 6.0)[-1]
    assert all(judged(losses, 0.0))


def test_a_lasting_rise_becomes_the_usual(rng: np.random.Generator) -> None:
    losses = np.concatenate([np.full(SPIKE_WINDOW, 2.0), np.full(60, 9.0)])
    losses += rng.normal(0, 0.1, losses.size)
    results = judged(losses, 6.0)
    assert not results[SPIKE_WINDOW] and all(results[-30:])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "topology", ["v4:2x2x1", pytest.param("h200:1x1x1", marks=pytest.mark.slow)]
)
def test_the_guard_holds_no_second_copy_of_the_parameters(
    topology: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In programs for chips, beside one that skips no update."""
    mesh = Mesh(np.array(aot_pod(topology).devices[:1]), ("chip",))
    size = 1 << 20
    params = {"table": jnp.zeros(size), "more": jnp.zeros(2 * size)}

    def cost(params: Any, batch: Batch) -> jax.Array:
        parts = [jnp.square(jnp.sin(x) - 1).sum() for x in params.values()]
        return sum(parts) * batch.loss_weights.sum()

    def peak() -> int:
        state = jax.eval_shape(lambda: initial_state(params, OPTIMIZER))
        batch = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, make_batch()))
        step = jax.jit(
            make_train_step(cost, OPTIMIZER),
            donate_argnums=0,
            out_shardings=NamedSharding(mesh, PartitionSpec()),
        )
        memory = compile_for(mesh, step, state, batch).memory_analysis()
        assert memory.alias_size_in_bytes >= 3 * 4 * 3 * size
        return memory.peak_memory_in_bytes

    guarded = peak()
    monkeypatch.setattr("training.step.judge", lambda guard, *_: (True, guard))
    assert guarded < peak() + 0.1 * 4 * size


def numbers(in_row: int, loss: float = np.nan) -> dict[str, float]:
    return {"loss": loss, "grad_norm": 2.5, "skipped": 7.0, "skipped_in_row": in_row}


def test_skipped_steps_are_told_and_too_many_in_a_row_end_the_run() -> None:
    told: list[str] = []
    check_skipped(8, numbers(0), 3, told.append)
    assert told == []
    check_skipped(9, numbers(1), 3, told.append)
    check_skipped(10, numbers(2, 9.25), 3, told.append)
    assert told == [
        "WARNING: loss nan and gradients of norm 2.5 at step 9: no update (1 in a row)",
        "WARNING: loss 9.25 and gradients of norm 2.5 at step 10: "
        "no update (2 in a row)",
    ]
    with pytest.raises(BadSteps, match="step 11, and 3 skipped updates in a row"):
        check_skipped(11, numbers(3), 3, told.append)


def test_replays_of_bad_data_agree_to_the_bit() -> None:
    replay = jax.jit(make_replay(loss_sum))
    for weight in (1.0, np.nan, np.inf):
        batch = make_batch(weight)
        state = initial_state(make_params(), OPTIMIZER)
        _, metrics = jax.jit(make_train_step(loss_sum, OPTIMIZER))(state, batch)
        found = [replay(state.params, batch) for _ in range(2)]
        metrics = {name: float(x) for name, x in metrics.items()}
        assert "look at its data" in compare_replays(4, metrics, found)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((2.0, 1.0, 5), (2.0, 1.0, 5)),
        ((np.nan, 2.5, 5), (np.nan, 2.5, 6)),
        ((np.nan, 2.5, 5), (3.0, 2.5, 5)),
        ((np.nan, np.inf, 5), (np.nan, np.inf, 5)),
    ],
    ids=["only_once", "gradients", "loss", "norm"],
)
def test_replays_that_differ_end_the_run(first: tuple, second: tuple) -> None:
    with pytest.raises(BadSteps, match="step 4 was computed 3 times.*hardware"):
        compare_replays(4, numbers(1), [Replay(*first), Replay(*second)])


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *(("spike_sigmas", bad) for bad in (-1.0, np.inf, "6")),
        *(("stop_after", bad) for bad in (0, 2.5)),
        *(("step_seconds", bad) for bad in (-1.0, np.inf)),
        ("first_step_seconds", np.nan),
    ],
)
def test_bad_settings_are_refused(name: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}=.* must be at least"):
        GuardSettings(**{name: bad})
