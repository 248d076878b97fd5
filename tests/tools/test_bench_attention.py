import contextlib
import io
from dataclasses import fields

import pytest

from kernels.cases import FLOAT32_TOLERANCE, Case
from tools import bench_attention
from tools.lib.benchmarks.rows import Environment, Times

TINY = "--devices 2 --length 256 --heads 2 --kv-heads 1 --head-dim 16 --repeats 1"
TINY = f"{TINY} --block-q 32 --block-k 64".split()

KEYS = {field.name for part in (Environment, Times, Case) for field in fields(part)}
KEYS |= {"implementation", "dtype", "block_q", "block_k"}
KEYS |= {"tflops", "flops_convention", "peak_share"}
KEYS |= {"tiles_total", "tiles_critical_path", "tiles_bound", "bound_share"}
KEYS |= {f"error_{name}" for name in ("out", "dq", "dk", "dv", "lse", "length")}


@pytest.fixture(scope="module")
def tiny(rows_of):
    """Rows of one run with every layout, and what the program printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        return rows_of(bench_attention, *TINY), printed.getvalue()


@pytest.mark.thorough
def test_every_layout_has_a_row_with_every_key(tiny):
    rows, _ = tiny
    assert [row["layout"] for row in rows] == ["contiguous", "striped", "zigzag"]
    same = {"implementation": "blockwise", "device_kind": "cpu", "device_count": 2}
    same |= {"ring_size": 2, "length": 256, "group": 2, "mask": "causal"}
    same |= {"dtype": "float32", "block_q": 32, "block_k": 64, "error_length": 256}
    for row in rows:
        assert row.keys() == KEYS and row == row | same


@pytest.mark.thorough
def test_every_row_is_right_and_its_times_and_rates_agree(tiny):
    for row in tiny[0]:
        for name in ("out", "dq", "dk", "dv", "lse"):
            assert 0 < row[f"error_{name}"] <= FLOAT32_TOLERANCE, (name, row)
        assert row["repeats"] == 1
        assert row["seconds_min"] == row["seconds_median"] == row["seconds_max"] > 0
        assert row["compile_seconds"] > 0 and row["cpu_seconds_median"] > 0
        flops = row["tflops"] * 1e12 * row["seconds_median"]
        assert flops == pytest.approx(3.5 * 4 * 16 * 2 * 256 * 257 / 2)
        assert "visible pairs only" in row["flops_convention"]
        assert row["peak_share"] is None


@pytest.mark.thorough
def test_tiles_are_those_of_the_blocks_that_ran(tiny):
    """Shards of 128 tokens: 4 x 2 tiles; causal, 6 of them are live."""
    expected = (6 + 8, 6 + 6 + 8), (6 + 6, 4 * 6), (6 + 4, 2 * 6 + 2 * 4)
    for row, tiles in zip(tiny[0], expected, strict=True):
        assert (row["tiles_critical_path"], row["tiles_total"]) == tiles
        assert row["tiles_bound"] == pytest.approx(256 * 257 / 2 / (32 * 64) / 2)
        share = row["tiles_bound"] / row["tiles_critical_path"]
        assert row["bound_share"] == pytest.approx(share)


@pytest.mark.thorough
def test_long_sequences_are_checked_at_a_length_that_the_reference_can_hold(
    monkeypatch, rows_of
):
    monkeypatch.setattr(bench_attention, "LONGEST_CHECKED", 31)
    (row,) = rows_of(bench_attention, *TINY, "--batch", "2", "--layouts", "striped")
    assert (row["length"], row["batch"], row["error_length"]) == (256, 2, 31)
    assert 0 < row["error_dk"] <= FLOAT32_TOLERANCE


@pytest.mark.thorough
def test_implementation_without_blocks_has_no_tiles(capsys, rows_of):
    arguments = "--devices 1 --length 32 --repeats 1 --implementations reference"
    arguments = f"{arguments} --layouts striped".split()
    (row,) = rows_of(bench_attention, *arguments)
    assert row["block_q"] is row["tiles_critical_path"] is row["bound_share"] is None
    assert "as fast:" in capsys.readouterr().out
