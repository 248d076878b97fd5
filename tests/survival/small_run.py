"""The run that is disturbed, and what disturbs it."""

import signal
import time
from pathlib import Path
from typing import Any

import train
from tests.cases import table
from tests.small.runs import Run, assert_equal_bits
from tests.support.processes import Processes

SMALLER = dict(table("runs.txt", "survival"))
STEPS = SMALLER["train__steps"]
"""Of the undisturbed run, which saves at 4, 8 and 12 and validates at 6 and 12."""

QUIET = {"train__validation_batches": 0}


class Small(Run):
    """A run that compiles fast."""

    def __init__(self, corpus: Path, workdir: Path, **fields: Any):
        super().__init__(corpus, workdir, **SMALLER | fields)

    def steps(self) -> set[str]:
        return {path.name for path in (self.workdir / "checkpoints").iterdir()}

    def train_and_stop(self, beginning: str, **overrides: Any) -> None:
        """Trains, and sends SIGTERM to this process when a line begins so."""

        def say(line: str) -> None:
            self.said.append(line)
            if line.startswith(beginning):
                signal.raise_signal(signal.SIGTERM)

        train.train(self.config(**overrides), say)

    def assert_goes_on(self, step: int, truth: Any) -> None:
        """From this step, and ends with the undisturbed run's state."""
        self.train()
        assert f"resuming from step {step}" in self.said
        assert_equal_bits(self.state(), truth)

    def warnings(self) -> list[str]:
        return [line for line in self.said if line.startswith("WARNING")]


VICTIM = """
import os, sys, time
import train
from training.saved.checkpoint import Checkpoints

save = Checkpoints.save

def save_and_tell(self, step, state, **options):
    save(self, step, state, **options)
    print(f"saving {step}", flush=True)
    while step == int(os.environ["LAST_SAVE"]):
        time.sleep(1)

Checkpoints.save = save_and_tell
sys.exit(train.main())
"""


def start_and_kill(run: Small, line: str, seconds: float, last_save: int = 0) -> bool:
    """Starts a run in a process of its own and kills it some time after a line.

    last_save: step after whose save begins it makes no other; 0 for none.

    Returns:
      Whether it was killed, and had not ended before.
    """
    victim = ["-c", VICTIM, *run.flags()]
    with Processes([victim], LAST_SAVE=str(last_save)) as started:
        (process,) = started.running
        for said in iter(process.stdout.readline, ""):
            if said.startswith(line):
                break
        time.sleep(seconds)
        process.kill()
        _, errors = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), errors
    return process.returncode != 0
