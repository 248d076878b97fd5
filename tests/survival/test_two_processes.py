"""Runs of two processes, with a ring over both, that lose or stop one of them."""

import re
import shutil
import signal
from collections.abc import Sequence

import numpy as np
import pytest

from tests.processes import Processes, free_port
from tests.survival.small_run import STEPS, Small
from training.watchdog import HUNG

pytestmark = pytest.mark.slow
MESH = {"mesh__fsdp": 1, "mesh__ring": 8}

# train.py, which sends SIGTERM to itself in a function's call of this number.
STOPS_ITSELF = """
import importlib, os, signal, sys
from absl import app
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
app.run(train.main, flags_parser=train.parse_flags)
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


def test_two_processes_stop_together_and_one_goes_on(
    run: Small, undisturbed: Small
) -> None:
    commands = [["train.py", *flags] for flags in flags_of_both(run)]
    with Processes(commands) as two:
        two.wait_for("step  2")
        two.running[1].send_signal(signal.SIGTERM)
        results = two.finish()
    step = step_of_the_stop(results)
    assert run.has_checkpoint(step)
    # The second process says nothing but errors, and writes no curves.
    assert results[1][1] == "" or "step" not in results[1][1]
    assert len(list((run.workdir / "tensorboard").iterdir())) == 1
    two_alone = run.losses()
    np.testing.assert_allclose(
        two_alone, undisturbed.losses()[: len(two_alone)], rtol=1e-6
    )
    run.train(**MESH)
    assert f"resuming from step {step}" in run.said
    np.testing.assert_allclose(run.losses(), undisturbed.losses(), rtol=1e-6)


@pytest.mark.parametrize(
    ("function", "may_stop_at"),
    [
        (("training.checkpoint", "Checkpoints.restore", "1"), [4]),
        (("train", "make_evaluate_step", "1"), [4]),
        # A batch to train on, then the first of two held-out ones. All processes hear
        # of it a few calls later.
        (("train", "place", "2"), range(5, STEPS)),
    ],
    ids=["restore", "compile", "validation"],
)
def test_a_signal_to_one_of_two_stops_both_wherever_they_are(
    copy: Small,
    undisturbed: Small,
    function: tuple[str, str, str],
    may_stop_at: Sequence[int],
) -> None:
    shutil.rmtree(copy.workdir / "checkpoints" / "8")
    validations = {"train__validate_every_steps": 5}
    first, second = flags_of_both(copy, **validations)
    commands = [["train.py", *first], ["-c", STOPS_ITSELF, *function, *second]]
    with Processes(commands) as two:
        results = two.finish()
    step = step_of_the_stop(results)
    assert step in may_stop_at and copy.has_checkpoint(step)
    assert "resuming from step 4" in results[0][1]
    copy.train(**MESH, **validations)
    assert f"resuming from step {step}" in copy.said
    truth = undisturbed.losses(after=4)
    np.testing.assert_allclose(copy.losses(after=4), truth, rtol=1e-6)


def test_a_stuck_collective_ends_the_run_with_the_stacks_and_one_goes_on(
    run: Small, undisturbed: Small
) -> None:
    """The other process is stopped for good in the middle, as a lost host would be."""
    limits = {"guard__step_seconds": 5.0, "train__validation_batches": 0}
    commands = [["train.py", *flags] for flags in flags_of_both(run, **limits)]
    with Processes(commands) as two:
        two.wait_for("step  5")
        two.running[1].send_signal(signal.SIGSTOP)
        said, errors = two.running[0].communicate(timeout=120)
        assert two.running[0].returncode == HUNG, errors
    assert "error: nothing happened for" in errors and "train.py" in errors
    assert f"step {STEPS}" not in said
    run.train(**MESH, train__validation_batches=0)
    assert "resuming from step 4" in run.said
    np.testing.assert_allclose(run.losses(), undisturbed.losses(), rtol=1e-6)
