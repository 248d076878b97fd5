"""Which steps are bad, what is said of them, and when a run ends for them."""

import jax
import numpy as np
import pytest

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


def judged(losses: np.ndarray, sigmas: float) -> list[bool]:
    decide = jax.jit(judge, static_argnums=3)
    guard, results = initial_guard(), []
    for loss in losses.astype(np.float32):
        is_good, guard = decide(guard, loss, np.float32(1), sigmas)
        results.append(bool(is_good))
    return results


def test_a_spike_is_judged_by_mean_and_deviation_of_the_window(rng):
    losses = rng.normal(3, 0.1, 3 * SPIKE_WINDOW)
    at = 2 * SPIKE_WINDOW + 5
    before = losses[at - SPIKE_WINDOW : at]
    for sigmas, expected in ((5.9, True), (6.1, False), (-20, True)):
        losses[at] = before.mean() + sigmas * before.std()
        results = judged(losses, 6.0)
        assert results[at] == expected, sigmas
        assert sum(results) == len(results) - (not expected)


def test_no_spike_is_seen_before_the_window_is_full_nor_without_being_asked():
    losses = np.full(SPIKE_WINDOW + 2, 2.0) + 0.01 * np.arange(SPIKE_WINDOW + 2)
    losses[SPIKE_WINDOW - 1] = 100
    assert all(judged(losses, 6.0))
    losses[SPIKE_WINDOW + 1] = 1e6
    assert not judged(losses, 6.0)[-1]
    assert all(judged(losses, 0.0))


def test_a_lasting_rise_becomes_the_usual(rng):
    losses = np.concatenate([np.full(SPIKE_WINDOW, 2.0), np.full(60, 9.0)])
    losses += rng.normal(0, 0.1, losses.size)
    results = judged(losses, 6.0)
    assert not results[SPIKE_WINDOW] and all(results[-30:])


def numbers(in_row: int, loss: float = np.nan) -> dict[str, float]:
    return {"loss": loss, "grad_norm": 2.5, "skipped": 7.0, "skipped_in_row": in_row}


def test_skipped_steps_are_logged_and_too_many_in_a_row_end_the_run():
    said: list[str] = []
    check_skipped(8, numbers(0), 3, said.append)
    check_skipped(10, numbers(2, 9.25), 3, said.append)
    what = "loss 9.25 and gradients of norm 2.5 at step 10"
    assert said == [f"WARNING: {what}: no update (2 in a row)"]
    with pytest.raises(BadSteps, match="step 11, and 3 skipped updates in a row"):
        check_skipped(11, numbers(3), 3, said.append)


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
def test_replays_that_differ_end_the_run(first, second):
    with pytest.raises(BadSteps, match="step 4 was computed 3 times.*hardware"):
        compare_replays(4, numbers(1), [Replay(*first), Replay(*second)])


def test_bad_settings_are_refused():
    bad = {"spike_sigmas": (-1.0, np.inf, "6"), "stop_after": (0, 2.5)}
    bad |= {"step_seconds": (-1.0, np.inf), "first_step_seconds": (np.nan,)}
    for name, values in bad.items():
        for value in values:
            with pytest.raises(ValueError, match=f"^{name}=.* must be at least"):
                GuardSettings(**{name: value})
