"""Traces hold the steps that were asked for."""

import gzip
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from training.profiler import Profiler


def steps_traced(directory: Path) -> set[int]:
    """The numbers of the steps in the only trace there."""
    (path,) = directory.glob("plugins/profile/*/*.trace.json.gz")
    assert path.with_name(path.name.replace("trace.json.gz", "xplane.pb")).is_file()
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    named = [event for event in events if event.get("name") == "train"]
    return {int(event["args"]["step_num"]) for event in named}


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
    assert steps_traced(tmp_path) == {2, 3}
    assert said == [f"trace: {tmp_path}/plugins/profile, for xprof"]


def test_no_steps_are_no_trace_and_others_are_refused(tmp_path):
    run(Profiler("", str(tmp_path), lambda line: None), steps=3)
    assert not list(tmp_path.iterdir())
    for wrong in "x", "0", "3-2", "1-", "1,2":
        message = f'profile="{wrong}" must be steps to trace'
        with pytest.raises(ValueError, match=message):
            Profiler(wrong, str(tmp_path), lambda line: None)
