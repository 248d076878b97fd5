"""Runs that are killed, go on elsewhere or are started again, and what they write."""

import random
import re
import shutil

import jax
import numpy as np
import pytest

import train
from tasks.text import TextRun
from tests.runs import assert_equal_bits
from tests.survival.small_run import STEPS, start_and_kill
from training.feed import place
from training.step import make_evaluate_step


@pytest.mark.thorough
def test_a_killed_run_ends_as_if_it_had_not_been_killed(
    run, undisturbed, truth, programs
):
    seconds = random.uniform(0, 0.3)
    assert start_and_kill(run, programs, "saving 8", seconds, last_save=8)
    assert not run.has_checkpoint(STEPS)
    run.train()
    assert {"resuming from step 4", "resuming from step 8"} & {*run.said}
    state = run.state()
    assert int(state.step) == STEPS and len(jax.tree.leaves(state)) > 30
    assert_equal_bits(state, truth)

    curves, wanted, points = run.curves(), undisturbed.curves(), run.points()
    for tag in (
        "train/loss",
        "train/grad_norm",
        "train/learning_rate",
        "validation/loss",
    ):
        assert curves[tag] == wanted[tag] == points[tag]
    steps = {tag: [step for step, _ in points] for tag, points in curves.items()}
    assert steps["train/loss"] == list(range(1, STEPS + 1))
    assert steps["validation/loss"] == [STEPS // 2, STEPS]
    # Rates are never the same, but no step may have two.
    assert set(curves) == set(wanted) == set(points)
    assert {tag: [step for step, _ in points[tag]] for tag in points} == steps
    assert all(found == sorted(set(found)) for found in steps.values())


@pytest.mark.thorough
def test_curves_have_the_workdirs_name_and_rates(undisturbed):
    (folder,) = (undisturbed.workdir / "tensorboard").iterdir()
    assert folder.name == undisturbed.workdir.name
    rates = {tag for tag in undisturbed.curves() if tag.startswith("perf/")}
    # The devices are simulated: they have no peak, and so no MFU.
    assert rates == {
        "perf/step_time",
        "perf/tokens_per_second",
        "perf/tokens_per_second_per_device",
    }


@pytest.mark.thorough
def test_a_smaller_ring_goes_on_where_the_larger_one_stopped(undisturbed, copy):
    copy.train(mesh__fsdp=4, mesh__ring=2, train__validation_batches=0)
    assert "mesh: data 1 x fsdp 4 x ring 2 x tensor 1, of 8 x cpu" in copy.said
    assert "changed since step 8: mesh.ring: 4 -> 2" in copy.said
    losses = copy.losses()
    assert len(losses) == STEPS - 8
    np.testing.assert_allclose(losses, undisturbed.losses(8), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
def test_fewer_devices_go_on_where_eight_stopped(undisturbed, copy, devices):
    mesh = {"mesh__fsdp": devices // 2, "mesh__ring": 2}
    copy.command(simulated_devices=devices, train__validation_batches=0, **mesh)
    assert copy.said[0].endswith(f"of {devices} x cpu")
    assert "resuming from step 8" in copy.said
    np.testing.assert_allclose(copy.losses(), undisturbed.losses(8), rtol=1e-5)


@pytest.mark.thorough
def test_a_complete_run_has_nothing_to_do(undisturbed):
    before, said = undisturbed.files(), []
    assert train.train(undisturbed.config(), said.append) == {"step": STEPS}
    assert f"all {STEPS} steps are made" in said[-1] and "config.train" in said[-1]
    assert undisturbed.files() == before


@pytest.mark.thorough
def test_a_complete_run_goes_on_for_extra_steps(undisturbed, run):
    shutil.copytree(undisturbed.workdir, run.workdir)
    quiet = {"train__validation_batches": 0, "train__extra_steps": 2}
    assert run.train(**quiet)["step"] == STEPS + 2 and run.has_checkpoint(STEPS + 2)
    assert f"resuming from step {STEPS}" in run.said
    assert [step for step, _ in run.curve()] == list(range(1, STEPS + 3))
    assert run.curve()[:STEPS] == undisturbed.curve()
    rates = [rate for _, rate in run.curve("train/learning_rate")[STEPS:]]
    assert rates == pytest.approx([run.config().optimizer.end_lr] * 2)
    # Another 2, and not only up to 14.
    assert run.train(**quiet)["step"] == STEPS + 4


@pytest.mark.thorough
def test_the_console_says_where_everything_is(undisturbed):
    directory = undisturbed.workdir
    assert f"checkpoints: {directory}/checkpoints" in undisturbed.said
    assert f"curves: tensorboard --logdir {directory}/tensorboard" in undisturbed.said
    assert f"points: {directory}/metrics.jsonl" in undisturbed.said
    assert undisturbed.said[-1].startswith("done: ")
    assert str(directory) in undisturbed.said[-1]
    lines = [line for line in undisturbed.said if line.startswith("step")]
    assert len(lines) == STEPS
    for line, (step, loss) in zip(lines, undisturbed.curve(), strict=True):
        assert re.match(rf"step +{step}/{STEPS} +loss {loss:.4f} ", line), line


@pytest.mark.thorough
def test_the_validation_loss_is_that_of_the_checkpoint(undisturbed):
    config = undisturbed.config()
    run = TextRun.of(config, jax.devices())
    evaluate = jax.jit(make_evaluate_step(run.loss_function()))
    batches = (place(blocks, run.sharding, run.shape) for blocks in run.validation())
    params = undisturbed.state().params
    sums = [evaluate(params, batch) for batch in batches]
    loss, weight = np.sum(jax.device_get(sums), axis=0)
    assert len(sums) == 2 and weight > 500
    step, logged = undisturbed.curve("validation/loss")[-1]
    assert step == STEPS
    assert logged == pytest.approx(loss / weight, rel=1e-6)
