"""Rows of rings, of their simulated steps, and of a stand-in for the original."""

import sys
from dataclasses import fields
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tools import bench_ring
from tools.lib.benchmarks import rings, rows
from tools.lib.benchmarks.rings import GRADED, Problem
from tools.lib.benchmarks.rows import Environment, Times

TOLERANCE = 1e-5
TINY = "--devices 2 --length 256 --heads 2 --kv-heads 1 --head-dim 16 --repeats 1"
TINY = f"{TINY} --tile 32 --implementations blockwise".split()
LAYOUTS = ["contiguous", "striped", "zigzag"]

KEYS = {field.name for part in (Environment, Times, Problem) for field in fields(part)}
KEYS |= {"implementation", "layout", "block_q", "block_k", "versions"}
KEYS |= {"tflops", "flops_convention", "peak_share"}
KEYS |= {"tiles_total", "tiles_critical_path", "tiles_bound", "bound_share"}
KEYS |= {f"error_{name}" for name in ("out", "dq", "dk", "dv", "length")}


@pytest.mark.thorough
@pytest.mark.parametrize("mask", ["causal", "documents"])
def test_every_layout_has_a_right_row_whose_rates_agree(mask, rows_of, capsys):
    found = rows_of(bench_ring, *TINY, "--mask", mask)
    assert [row["layout"] for row in found] == LAYOUTS
    same = {"implementation": "blockwise", "device_kind": "cpu", "device_count": 2}
    same |= {"ring_size": 2, "length": 256, "kv_heads": 1, "mask": mask}
    same |= {"dtype": "float32", "block_q": 32, "error_length": 256, "repeats": 1}
    problem = Problem(2, 256, 2, 1, 16, "float32", mask)
    np.testing.assert_equal(problem.draw(), problem.draw())
    pairs = (problem.visible.k_end - problem.visible.k_start).sum()
    for row in found:
        assert row.keys() == KEYS and row == row | same
        for name in GRADED:
            assert 0 < row[f"error_{name}"] <= TOLERANCE, (name, row)
        assert row["seconds_min"] == row["seconds_median"] == row["seconds_max"] > 0
        assert row["compile_seconds"] > 0 and row["cpu_seconds_median"] > 0
        flops = row["tflops"] * 1e12 * row["seconds_median"]
        assert flops == pytest.approx(3.5 * 4 * 16 * 2 * pairs)
        assert row["peak_share"] is None
    if mask == "causal":
        # Shards of 128 tokens: 4 x 4 tiles, of which the causal triangle has 10.
        paths = [row["tiles_critical_path"] for row in found]
        assert paths == [10 + 16, 10 + 10, 10 + 8]
    assert "as fast:" in capsys.readouterr().out


@pytest.mark.thorough
def test_long_sequences_are_checked_at_a_length_that_the_reference_can_hold(
    monkeypatch, rows_of
):
    monkeypatch.setattr(bench_ring, "LONGEST_CHECKED", 32)
    (row,) = rows_of(bench_ring, *TINY, "--batch", "2", "--layouts", "striped")
    assert (row["length"], row["batch"], row["error_length"]) == (256, 2, 32)
    assert 0 < row["error_dk"] <= TOLERANCE


# A Python whose `original_process.py` computes with this repository's reference.
STAND_IN = """#!{python}
import json, pathlib, sys
sys.path.insert(0, {root!r})
import jax, numpy as np
jax.config.update("jax_platforms", "cpu")
from kernels import attention, masks
script, directory, devices, *chunks = sys.argv[1:]
assert devices == "2" and script.endswith("original_process.py")
{fault}
problem = np.load(pathlib.Path(directory, "problem.npz"))
segments = problem["segments"][0] if "segments" in problem else None
mask = masks.causal() if segments is None else masks.documents(segments)
attend = lambda *x: attention(*x, visible=mask)
out, pull = jax.vjp(attend, *(problem[name] for name in "qkv"))
versions = dict(ringattention="0.1.2")
print(json.dumps(dict(compile_seconds=1.5, versions=versions)), flush=True)
for number, line in enumerate(sys.stdin):
    print(json.dumps(dict(wall=8.0 + number, cpu=16.0 + number)), flush=True)
answer = dict(zip(["dq", "dk", "dv"], pull(problem["d_out"])), out=out)
np.savez(pathlib.Path(directory, "answer.npz"), **answer)
"""


def stand_in(directory: Path, fault: str = "") -> list[str]:
    """Arguments with which the program runs it instead of the original."""
    path, root = directory / "python", str(Path(bench_ring.__file__).parents[1])
    path.write_text(STAND_IN.format(python=sys.executable, root=root, fault=fault))
    path.chmod(0o755)
    beside = ["--beside", str(path), "--chunks", "8", "--repeats", "2"]
    return [*TINY, "--length", "64", "--layouts", "striped", *beside]


@pytest.mark.thorough
def test_the_original_has_rows_beside_ours(tmp_path, rows_of):
    arguments = [*stand_in(tmp_path), "--mask", "documents"]
    ours, peer = rows_of(bench_ring, *arguments)
    assert peer["implementation"] == "ringattention" and peer["block_q"] == 8
    for name in GRADED:
        assert 0 < peer[f"error_{name}"] < TOLERANCE
    # The first turn, of 8 seconds, does not count.
    assert (peer["seconds_median"], peer["cpu_seconds_median"]) == (9.5, 17.5)
    assert peer["compile_seconds"] == 1.5
    assert peer["versions"] == {"ringattention": "0.1.2"}
    assert ours["versions"] == {"jax": jax.__version__}


@pytest.mark.thorough
def test_an_original_that_fails_is_quoted_and_nothing_is_written(tmp_path, capsys):
    arguments = stand_in(tmp_path, fault='sys.exit("no module of that name")')
    output = tmp_path / "rows.json"
    assert bench_ring.main([*arguments, "--output", str(output)]) == 1
    said = capsys.readouterr().err
    assert said == "error: ringattention failed: no module of that name\n"
    assert not output.exists()


@pytest.mark.thorough
def test_simulated_steps_have_a_row_for_each_layout_and_direction(rows_of):
    found = rows_of(bench_ring, *TINY, "--simulate", "--calls", "1")
    directions = ("forward", "backward")
    names = [(row["direction"], row["layout"]) for row in found]
    assert names == [(way, name) for way in directions for name in LAYOUTS]
    for row in found:
        seconds = np.array(row["seconds"])
        assert seconds.shape == (2, 2) and (seconds > 0).all()
        assert row["seconds_path"] == pytest.approx(seconds.max(axis=1).sum())
        assert row["limit_share"] == pytest.approx(row["speed_up"] / row["limit"])
        tiles = {"contiguous": 10 + 16, "striped": 20, "zigzag": 10 + 8}
        assert row["tiles_path"] == tiles[row["layout"]]


def test_the_path_is_the_time_of_the_slowest_device_of_each_step(monkeypatch):
    """A step takes one second for each visible pair."""
    clock = [0.0]

    def step(start, stop):
        clock[0] += float(jnp.maximum(stop - start, 0).sum())
        return start

    monkeypatch.setattr(rows.time, "perf_counter", lambda: clock[0])
    problem = Problem(4, 64, 2, 1, 8, "float32", "causal")
    seconds = rings.time_steps(problem, ("contiguous", "striped"), step, 2, 3)
    assert seconds["contiguous"].max(axis=0).tolist() == [136, 256, 256, 256]
    assert seconds["striped"].max(axis=0).tolist() == [136] * 4
