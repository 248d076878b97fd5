"""Runs of two processes, with a ring over both, that lose or stop one of them."""

import re
import signal

import numpy as np
import pytest

from tests.support.processes import Processes, free_port
from tests.survival.small_run import QUIET, STEPS, Small
from training.hosts.watchdog import HUNG

pytestmark = pytest.mark.slow
MESH = {"mesh__fsdp": 1, "mesh__ring": 8}


def both(run: Small, *more_of_the_second: str, **fields: object) -> Processes:
    """Two processes of a run, each with four simulated devices."""
    flags = run.flags(simulated_devices=4, **MESH, **fields)
    place = f"--config.hosts.coordinator=localhost:{free_port()}"
    start = "train.py", *flags, place, "--config.hosts.count=2"
    second = *start, "--config.hosts.index=1", *more_of_the_second
    return Processes([[*start, "--config.hosts.index=0"], second])


def assert_goes_on(run: Small, step: int, truth: np.ndarray, **more: object) -> None:
    """In this process alone, from a step of two."""
    run.train(**MESH, **more)
    assert f"resuming from step {step}" in run.said
    np.testing.assert_allclose(run.losses(), truth, rtol=1e-6)


def test_two_processes_stop_together_and_one_goes_on(run, undisturbed):
    with both(run) as two:
        two.wait_for("step  2")
        two.running[1].send_signal(signal.SIGTERM)
        (first, _, said), (second, silent, also_said) = two.finish()
    assert (first, second) == (75, 75), said
    step, same = (re.search(r"preempted: step (\d+)", x)[1] for x in (said, also_said))
    assert step == same and run.has_checkpoint(int(step))
    # The second process says nothing but errors, and writes no curves.
    assert "step" not in silent
    assert len(list((run.workdir / "tensorboard").rglob("events.*"))) == 1
    by_two, truth = run.losses(), undisturbed.losses()
    np.testing.assert_allclose(by_two, truth[: len(by_two)], rtol=1e-6)
    assert_goes_on(run, int(step), truth)


def test_a_stuck_collective_ends_the_run_and_one_goes_on(run, undisturbed):
    """The other process is stopped for good in the middle, as a lost host would be."""
    with both(run, guard__step_seconds=5.0, **QUIET) as two:
        two.wait_for("step  5")
        two.running[1].send_signal(signal.SIGSTOP)
        said, errors = two.running[0].communicate(timeout=120)
        assert two.running[0].returncode == HUNG, errors
    assert "error: nothing happened for" in errors and "train.py" in errors
    assert f"step {STEPS}" not in said
    assert_goes_on(run, 4, undisturbed.losses(), **QUIET)


def test_processes_with_other_devices_end_with_a_line_and_nothing_is_written(run):
    with both(run, "--config.simulated_devices=2") as two:
        results = two.finish()
    for code, _, errors in results:
        (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert code == 1 and "4, 2 devices" in line, errors
    assert not run.workdir.exists()
