from dataclasses import fields

import jax.numpy as jnp
import numpy as np
import pytest

from tools import simulate_ring
from tools.lib.benchmarks import rows
from tools.lib.benchmarks.rows import Environment
from tools.simulate_ring import Problem

TINY = "--implementation blockwise --dtype float32 --tile 8 --ring-size 2 --heads 2"
TINY += " --local-tokens 32 --kv-heads 1 --head-dim 8 --repeats 1 --calls 1"

KEYS = {field.name for part in (Environment, Problem) for field in fields(part)}
KEYS |= {"layout", "direction", "calls", "repeats", "seconds", "seconds_path"}
KEYS |= {"tiles_path", "speed_up", "limit", "limit_share"}

PROBLEM = Problem("blockwise", 4, 16, 2, 1, 8, "float32", 4)


@pytest.mark.thorough
def test_every_layout_has_a_row_for_each_direction(rows_of):
    found = rows_of(simulate_ring, *TINY.split())
    assert [(row["direction"], row["layout"]) for row in found] == [
        (direction, name)
        for direction in ("forward", "backward")
        for name in ("contiguous", "striped", "zigzag")
    ]
    for row in found:
        assert row.keys() == KEYS
        seconds = np.array(row["seconds"])
        assert seconds.shape == (2, 2) and (seconds > 0).all()
        assert row["seconds_path"] == pytest.approx(seconds.max(axis=1).sum())
        assert row["limit_share"] == pytest.approx(row["speed_up"] / row["limit"])
        # 4 x 4 tiles a step: the triangle has 10 of them.
        tiles = {"contiguous": 10 + 16, "striped": 20, "zigzag": 10 + 8}
        assert row["tiles_path"] == tiles[row["layout"]]


def test_the_path_is_the_time_of_the_slowest_device_of_each_step(monkeypatch):
    """A step takes one second for each visible pair."""
    clock = [0.0]

    def step(start, stop):
        clock[0] += float(jnp.maximum(stop - start, 0).sum())
        return start

    monkeypatch.setattr(rows.time, "perf_counter", lambda: clock[0])
    seconds = simulate_ring.time_steps(PROBLEM, ("contiguous", "striped"), step, 2, 3)
    assert seconds["contiguous"].max(axis=0).tolist() == [136, 256, 256, 256]
    assert seconds["striped"].max(axis=0).tolist() == [136] * 4
