"""What watches a run: for hangs, signals, and steps to trace."""

import gzip
import json
import signal
import tempfile
import time

import jax
import jax.numpy as jnp
import pytest

from tests.support.processes import Processes, run_program
from training.hosts.preemption import SignalNotice
from training.hosts.watchdog import HUNG, Watchdog
from training.reports.profiler import Profiler

HANGS = """
import time
from training.hosts.watchdog import Watchdog

def step_that_hangs():
    time.sleep(60)

with Watchdog(50, 3) as watchdog:
    for _ in range(3):
        watchdog.step()
    print("so far", flush=True)
    step_that_hangs()
print("never here")
"""


@pytest.mark.quick
def test_a_suspended_process_goes_on_and_ends_with_the_stack_of_where_it_hangs():
    with Processes([["-c", HANGS]]) as one:
        (process,) = one.running
        one.wait_for("so far")
        process.send_signal(signal.SIGSTOP)
        time.sleep(4)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.5)
        assert process.poll() is None
        ((code, said, errors),) = one.finish(timeout=50)
    assert (code, said) == (HUNG, "") and "nothing happened for 3 s" in errors
    assert "in step_that_hangs" in errors


class Armed(Watchdog):
    """Keeps the seconds that it is armed for, and never ends the process."""

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


NEVER_LOOKS = """
import threading, time
from training.hosts.preemption import SignalNotice

with SignalNotice() as stop:
    print("ready", flush=True)
    while not stop.requested():
        time.sleep(0.01)
    print("stopped", flush=True)
    threading.Event().wait()
"""

# train.py, which gets Ctrl-C while it imports.
IMPORTS = """
import os, runpy, signal, sys

class Finder:
    def find_spec(name, *_):
        if name == "jax":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder)
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.thorough
def test_a_second_ctrl_c_ends_a_process_at_once():
    with Processes([["-c", NEVER_LOOKS]]) as one:
        for line in "ready", "stopped":
            one.wait_for(line)
            one.running[0].send_signal(signal.SIGINT)
        assert one.finish(timeout=60) == [(-signal.SIGINT, "", "")]


@pytest.mark.parametrize(
    ("handler", "stops"), [(signal.SIG_IGN, False), (signal.SIG_DFL, True)]
)
def test_a_hangup_that_is_ignored_stays_so(handler, stops):
    """As `nohup` has it."""
    before = signal.signal(signal.SIGHUP, handler)
    try:
        with SignalNotice() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.requested() == stops
        assert signal.getsignal(signal.SIGHUP) == handler
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.quick
def test_ctrl_c_while_a_run_imports_shows_no_stack():
    assert run_program("-c", IMPORTS, timeout=60) == (-signal.SIGINT, "", "")


def run(profiler: Profiler, steps: int) -> None:
    double = jax.jit(lambda x: 2 * x)
    x = jnp.ones(())
    with profiler:
        for step in range(1, steps + 1):
            with profiler.step(step, after=x):
                x = double(x)
            profiler.stop_after(step, x)


@pytest.mark.thorough
@pytest.mark.parametrize(("asked", "last"), [("2-3", 5), ("2-9", 3)])
def test_the_steps_asked_for_are_traced(tmp_path, asked, last):
    """Also in a run that ends in between."""
    said: list[str] = []
    run(Profiler(asked, str(tmp_path), said.append), steps=last)
    (path,) = tmp_path.glob("plugins/profile/*/*.trace.json.gz")
    assert path.with_name(path.name.replace("trace.json.gz", "xplane.pb")).is_file()
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    named = [event for event in events if event.get("name") == "train"]
    assert {int(event["args"]["step_num"]) for event in named} == {2, 3}
    assert said == [f"trace: {tmp_path}/plugins/profile, for xprof"]


def test_no_steps_are_no_trace_and_others_are_refused(tmp_path):
    run(Profiler("", str(tmp_path), lambda line: None), steps=3)
    assert not list(tmp_path.iterdir())
    for wrong in "x", "0", "3-2", "1-", "1,2":
        message = f'profile="{wrong}" must be steps to trace'
        with pytest.raises(ValueError, match=message):
            Profiler(wrong, str(tmp_path), lambda line: None)
