import dataclasses

import pytest

from kernels.backends.tpu.block_sizes import TpuBlocks
from tests.tools.test_tpu_schedule import make_measurement, make_tile
from tools import tune_block_sizes
from tools.tpu_schedule import measure
from tools.tune_block_sizes import Candidate, Outcome, rank

BLOCKS = TpuBlocks(1024, 1024, 512, 256, 1, 0)


def refuse_wide(tile, blocks):
    """Makes up a body of as many bundles as a tile has pieces of 128 keys."""
    if blocks.rows == 1024:
        raise ValueError("VMEM")
    pieces = blocks.stacked_rows * blocks.block_k // (blocks.rows * 128)
    return make_measurement(tile, blocks, [("", 0, "%1 = vmatmul", 1)] * pieces)


@pytest.mark.thorough
def test_blocks_asked_for_are_those_that_are_compiled():
    row = measure(make_tile(), TpuBlocks(256, 512, 128, 128, 0, 0)).row()
    # Eight bodies of 754 bundles: 423 filled by the MXU, without spills. Bodies that
    # hide scores or take their maximum are as long, as they have all of the rows too.
    assert (row["bodies"], row["used_vstore_spill"]) == (8, 0)
    assert row["bundles"] == pytest.approx(6032, rel=0.02)
    assert row["mxu_bound"] == pytest.approx(3384, rel=0.02)
    assert row["vmem_bytes"] < 2**21


def test_ranking_is_by_chip_bundles_and_what_the_table_has():
    outcomes = [
        Outcome(
            Candidate(chip, BLOCKS, is_in_table),
            {"bundles": bundles, "used_vload_fill": spills, "used_vstore_spill": 0},
        )
        for chip, bundles, is_in_table, spills in (
            ("v6e", 5, False, 0),
            ("v4", 7, False, 2),
            ("v4", 7, False, 1),
            ("v4", 7, True, 9),
            ("v4", 6, False, 9),
        )
    ]
    ranked = rank(outcomes, ["v4", "v6e"])
    assert [outcomes.index(outcome) for outcome in ranked] == [4, 3, 2, 1, 0]


def test_program_shows_the_best_and_writes_every_row_that_compiles(
    rows_of, monkeypatch, capsys
):
    tables = {"v4": dataclasses.replace(BLOCKS, rows=1024), "v5e": BLOCKS}
    monkeypatch.setitem(tune_block_sizes.TABLES, "backward", tables)
    monkeypatch.setattr(tune_block_sizes, "measure", refuse_wide)
    arguments = "--chips v5e v4 --direction backward --jobs 2 --rows 256 1024".split()
    rows = rows_of(tune_block_sizes, *arguments)
    names = "chip", "blocks_rows", "is_in_table", "bundles", "device_kind"
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("v5e", 512, True, 16, "TPU v5 lite"),
        ("v5e", 256, False, 32, "TPU v5 lite"),
        ("v4", 256, False, 32, "TPU v5 lite"),
    ]
    shown = capsys.readouterr().out
    assert "v4: VMEM" in shown and "v5e: VMEM" in shown
    assert f"v5e: {BLOCKS}\nv4: {dataclasses.replace(BLOCKS, rows=256)}\n" in shown
