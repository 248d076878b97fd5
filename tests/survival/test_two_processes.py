"""Runs of two processes, with a ring over both, that lose or stop one of them."""

import re
import shutil
import signal

import numpy as np
import pytest

from tests.processes import Processes, free_port
from tests.survival.small_run import QUIET, STEPS, Small
from training.watchdog import HUNG

pytestmark = pytest.mark.slow
MESH = {"mesh__fsdp": 1, "mesh__ring": 8}

# train.py, which sends SIGTERM to itself in a function's call of this number.
STOPS_ITSELF = """
import importlib, os, signal, sys
import train

module, name, number = sys.argv[1:4]
place = importlib.import_module(module)
*holders, last = name.split(".")
for holder in holders:
    place = getattr(place, holder)
function, calls = getattr(place, last), []

def stop_then_call(*arguments, **options):
    calls.append(name)
    if len(calls) == int(number):
        os.kill(os.getpid(), signal.SIGTERM)
    return function(*arguments, **options)

setattr(place, last, stop_then_call)
sys.argv = sys.argv[:1] + sys.argv[4:]
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
            change = jax.jit(
                lambda x: x.at[-1, -1].set(np.nan), out_shardings=head.sharding
            )
            state.params["head"] = change(head)
        return state, metrics

    return make(broken, *others)

programs.Programs = breaking
sys.exit(train.main())
"""


def flags_of_both(run: Small, **more: object) -> list[list[str]]:
    """The flags of both processes of a run, each with four simulated devices."""
    place = f"localhost:{free_port()}"
    flags = run.flags(simulated_devices=4, **MESH, **more)
    hosts = [f"--config.hosts.coordinator={place}", "--config.hosts.count=2"]
    return [[*flags, *hosts, f"--config.hosts.index={i}"] for i in range(2)]


def step_of_the_stop(results: list[tuple[int, str, str]]) -> int:
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
    with Processes([["train.py", *flags] for flags in flags_of_both(run)]) as two:
        two.wait_for("step  2")
        two.running[1].send_signal(signal.SIGTERM)
        results = two.finish()
    step = step_of_the_stop(results)
    assert run.has_checkpoint(step)
    # The second process says nothing but errors, and writes no curves.
    assert results[1][1] == "" or "step" not in results[1][1]
    assert len(list((run.workdir / "tensorboard").rglob("events.*"))) == 1
    by_two, truth = run.losses(), undisturbed.losses()
    np.testing.assert_allclose(by_two, truth[: len(by_two)], rtol=1e-6)
    assert_goes_on(run, step, truth)


@pytest.mark.parametrize(
    ("function", "may_stop_at"),
    [
        (("training.checkpoint", "Checkpoints.restore", "1"), [4]),
        # A batch to train on, then the first of two held-out ones. All processes hear
        # of it a few calls later.
        (("train", "place", "2"), range(5, STEPS)),
    ],
    ids=["restore", "validation"],
)
def test_a_signal_to_one_of_two_stops_both_wherever_they_are(
    copy, undisturbed, function, may_stop_at
):
    shutil.rmtree(copy.workdir / "checkpoints" / "8")
    validations = {"train__validate_every_steps": 5}
    first, second = flags_of_both(copy, **validations)
    commands = [["train.py", *first], ["-c", STOPS_ITSELF, *function, *second]]
    with Processes(commands) as two:
        results = two.finish()
    step = step_of_the_stop(results)
    assert step in may_stop_at and copy.has_checkpoint(step)
    assert "resuming from step 4" in results[0][1]
    assert_goes_on(copy, step, undisturbed.losses(after=4), **validations)


def test_two_processes_find_the_same_nan_and_one_goes_on_from_before(run, undisturbed):
    flags = flags_of_both(run, **QUIET)
    with Processes([["-c", BREAKS_ITS_STATE, *each] for each in flags]) as two:
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
    limits = {"guard__step_seconds": 5.0, **QUIET}
    commands = [["train.py", *flags] for flags in flags_of_both(run, **limits)]
    with Processes(commands) as two:
        two.wait_for("step  5")
        two.running[1].send_signal(signal.SIGSTOP)
        said, errors = two.running[0].communicate(timeout=120)
        assert two.running[0].returncode == HUNG, errors
    assert "error: nothing happened for" in errors and "train.py" in errors
    assert f"step {STEPS}" not in said
    assert_goes_on(run, 4, undisturbed.losses(), **QUIET)


@pytest.mark.parametrize(
    "field", ["optimizer__peak_lr=0.002", "simulated_devices=2"], ids=str
)
def test_processes_with_other_settings_end_with_a_line_and_nothing_is_written(
    run, field
):
    first, second = flags_of_both(run)
    name, value = field.replace("__", ".").split("=")
    commands = [["train.py", *first], ["train.py", *second, f"--config.{name}={value}"]]
    with Processes(commands) as two:
        results = two.finish()
    for code, _, errors in results:
        lines = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert code == 1 and len(lines) == 1, errors
        assert "on process 1: start the same" in lines[0] or "4, 2 devices" in lines[0]
    assert not run.workdir.exists()


def test_the_death_of_one_process_ends_the_other_with_its_code_and_a_line(run):
    more = {**QUIET, "hosts__lost_seconds": 10}
    with Processes([["train.py", *f] for f in flags_of_both(run, **more)]) as two:
        two.wait_for("step  2")
        two.running[0].kill()
        said, errors = two.running[1].communicate(timeout=120)
    assert two.running[1].returncode == HUNG, errors
    line = errors.splitlines()[-1]
    assert line.startswith("error: another process of the run was lost"), errors
