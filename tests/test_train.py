"""The real `train.train`: killed, resumed elsewhere, and run again; small config."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import train
from tasks import base, batch_rows, text
from tests.runs import Run, assert_equal_bits, kill_after
from training.feed import place
from training.step import make_evaluate_step

pytestmark = pytest.mark.usefixtures("programs")

STEPS, MIDDLE = 20, 10
"""Of the undisturbed run, and of its first checkpoint; the last step has another."""


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of all steps on fsdp 2 x ring 4; tests must not change it."""
    run = Run(corpus, tmp_path_factory.mktemp("undisturbed"))
    assert run.train()["step"] == STEPS
    return run


@pytest.fixture
def new_run(corpus: Path, tmp_path: Path) -> Run:
    return Run(corpus, tmp_path / "run")


@pytest.fixture
def halfway(undisturbed: Run, new_run: Run) -> Run:
    """A run that has the undisturbed run's first checkpoint and nothing else."""
    place = Path("checkpoints") / str(MIDDLE)
    shutil.copytree(undisturbed.workdir / place, new_run.workdir / place)
    return new_run


@pytest.mark.thorough
@pytest.mark.parametrize(
    "is_fresh",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["kept_programs", "fresh_programs"],
)
def test_a_killed_run_ends_as_if_it_had_not_been_killed(undisturbed, new_run, is_fresh):
    """Fresh: in processes that share no compiled program, as a user's."""
    if is_fresh:
        kill_after(new_run, MIDDLE, STEPS)
        new_run.command()
    else:
        programs = jax.config.jax_compilation_cache_dir
        kill_after(new_run, MIDDLE, STEPS, JAX_COMPILATION_CACHE_DIR=programs)
        new_run.train()
    assert f"resuming from step {MIDDLE}" in new_run.said
    state = new_run.state()
    assert int(state.step) == STEPS and len(jax.tree.leaves(state)) > 30
    assert_equal_bits(state, undisturbed.state())

    curves, truth, points = new_run.curves(), undisturbed.curves(), new_run.points()
    for tag in (
        "train/loss",
        "train/grad_norm",
        "train/learning_rate",
        "validation/loss",
    ):
        assert curves[tag] == truth[tag] == points[tag]
    steps = {tag: [step for step, _ in points] for tag, points in curves.items()}
    assert steps["train/loss"] == list(range(1, STEPS + 1))
    assert steps["validation/loss"] == [MIDDLE, STEPS]
    # Rates are never the same, but no step may have two.
    assert set(curves) == set(truth) == set(points)
    assert {tag: [step for step, _ in points[tag]] for tag in points} == steps
    assert all(found == sorted(set(found)) for found in steps.values())


@pytest.mark.thorough
def test_the_curve_has_every_step_of_a_broken_run(undisturbed, new_run, monkeypatch):
    iterate = train.iterate

    def break_after_the_middle(*args: Any, **options: Any) -> Iterator:
        for step, blocks in iterate(*args, **options):
            if step == MIDDLE:
                raise OSError("the disk with the corpus is gone")
            yield step, blocks

    with monkeypatch.context() as patch:
        patch.setattr(train, "iterate", break_after_the_middle)
        with pytest.raises(OSError, match="the disk with the corpus is gone"):
            new_run.train(train__validate_every_steps=STEPS)
    assert new_run.has_checkpoint(MIDDLE)
    new_run.train(train__validate_every_steps=STEPS)
    assert new_run.curve() == undisturbed.curve()


@pytest.mark.thorough
def test_curves_have_the_workdirs_name_and_rates(undisturbed):
    (run,) = (undisturbed.workdir / "tensorboard").iterdir()
    assert run.name == undisturbed.workdir.name
    rates = {tag for tag in undisturbed.curves() if tag.startswith("perf/")}
    # The devices are simulated: they have no peak, and so no MFU.
    assert rates == {
        "perf/step_time",
        "perf/tokens_per_second",
        "perf/tokens_per_second_per_device",
    }


@pytest.mark.thorough
def test_a_smaller_ring_goes_on_where_the_larger_one_stopped(undisturbed, halfway):
    halfway.train(mesh__fsdp=4, mesh__ring=2, train__validation_batches=0)
    assert "mesh: data 1 x fsdp 4 x ring 2 x tensor 1, of 8 x cpu" in halfway.said
    assert f"changed since step {MIDDLE}: mesh.ring: 4 -> 2" in halfway.said
    losses = halfway.losses()
    assert len(losses) == STEPS - MIDDLE
    np.testing.assert_allclose(losses, undisturbed.losses(MIDDLE), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
def test_fewer_devices_go_on_where_eight_stopped(undisturbed, halfway, devices):
    mesh = {"mesh__fsdp": devices // 2, "mesh__ring": 2}
    halfway.command(simulated_devices=devices, train__validation_batches=0, **mesh)
    assert halfway.said[0].endswith(f"of {devices} x cpu")
    assert f"resuming from step {MIDDLE}" in halfway.said
    np.testing.assert_allclose(halfway.losses(), undisturbed.losses(MIDDLE), rtol=1e-5)


@pytest.mark.thorough
def test_a_complete_run_has_nothing_to_do(undisturbed):
    before, said = undisturbed.files(), []
    assert train.train(undisturbed.config(), said.append) == {"step": STEPS}
    assert f"all {STEPS} steps are made" in said[-1] and "config.train" in said[-1]
    assert undisturbed.files() == before


@pytest.mark.thorough
def test_a_complete_run_goes_on_for_extra_steps(undisturbed, new_run):
    shutil.copytree(undisturbed.workdir, new_run.workdir)
    result = new_run.train(train__extra_steps=5)
    assert result["step"] == STEPS + 5 and new_run.has_checkpoint(STEPS + 5)
    assert f"resuming from step {STEPS}" in new_run.said
    steps = [step for step, _ in new_run.curve()]
    assert steps == list(range(1, STEPS + 6))
    assert new_run.curve()[:STEPS] == undisturbed.curve()
    rates = [rate for _, rate in new_run.curve("train/learning_rate")[STEPS:]]
    assert rates == pytest.approx([new_run.config().optimizer.end_lr] * 5)
    # Another 5, and not only up to 25.
    assert new_run.train(train__extra_steps=5)["step"] == STEPS + 10


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
    partition = base.partition(config, jax.devices())
    model = text.model(config, partition)
    loss_sum = text.loss_function(config, model, partition)
    evaluate = jax.jit(make_evaluate_step(loss_sum))
    where = (
        batch_rows.batch_sharding(config, partition),
        batch_rows.batch_shape(config, partition),
    )
    params = undisturbed.state().params
    batches = text.validation_batches(config, partition)
    sums = [evaluate(params, place(blocks, *where)) for blocks in batches]
    loss, weight = np.sum(jax.device_get(sums), axis=0)
    assert len(sums) == 2 and weight > 500
    step, logged = undisturbed.curve("validation/loss")[-1]
    assert step == STEPS
    assert logged == pytest.approx(loss / weight, rel=1e-6)
