"""Ctrl-C in a run's first seconds, and a second one: what shows no run of the tests."""

import signal

import pytest

from tests.processes import Processes, run_program
from training.preemption import SignalNotice

NEVER_LOOKS = """
import threading, time
from training.preemption import SignalNotice

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
        for line, number in ("ready", signal.SIGHUP), ("stopped", signal.SIGINT):
            one.wait_for(line)
            one.running[0].send_signal(number)
        assert one.finish(timeout=60) == [(-signal.SIGINT, "", "")]


def test_a_hangup_that_is_ignored_stays_so():
    """As `nohup` has it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalNotice() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.requested()
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.quick
def test_ctrl_c_while_a_run_imports_shows_no_stack():
    assert run_program("-c", IMPORTS, timeout=60) == (-signal.SIGINT, "", "")
