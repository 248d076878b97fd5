import dataclasses
import json

import pytest

from kernels.tpu.block_sizes import TPU_BACKWARD, TPU_FORWARD, TpuBlocks
from tests.tools.test_bundles import make_texts
from tools import tune_block_sizes
from tools.lib.tpu_compiler.bundles import read_schedule
from tools.lib.tpu_compiler.tile_program import Compiled, Tile
from tools.tpu_schedule import Measurement, measure
from tools.tune_block_sizes import GRIDS, Candidate, list_candidates, main, rank, run

BLOCKS = TpuBlocks(1024, 1024, 512, 256, 1, 0)


def make_measurement(tile, blocks):
    """Made up: a body of as many bundles as there are pieces of 128 keys in a tile."""
    pieces = blocks.stacked_rows * blocks.block_k // (blocks.rows * 128)
    body = [("", 0, "%1 = vmatmul", 1)] * pieces
    compiled = Compiled("TPU v5 lite", "0.0.48.1", {"kernel": blocks.rows * 2**10})
    return Measurement(tile, blocks, compiled, {"k": read_schedule(*make_texts(*body))})


def refuse_wide(tile, blocks):
    if blocks.rows == 1024:
        raise ValueError("VMEM")
    return make_measurement(tile, blocks)


def test_blocks_asked_for_are_those_that_are_compiled():
    tile = Tile("v5e", "forward", 1024, 1024, 128, "bfloat16", 1, 4096)
    row = measure(tile, TpuBlocks(256, 512, 128, 128, 0, 0)).row()
    # Eight bodies of 754 bundles: 423 filled by the MXU, without spills. Bodies that
    # hide scores or take their maximum are as long, as they have all of the rows too.
    assert (row["bodies"], row["used_vstore_spill"]) == (8, 0)
    assert row["bundles"] == pytest.approx(6032, rel=0.02)
    assert row["mxu_bound"] == pytest.approx(3384, rel=0.02)
    assert row["vmem_bytes"] < 2**21


def test_candidates_are_the_table_and_every_combination_that_fits():
    grid = {"rows": (512, 1024), "columns": (256, 512), "block_k": (256, 1024)}
    found = list_candidates("v5e", {"v5e": BLOCKS}, grid)
    assert [(c.blocks.rows, c.blocks.columns, c.blocks.block_k) for c in found] == [
        (512, 256, 1024),
        (512, 256, 256),
        (512, 512, 1024),
        (1024, 256, 256),
        (1024, 256, 1024),
        (1024, 512, 1024),
    ]
    assert [c.is_in_table for c in found] == [True] + [False] * 5
    assert {c.blocks.ahead for c in found} == {1}


def test_backward_candidates_differ_in_nothing_that_the_kernel_ignores():
    found = list_candidates("v5e", {"v5e": BLOCKS}, GRIDS["backward"])
    same = {dataclasses.replace(c.blocks, rows=256) for c in found}
    assert sorted(c.blocks.rows for c in found) == [256, 512, 1024]
    assert len(same) == 1


def test_default_grids_hold_the_tables():
    for direction, tables in (("forward", TPU_FORWARD), ("backward", TPU_BACKWARD)):
        for blocks in tables.values():
            for name, numbers in GRIDS[direction].items():
                assert getattr(blocks, name) in numbers, f"{direction}, {name}"


def test_what_does_not_compile_does_not_stop_the_rest():
    candidates = [
        Candidate("v6e", dataclasses.replace(BLOCKS, rows=rows), rows == 512)
        for rows in (256, 1024, 512)
    ]
    environment = tune_block_sizes.Environment(None, False, "", "", "cpu", 8, 2, 0.0)
    found = list(run(candidates, "forward", environment, 2, refuse_wide))
    failed = [outcome for outcome in found if outcome.failure]
    assert [(o.candidate.blocks.rows, o.failure) for o in failed] == [(1024, "VMEM")]
    ranked = rank(found, ["v6e"])
    assert [o.candidate.blocks.rows for o in ranked] == [512, 256]
    row = ranked[0].row
    assert (row["bundles"], row["blocks_rows"], row["is_in_table"]) == (16, 512, True)
    assert (row["chip"], row["device_kind"]) == ("v6e", "TPU v5 lite")


def test_ranking_is_by_chip_bundles_and_what_the_table_has():
    def make_outcome(chip, bundles, is_in_table, spills):
        row = {"bundles": bundles, "used_vload_fill": spills, "used_vstore_spill": 0}
        return tune_block_sizes.Outcome(Candidate(chip, BLOCKS, is_in_table), row)

    outcomes = [
        make_outcome("v6e", 5, False, 0),
        make_outcome("v4", 7, False, 2),
        make_outcome("v4", 7, False, 1),
        make_outcome("v4", 7, True, 9),
        make_outcome("v4", 6, False, 9),
    ]
    ranked = rank(outcomes, ["v4", "v6e"])
    assert [outcomes.index(outcome) for outcome in ranked] == [4, 3, 2, 1, 0]


def test_program_shows_the_best_and_writes_every_row(tmp_path, monkeypatch, capsys):
    tables = {"v4": dataclasses.replace(BLOCKS, rows=1024), "v5e": BLOCKS}
    monkeypatch.setitem(tune_block_sizes.TABLES, "backward", tables)
    monkeypatch.setattr(tune_block_sizes, "measure", refuse_wide)
    path = tmp_path / "rows.json"
    arguments = ["--chips", "v5e", "v4", "--direction", "backward", "--jobs", "2"]
    assert main([*arguments, "--rows", "256", "1024", "--output", str(path)]) == 0
    rows = json.loads(path.read_text())
    assert [(row["chip"], row["blocks_rows"], row["is_in_table"]) for row in rows] == [
        ("v5e", 512, True),
        ("v5e", 256, False),
        ("v4", 256, False),
    ]
    shown = capsys.readouterr().out
    assert "v4: VMEM" in shown and "v5e: VMEM" in shown
    assert f"v5e: {BLOCKS}\nv4: {dataclasses.replace(BLOCKS, rows=256)}\n" in shown
    assert main([*arguments, "--output", str(path)]) == 1
    assert "rows.json exists" in capsys.readouterr().err
    assert main([*arguments, "--ahead", "1"]) == 1
    assert "the backward kernel has no ahead" in capsys.readouterr().err
    assert main([*arguments, "--rows", "100"]) == 1
    assert "powers of 2 from 128 on, got" in capsys.readouterr().err


def test_chip_without_any_result_is_a_failure(monkeypatch, capsys):
    def refuse(tile, blocks):
        raise ValueError("VMEM")

    monkeypatch.setattr(tune_block_sizes, "measure", refuse)
    assert main(["--direction", "backward", "--chips", "v4"]) == 1
    assert "v4: no result" in capsys.readouterr().out
