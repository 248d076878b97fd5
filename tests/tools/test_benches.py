"""Rows of the benchmarks: their numbers, rates, and what they are compared with."""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tools import bench_kernels, bench_ring
from tools.bench_kernels import Runs
from tools.lib.benchmarks import rows
from tools.lib.benchmarks.problems import GRADED, Problem
from tools.lib.benchmarks.rows import Environment, peak_share, table

TOLERANCE = 1e-5
FIXTURES = Path(__file__).parents[1] / "fixtures"


def environment(device_kind: str, device_count: int) -> Environment:
    return Environment(None, False, "", "", device_kind, device_count, 1, 0.0)


def test_share_of_the_peak_is_known_for_known_chips_in_bfloat16_only():
    chips = environment("NVIDIA H100 80GB HBM3", 2)
    assert peak_share(989e12, chips, jnp.bfloat16) == pytest.approx(0.5)
    assert peak_share(1e12, environment("cpu", 8), jnp.bfloat16) is None
    assert peak_share(1e12, chips, jnp.float32) is None


@pytest.mark.parametrize(("mask", "pairs"), [("causal", 96 * 97 / 2), ("full", 96**2)])
def test_rates_are_of_the_visible_pairs(mask, pairs):
    problem, cpu = Problem(96, 2, 1, 16, "float32", mask, batch=3), environment("", 1)
    for direction, forwards in {"forward": 1, "backward": 2.5, "both": 3.5}.items():
        rate = problem.rates(direction, 2.0, cpu)["tflops"] * 1e12
        assert rate == pytest.approx(forwards * 4 * 16 * 2 * 3 * pairs / 2.0)


def test_a_table_has_a_line_a_row_and_a_dash_for_what_a_row_has_not():
    columns = {"name": "{name}", "share": "{share:.1%}"}
    found = table(
        [{"name": "a", "share": None}, {"name": "long", "share": 0.5}], columns
    )
    assert found.splitlines() == ["name  share", "   a      -", "long  50.0%"]


# Kernels on one device, beside their peers.


@pytest.mark.thorough
def test_each_direction_of_each_contestant_that_is_there_has_a_row(rows_of):
    tiny = "--lengths 32 --head-dims 16 --heads 2 --kv-heads 1 --repeats 1 --calls 2"
    chosen = "--contestants blockwise cudnn reference --masks causal"
    found = rows_of(bench_kernels, *f"{tiny} {chosen} --dtypes float32".split())
    assert [(row["direction"], row["contestant"]) for row in found] == [
        (direction, name)
        for direction in ("forward", "backward")
        for name in ("blockwise", "reference")
    ]
    assert 0 < max(row["error"] for row in found) < TOLERANCE


def test_an_error_is_seen():
    truth = [np.ones((2, 3), np.float32)]
    wrong = jnp.ones((2, 3)).at[0, 0].set(2.0)
    runs = Runs(lambda: (wrong,), lambda: None)
    found = bench_kernels.largest_error(runs, "forward", truth)
    assert found == pytest.approx(6**-0.5)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mask", "directions"), [("causal", ["forward", "backward"]), ("full", ["forward"])]
)
def test_splash_is_given_the_same_problem(mask, directions):
    """Interpreted; on a TPU the same runs are compiled."""
    operands = Problem(128, 1, 1, 128, "float32", mask).draw()
    found = bench_kernels.splash(operands, mask == "causal", interpret=True)
    exact = bench_kernels.ours("reference", operands, mask == "causal")
    for direction in directions:
        truth = jax.device_get(getattr(exact, direction)())
        assert bench_kernels.largest_error(found, direction, truth) < 1e-2


# Rings, their simulated steps, and a stand-in for the original.

ORDERS = ["contiguous", "striped", "zigzag"]
TILES = {"contiguous": 10 + 16, "striped": 10 + 10, "zigzag": 10 + 8}
"""On the path, of shards of 4 x 4 tiles, of which the causal triangle has 10."""


@pytest.fixture
def measure(rows_of, monkeypatch):
    """Runs bench_ring with small sizes and tiles; returns its rows."""
    monkeypatch.setattr(bench_ring, "TILE", 32)
    return functools.partial(rows_of, bench_ring, *TINY)


TINY = "--devices 2 --length 256 --heads 2 --kv-heads 1 --head-dim 16 --repeats 1"
TINY = f"{TINY} --implementations blockwise".split()


@pytest.mark.thorough
def test_every_layout_has_a_right_row_whose_rates_agree(measure, capsys):
    found = measure()
    assert [row["layout"] for row in found] == ORDERS
    same = {"implementation": "blockwise", "device_kind": "cpu", "device_count": 2}
    same |= {"ring_size": 2, "length": 256, "kv_heads": 1, "mask": "causal"}
    same |= {"dtype": "float32", "block_q": 32, "error_length": 256, "repeats": 1}
    for row in found:
        assert row == row | same
        for name in GRADED:
            assert 0 < row[f"error_{name}"] <= TOLERANCE, (name, row)
        assert row["seconds_min"] == row["seconds_median"] == row["seconds_max"] > 0
        assert row["compile_seconds"] > 0 and row["cpu_seconds_median"] > 0
        assert row["peak_share"] is None
        assert row["tiles_critical_path"] == TILES[row["layout"]]
        assert row["tiles_bound"] == pytest.approx(8 * 8 / 2 / 2, rel=1e-2)
    titles, *lines = capsys.readouterr().out.splitlines()[-4:]
    assert titles.split()[:2] == ["layout", "implementation"]
    assert [line.split()[0] for line in lines] == ORDERS


class ExactRing:
    """In the place of a compiled ring: the reference, in no time."""

    compile_seconds, versions = 1.0, {"jax": jax.__version__}

    def __init__(self, problem, operands, **_):
        self.answer = functools.partial(problem.truth, operands)

    def sample(self):
        return rows.Sample(1.0, 1.0)


@pytest.mark.thorough
def test_long_sequences_are_checked_at_a_length_that_the_reference_can_hold(
    monkeypatch, measure
):
    monkeypatch.setattr(bench_ring, "CompiledRing", ExactRing)
    monkeypatch.setattr(bench_ring, "LONGEST_CHECKED", 32)
    (row,) = measure("--layouts", "striped")
    assert (row["length"], row["error_length"], row["error_dk"]) == (256, 32, 0)


@pytest.mark.thorough
def test_the_original_has_rows_beside_ours(measure, tmp_path):
    # A Python whose `original_process.py` is the reference here.
    script, path = FIXTURES / "original_ring.txt", tmp_path / "python"
    path.write_text(script.read_text().format(python=sys.executable))
    path.chmod(0o755)
    sizes = "--length 64 --layouts striped --mask documents --chunks 8 --repeats 2"
    ours, peer = measure(*sizes.split(), "--beside", str(path))
    assert peer["implementation"] == "ringattention" and peer["block_q"] == 8
    for name in GRADED:
        assert 0 < peer[f"error_{name}"] < TOLERANCE
        assert 0 < ours[f"error_{name}"] < TOLERANCE
    # The first turn, of 8 seconds, does not count.
    assert (peer["seconds_median"], peer["cpu_seconds_median"]) == (9.5, 17.5)
    assert peer["compile_seconds"] == 1.5
    assert peer["versions"] == {"ringattention": "0.1.2"}
    assert ours["versions"] == {"jax": jax.__version__}


@pytest.mark.thorough
def test_simulated_steps_have_a_row_for_each_layout_and_direction(measure):
    found = measure("--simulate", "--calls", "1")
    names = [(row["direction"], row["layout"]) for row in found]
    assert names == [(way, n) for way in ("forward", "backward") for n in ORDERS]
    for row in found:
        seconds = np.array(row["seconds"])
        assert seconds.shape == (2, 2) and (seconds > 0).all()
        assert row["seconds_path"] == pytest.approx(seconds.max(axis=1).sum())
        assert len(row["seconds_together"]) == 2
        assert row["limit_share"] == pytest.approx(row["speed_up"] / row["limit"])
        assert row["tiles_path"] == TILES[row["layout"]]


def test_the_path_is_the_time_of_the_slowest_device_of_each_step(monkeypatch):
    """A step takes one second for each visible pair."""
    clock = [0.0]

    def step(start, stop):
        clock[0] += float(jnp.maximum(stop - start, 0).sum())
        return start

    monkeypatch.setattr(rows.time, "perf_counter", lambda: clock[0])
    problem = Problem(64, 2, 1, 8, "float32", "causal", ring_size=4)
    seconds = bench_ring.time_steps(problem, ("contiguous", "striped"), step, 2, 3)
    assert seconds["contiguous"].max(axis=0).tolist() == [136, 256, 256, 256]
    assert seconds["striped"].max(axis=0).tolist() == [136] * 4
    how = {"repeats": 2, "calls": 3, "together": True}
    whole = bench_ring.time_steps(problem, ("contiguous", "striped"), step, **how)
    for layout, each in seconds.items():
        assert whole[layout].tolist() == each.sum(axis=1, keepdims=True).tolist()
