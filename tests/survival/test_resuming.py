"""Runs that are killed, go on elsewhere or are started again, and where they write."""

import os
import random
import re
import shutil
import threading

import jax
import numpy as np
import pytest

import train
from tests.processes import run_program
from tests.runs import assert_equal_bits
from tests.survival.small_run import STEPS, start_and_kill
from training.workdir import locked


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
    same = {tag for tag in wanted if not tag.startswith(("perf/", "goodput/"))}
    assert {*same} >= {"train/loss", "train/grad_norm", "validation/loss"}
    for tag in same:
        assert curves[tag] == wanted[tag] == points[tag]
    steps = {tag: [step for step, _ in points] for tag, points in curves.items()}
    assert steps["train/loss"] == list(range(1, STEPS + 1))
    assert steps["validation/loss"] == [STEPS // 2, STEPS]
    # Rates are never the same, but no step may have two.
    assert set(curves) == set(wanted) == set(points)
    assert {tag: [step for step, _ in points[tag]] for tag in points} == steps
    assert all(found == sorted(set(found)) for found in steps.values())


@pytest.mark.thorough
def test_a_smaller_ring_goes_on_where_the_larger_one_stopped(undisturbed, copy):
    copy.train(mesh__fsdp=4, mesh__ring=2, train__validation_batches=0)
    assert "mesh: data 1 x fsdp 4 x ring 2 x tensor 1, of 8 x cpu" in copy.said
    assert "changed since step 8: mesh.ring: 4 -> 2" in copy.said
    losses = copy.losses()
    assert len(losses) == STEPS - 8
    np.testing.assert_allclose(losses, undisturbed.losses(8), rtol=1e-5)


@pytest.mark.slow
def test_fewer_devices_go_on_where_eight_stopped(undisturbed, copy):
    mesh = {"mesh__fsdp": 2, "mesh__ring": 2}
    copy.command(simulated_devices=4, train__validation_batches=0, **mesh)
    assert copy.said[0].endswith("of 4 x cpu")
    assert "resuming from step 8" in copy.said
    np.testing.assert_allclose(copy.losses(), undisturbed.losses(8), rtol=1e-5)


@pytest.mark.thorough
def test_a_complete_run_has_nothing_to_do_but_extra_steps(undisturbed, run):
    shutil.copytree(undisturbed.workdir, run.workdir)
    before = run.files()
    assert run.train() == {"step": STEPS} and run.files() == before
    assert f"all {STEPS} steps are made" in run.said[-1]
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
def test_a_run_says_where_everything_is_and_what_it_gives(undisturbed):
    directory, said = undisturbed.workdir, undisturbed.said
    assert f"checkpoints: {directory}/checkpoints" in said
    assert f"curves: tensorboard --logdir {directory}/tensorboard" in said
    assert f"points: {directory}/metrics.jsonl" in said
    assert re.match(
        rf"done: .*{directory}.*; goodput [\d.]+ % of [\d.]+ s \(", said[-1]
    )
    assert (directory / "tensorboard" / directory.name).is_dir()
    lines = [line for line in said if line.startswith("step")]
    for line, (step, loss) in zip(lines, undisturbed.curve(), strict=True):
        assert re.match(rf"step +{step}/{STEPS} +loss {loss:.4f} ", line), line
    curves = undisturbed.curves()
    # The devices are simulated: they have no peak, and so no MFU.
    rates = "step_time", "tokens_per_second", "tokens_per_second_per_device"
    found = {tag for tag in curves if tag.startswith("perf/")}
    assert found == {f"perf/{rate}" for rate in rates}
    last = {tag: points[-1][1] for tag, points in curves.items() if "goodput/" in tag}
    assert last["goodput/lost_seconds"] == 0 < last["goodput/compile_seconds"]
    fraction = last.pop("goodput/fraction")
    spent = sum(last.values())
    assert fraction == pytest.approx(last["goodput/step_seconds"] / spent)


FULL_DISK = """
import resource, sys
import jax, numpy as np
import train
from training.checkpoint import Checkpoints

values = np.random.default_rng(7).standard_normal((30, 10_000), np.float32)
state = {str(i): jax.device_put(row) for i, row in enumerate(values)}

@train.as_program
def main(_):
    train.silence_writers()
    with Checkpoints(sys.argv[1], keep=1, fingerprint={}) as checkpoints:
        size = 24_576  # of the largest file that can be written
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        for step in 1, 2:
            checkpoints.save(step, state)

sys.exit(main())
"""


@pytest.mark.thorough
def test_a_full_disk_is_told_in_one_line_of_errors(run):
    # JAX warns of programs that find no room, and of those that others are writing.
    none_kept = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    code, said, errors = run_program("-c", FULL_DISK, run.workdir, **none_kept)
    assert code == 1
    (line,) = errors.splitlines()
    assert re.match("error: step 2 was NOT saved in .*File too large", line)
    assert line.endswith(
        "; of checkpoints there is none. The save before it failed too, so the run ends"
    )
    assert "WARNING: step 1 was NOT saved" in said


@pytest.mark.parametrize("place", ["checkpoints", "tensorboard", "", "lock/"])
def test_a_place_that_cannot_be_made_ends_the_run_before_anything_is_compiled(
    run, monkeypatch, place
):
    """Orbax' threads waited 300 s for their directory, when the run had ended."""
    monkeypatch.delattr(train, "compile_programs")
    path = run.workdir / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir() if place.endswith("/") else path.write_text("of mine")
    threads = set(threading.enumerate())
    with pytest.raises(OSError, match=f"^nothing can be written to {path}: "):
        run.train()
    assert set(threading.enumerate()) == threads
    assert {p for p in run.workdir.rglob("*") if p.is_file()} <= {path}


@pytest.mark.quick
def test_two_runs_in_one_directory_are_refused(run):
    with locked(str(run.workdir)):
        before = run.files()
        with pytest.raises(ValueError, match=f"in use by .* process {os.getpid()} on"):
            run.train()
        assert run.files() == before
