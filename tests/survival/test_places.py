"""Runs whose place cannot be written to, is full, or is another run's."""

import os
import re
import threading

import pytest

import train
from tests.processes import run_program
from training.workdir import locked

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
