"""Runs of two processes, with a ring over both, that lose or stop one of them."""

import re
import shutil
import signal

import numpy as np
import pytest

from tests.processes import Ended, Processes, free_port
from tests.survival.small_run import QUIET, STEPS, Small
from training.watchdog import HUNG

pytestmark = pytest.mark.slow
MESH = {"mesh__fsdp": 1, "mesh__ring": 8}


# train.py, which sends SIGTERM to itself in a validation: a batch to train on is placed
# first, then the first of two held-out ones.
STOPS_ITSELF = """
import itertools, os, signal, sys
import train

place, calls = train.place, itertools.count(1)

def stop_then_place(*arguments):
    if next(calls) == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return place(*arguments)

train.place = stop_then_place
sys.exit(train.main())
"""

# train.py, whose parameters hold a nan after step 6, on a device of one process.
BREAKS_ITS_STATE = """
import sys
import jax, numpy as np
import train
from tasks import programs

make = programs.Programs

def breaking(train_step, *others):
    def broken(state, batch):
        state, metrics = train_step(state, batch)
        if int(state.step) == 6:
            head = state.params["head"]
            change = lambda x: x.at[-1, -1].set(np.nan)
            state.params["head"] = jax.jit(change, out_shardings=head.sharding)(head)
        return state, metrics

    return make(broken, *others)

programs.Programs = breaking
sys.exit(train.main())
"""


def both(run: Small, *programs: str, extra: str = "", **more: object) -> Processes:
    """Two processes of a run, each with four simulated devices.

    programs: of each, in the place of train.py. extra: a flag of the second.
    """
    place = f"localhost:{free_port()}"
    flags = run.flags(simulated_devices=4, **MESH, **more)
    flags += [f"--config.hosts.coordinator={place}", "--config.hosts.count=2"]
    starts = [["-c", program] if program else ["train.py"] for program in programs]
    first, second = starts or [["train.py"]] * 2
    more = ["--config.hosts.index=1", *[extra] * bool(extra)]
    return Processes(
        [[*first, *flags, "--config.hosts.index=0"], [*second, *flags, *more]]
    )


def step_of_the_stop(results: list[Ended]) -> int:
    """Where two processes stopped that were told to; it has to be the same step."""
    assert [code for code, _, _ in results] == [75, 75], results
    first, second = (
        re.search(r"preempted: step (\d+)", errors)[1] for _, _, errors in results
    )
    assert first == second
    return int(first)


def assert_goes_on(run: Small, step: int, truth: np.ndarray, **more: object) -> None:
    """In this process alone, from a step of two."""
    run.train(**MESH, **more)
    assert f"resuming from step {step}" in run.said
    np.testing.assert_allclose(run.losses(STEPS - len(truth)), truth, rtol=1e-6)


def test_two_processes_stop_together_and_one_goes_on(run, undisturbed):
    with both(run) as two:
        two.wait_for("step  2")
        two.running[1].send_signal(signal.SIGTERM)
        results = two.finish()
    step = step_of_the_stop(results)
    assert run.has_checkpoint(step)
    # The second process says nothing but errors, and writes no curves.
    assert "step" not in results[1][1]
    assert len(list((run.workdir / "tensorboard").rglob("events.*"))) == 1
    by_two, truth = run.losses(), undisturbed.losses()
    np.testing.assert_allclose(by_two, truth[: len(by_two)], rtol=1e-6)
    assert_goes_on(run, step, truth)


def test_a_signal_to_one_of_two_in_a_validation_stops_both(copy, undisturbed):
    """All processes hear of it a few calls later."""
    shutil.rmtree(copy.workdir / "checkpoints" / "8")
    validations = {"train__validate_every_steps": 5}
    with both(copy, "", STOPS_ITSELF, **validations) as two:
        results = two.finish()
    step = step_of_the_stop(results)
    assert 5 <= step < STEPS and copy.has_checkpoint(step)
    assert "resuming from step 4" in results[0][1]
    assert_goes_on(copy, step, undisturbed.losses(after=4), **validations)


def test_two_processes_find_the_same_nan_and_one_goes_on_from_before(run, undisturbed):
    with both(run, *[BREAKS_ITS_STATE] * 2, **QUIET) as two:
        results = two.finish()
    for code, _, errors in results:
        assert code == 1, errors
        said = "error: the run ends: params.head holds 1 nan, since a step between 4 "
        assert said in errors and "resumes from step 4" in errors
    assert run.steps() == {"4"}
    assert_goes_on(run, 4, undisturbed.losses(), **QUIET)


def test_a_stuck_collective_ends_the_run_with_the_stacks_and_one_goes_on(
    run, undisturbed
):
    """The other process is stopped for good in the middle, as a lost host would be."""
    with both(run, guard__step_seconds=5.0, **QUIET) as two:
        two.wait_for("step  5")
        two.running[1].send_signal(signal.SIGSTOP)
        said, errors = two.running[0].communicate(timeout=120)
        assert two.running[0].returncode == HUNG, errors
    assert "error: nothing happened for" in errors and "train.py" in errors
    assert f"step {STEPS}" not in said
    assert_goes_on(run, 4, undisturbed.losses(), **QUIET)


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("optimizer.peak_lr=0.002", "on process 1: start the same"),
        ("simulated_devices=2", "4, 2 devices"),
    ],
)
def test_processes_with_other_settings_end_with_a_line_and_nothing_is_written(
    run, field, said
):
    with both(run, extra=f"--config.{field}") as two:
        results = two.finish()
    for code, _, errors in results:
        lines = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert code == 1 and len(lines) == 1 and said in lines[0], errors
    assert not run.workdir.exists()


def test_the_death_of_one_process_ends_the_other_with_its_code_and_a_line(run):
    with both(run, hosts__lost_seconds=10, **QUIET) as two:
        two.wait_for("step  2")
        two.running[0].kill()
        said, errors = two.running[1].communicate(timeout=120)
    assert two.running[1].returncode == HUNG, errors
    line = errors.splitlines()[-1]
    assert line.startswith("error: another process of the run was lost"), errors
