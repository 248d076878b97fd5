"""Steps that give no finite loss: skipped, told, and never saved."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from tasks import programs
from tests.survival.small_run import QUIET
from training.guard import SPIKE_WINDOW, BadSteps

pytestmark = pytest.mark.thorough


def change_batches(patch: pytest.MonkeyPatch, steps: set[int], **fields: Any) -> None:
    """Changes fields of the batches of some steps, as they lie on the devices."""
    place, count = train.place, iter(range(1, 1000))

    def placed(blocks, *where):
        batch = place(blocks, *where)
        if next(count) in steps:
            shardings = jax.tree.map(lambda x: x.sharding, batch)
            changed = {name: f(getattr(batch, name)) for name, f in fields.items()}
            batch = jax.device_put(batch._replace(**changed), shardings)
        return batch

    patch.setattr(train, "place", placed)


def test_bad_steps_are_skipped_told_and_counted_and_too_many_end_the_run(
    run, monkeypatch, truth
):
    with monkeypatch.context() as patch:
        bad = {5, *range(7, 100)}
        change_batches(patch, bad, loss_weights=lambda x: x.at[0, 0].set(np.nan))
        said = "step 10, and 4 skipped .* finite, as step 6 left.* resumes from step 4"
        with pytest.raises(BadSteps, match=said):
            run.train(guard__stop_after=4, **QUIET)
    found = [re.findall(r"at step (\d+).*\((\d+) in", x)[0] for x in run.warnings()]
    assert found == [("5", "1"), ("7", "1"), ("8", "2"), ("9", "3")]
    skipped = [int(count) for _, count in run.curve("guard/skipped")]
    assert skipped == [0] * 4 + [1, 1, 2, 3, 4, 5]
    # From before the bad steps: while updates are skipped nothing is saved.
    assert run.steps() == {"4"}
    run.assert_goes_on(4, truth)


def change_state(patch: pytest.MonkeyPatch, step: int, name: str, value: float) -> None:
    """Sets the first element of an array of the state that a step leaves."""
    make = programs.Programs

    def change(path, leaf):
        if name not in jax.tree_util.keystr(path, simple=True, separator="."):
            return leaf
        return jax.device_put(leaf.at[(0,) * leaf.ndim].set(value), leaf.sharding)

    def changing(train_step, *others):
        def changed(state, batch):
            state, metrics = train_step(state, batch)
            if int(state.step) == step:
                state = jax.tree_util.tree_map_with_path(change, state)
            return state, metrics

        return make(changed, *others)

    patch.setattr(programs, "Programs", changing)


@pytest.mark.parametrize(
    ("step", "name", "value", "found"),
    [
        (9, "params.layers.feed_forward.down", np.nan, "holds 1 nan.* 8 and 11.*data"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in [
                (8, "nu.head", np.inf, "nu.head holds 1 inf.*between 4 and 8"),
                # Saved, as it is finite; no step that begins with it is.
                (8, "params.norm.scale", 3e38, "finite, as step 8 left it"),
            ]
        ),
    ],
)
def test_what_breaks_the_state_ends_the_run_by_name_and_it_goes_on_from_before(
    run, monkeypatch, truth, step, name, value, found
):
    newest = 8 if step > 8 else 4
    with monkeypatch.context() as patch:
        change_state(patch, step, name, value)
        with pytest.raises(BadSteps, match=f"{found}.* resumes from step {newest}$"):
            run.train(guard__stop_after=3, **QUIET)
    moved = {"damaged"} if np.isfinite(value) else set()
    assert run.steps() == {"4", str(newest)} | moved
    run.assert_goes_on(newest, truth)


@pytest.mark.slow
def test_a_spike_of_the_loss_is_skipped_told_and_counted(run, monkeypatch):
    # The losses that are remembered are those of a run that has settled.
    spike, never_seen = 3 * SPIKE_WINDOW, 255
    more = {"train__steps": spike + 5, "checkpoint__save_every_steps": 1000, **QUIET}
    with monkeypatch.context() as patch:
        change_batches(patch, {spike}, targets=lambda x: jnp.full_like(x, never_seen))
        run.train(guard__spike_sigmas=6.0, **more)
    (warning,) = run.warnings()
    assert f"at step {spike}: no update (1 in a row)" in warning
    assert run.curve("guard/skipped")[-2:] == [(spike + 4, 1), (spike + 5, 1)]
    losses = run.losses()
    assert losses[spike - 1] > 2 * losses[spike:].max()
