"""A run that hangs ends with its stacks; a slow one does not."""

import signal
import tempfile
import threading
import time

import pytest

from tests.processes import Processes, run_program
from training.watchdog import HUNG, Watchdog

HANGS = """
import time
from training.watchdog import Watchdog

def step_that_hangs():
    time.sleep(60)

with Watchdog({first}, {usual}) as watchdog:
    for _ in range({steps}):
        watchdog.step()
    print("so far", flush=True)
    step_that_hangs()
print("never here")
"""


@pytest.mark.parametrize("seconds", [float("inf"), 1e30, 0])
def test_what_no_timer_takes_is_for_ever(seconds):
    """It ended the timer's thread with a traceback, or the run."""
    before = set(threading.enumerate())
    with Watchdog(seconds, seconds) as watchdog:
        watchdog.step()
        assert set(threading.enumerate()) == before
    with Watchdog(1e6, 1e6):
        assert set(threading.enumerate()) > before


@pytest.mark.quick
def test_a_hanging_process_ends_with_the_stack_of_where_it_hangs():
    program = HANGS.format(first=0.3, usual=0, steps=0)
    code, said, errors = run_program("-c", program, timeout=50)
    assert (code, said) == (HUNG, "so far\n")
    assert "nothing happened for 0.3 s" in errors
    assert "in step_that_hangs" in errors


@pytest.mark.quick
def test_a_process_that_was_suspended_goes_on():
    """For longer than its limit, which it still keeps afterwards."""
    with Processes([["-c", HANGS.format(first=50, usual=3, steps=3)]]) as one:
        (process,) = one.running
        one.wait_for("so far")
        process.send_signal(signal.SIGSTOP)
        time.sleep(4)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.5)
        assert process.poll() is None
        ((code, _, errors),) = one.finish(timeout=50)
    assert code == HUNG and "nothing happened for 3 s" in errors


class Armed(Watchdog):
    """Says how long it was told to wait, and never ends the process."""

    def __init__(self, *limits: float):
        self.now, self.waits = 0.0, []
        with tempfile.TemporaryFile("w") as file:
            super().__init__(*limits, file=file, clock=lambda: self.now)

    def _arm(self, seconds: float) -> None:
        self.waits.append(seconds)

    def after(self, seconds: float) -> float:
        self.now += seconds
        self.step()
        return self.waits[-1]


def test_a_slow_run_is_given_ten_times_its_longest_step():
    watchdog = Armed(500.0, 30.0)
    # The first step holds the compilation; the second is the first to be measured.
    assert watchdog.after(400) == 500
    assert watchdog.after(2) == 30
    assert watchdog.after(7) == 70
    assert watchdog.after(1) == 70
    watchdog.pause()
    assert watchdog.waits[-1] == 500
    # The time of the pause is no step's.
    assert watchdog.after(300) == 70
