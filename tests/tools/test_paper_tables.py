"""The papers' tables: formulas against hand-computed values, rows of compiled steps."""

import json

import pytest

from tools import paper_tables
from tools.lib.papers import contexts as paper_contexts
from tools.lib.papers.contexts import TARGETS
from tools.lib.papers.formulas import (
    SmallestBlock,
    dataset_flops_ratio,
    largest_attention_speed_up,
)
from training import chips

ROW = {
    "memory": {"peak": 30, "capacity": 40, "host": 2**31, "spare_share": 0.25},
    "transfers": {"hidden_bytes": 300.0, "exposed_bytes": 100.0},
    "estimate": {"mfu": 0.6},
    "compile_seconds": 7.0,
    "environment": {"commit": "abc"},
}


def test_smallest_blocks_are_those_of_table_2():
    """To the digits that the paper gives, where it gives the rates that it used."""
    rows = {row["chip"]: row for row in paper_tables.table_2()}
    for name in ("A100 80GB", "A100 over InfiniBand", "TPU v4"):
        found = [rows[name][column] / 1024 for column in ("block", "sequence")]
        assert found == pytest.approx(rows[name]["paper"], rel=0.05)
    v4 = SmallestBlock.of(chips.find("TPU v4"))
    assert v4.block == pytest.approx(275e12 / 45e9)
    assert v4.sequence == 6 * v4.block
    assert dataset_flops_ratio(4096, 4096, 4096) == 1
    assert dataset_flops_ratio(1000, 12_000, 6_000) == 1.5


@pytest.mark.parametrize("ring, limit", [(1, 1), (2, 1.5), (4, 1.75), (8, 1.875)])
def test_striping_gains_most_without_tiles(ring, limit):
    assert largest_attention_speed_up(ring) == pytest.approx(limit)
    assert largest_attention_speed_up(ring, tiles=1) == 1
    assert largest_attention_speed_up(ring, tiles=16) <= limit


def keep(folder, target, row, remat="nothing"):
    (folder / f"{target.name(remat)}.json").write_text(json.dumps(row))


def test_rows_are_read_as_they_were_compiled(tmp_path):
    tight = ROW | {"memory": ROW["memory"] | {"spare_share": 0.04}}
    refused = {"refused": "it takes 33G of 30G"}
    for target, row in zip(TARGETS, (ROW, tight, refused), strict=False):
        keep(tmp_path, target, row)
    found = paper_contexts.rows(tmp_path, TARGETS[:3])
    rows = found[::2]
    assert [row["fits"] for row in rows] == [True, False, False]
    assert rows[0]["hidden_share"] == 0.75
    assert rows[0]["context"] == 4 * TARGETS[0].paper_context
    assert rows[2]["why"] == refused["refused"]
    assert found[1]["fits"] is None


def test_a_row_that_is_refused_is_kept_and_a_failure_is_told(tmp_path, monkeypatch):
    def planner(message):
        def run(command, **_):
            return type("Done", (), {"returncode": 1, "stderr": message})

        monkeypatch.setattr(paper_contexts.subprocess, "run", run)

    planner("…\nerror: the step does not fit: it takes 33G of 30G")
    row = paper_contexts.compile_row(TARGETS[0], "nothing", tmp_path)
    assert row["refused"] == "the step does not fit: it takes 33G of 30G"
    path = tmp_path / f"{TARGETS[0].name('nothing')}.json"
    assert json.loads(path.read_text()) == row
    planner("Segmentation fault")
    with pytest.raises(RuntimeError, match="plan_pod.* failed: Segmentation fault"):
        paper_contexts.compile_row(TARGETS[0], "nothing", tmp_path)
    assert json.loads(path.read_text()) == row


def test_tables_are_printed_and_written(tmp_path, capsys):
    folder = tmp_path / paper_tables.CONTEXTS
    folder.mkdir(parents=True)
    keep(folder, TARGETS[0], ROW, "offload")
    layer = {"system": "striped", "ring": 4, "parts": 2, "tokens": [8, 16]}
    layer |= {"compiled_bytes": 2**20, "formula_bytes": 2**21}
    (tmp_path / paper_tables.LAYER).write_text(json.dumps({"rows": [layer]}))
    ring = {"ring": 4, "tokens": 65536, "activation_bytes": 2**20}
    paper_tables.compile_memory(tmp_path / paper_tables.RINGS, [ring])
    paper_tables.main(["--output", str(tmp_path)])
    text = capsys.readouterr().out
    assert "ring     4, to      65,536 tokens:      1.0 MiB" in text
    assert "1.0, the paper's formula      2.0" in text
    assert "75.0% hidden, MFU at most 60%, 2 GiB of the host's" in text
    assert (tmp_path / "paper_tables.txt").read_text() == text
    values = json.loads((tmp_path / "paper_tables.json").read_text())
    assert len(values["table_3"]) == 2 * len(TARGETS)


A_CONTEXT = f"{paper_tables.CONTEXTS}/{TARGETS[0].name('nothing')}.json"


@pytest.mark.parametrize("name", [paper_tables.LAYER, paper_tables.RINGS, A_CONTEXT])
@pytest.mark.parametrize(
    "content", ["", "7", "{}", '{"rows": [7]}', '{"rows": [{"ring": 4}]}']
)
def test_files_of_something_else_are_named_and_nothing_is_written(
    name, content, tmp_path, capsys
):
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert paper_tables.main(["--output", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {path} holds nothing that was compiled here (")
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path]
