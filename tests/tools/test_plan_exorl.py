"""Contexts of Ring Attention's table 5 on described v5e: which systems hold them."""

import json

import pytest

from tools import plan_exorl
from tools.lib.planning.step import described_pod
from tools.plan_exorl import earlier_rows, plan, with_row

# system, trajectories: GiB of a device that has 15.75.
HELD = {("blockwise", 32): 13.44, ("striped", 32): 1.92}
REFUSED = [
    ("vanilla", 32),
    ("memory_efficient", 32),
    ("blockwise", 128),
]


@pytest.mark.slow
@pytest.mark.timeout(600)  # the ring's eight hops of either pass are compiled
@pytest.mark.parametrize("case", HELD, ids=str)
def test_blockwise_attention_and_a_ring_of_8_hold_32_trajectories(case):
    row = plan(described_pod("v5e:2x4"), *case)
    assert row["refusal"] is None and row["parameters"] == 303_503_366
    assert row["peak_gib"] == pytest.approx(HELD[case], rel=0.05)
    assert row["device_count"] == (8 if case[0] == "striped" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_larger_ones_are_refused(case):
    row = plan(described_pod("v5e:2x4"), *case)
    assert row["peak_gib"] is None and "does not fit: it takes" in row["refusal"]
    assert row["attention_parts"] == 4 and row["device_kind"] == "TPU v5 lite"


def a_row(system, trajectories, parts, peak=1.0):
    case = {"system": system, "trajectories": trajectories, "attention_parts": parts}
    return case | {"peak_gib": peak}


def test_a_row_takes_the_place_of_its_case_alone():
    rows = []
    for case in (("ring", 32, 1), ("vanilla", 128, 1), ("ring", 32, 4)):
        rows = with_row(rows, a_row(*case))
    assert [row["attention_parts"] for row in rows] == [1, 1, 4]
    assert rows[0]["system"] == "vanilla"
    again = with_row(rows, a_row("ring", 32, 4, peak=2.0))
    assert again[:2] == rows[:2] and again[2]["peak_gib"] == 2.0 and len(again) == 3


def test_rows_are_written_one_by_one_and_earlier_ones_are_kept(
    tmp_path, monkeypatch, capsys
):
    output = tmp_path / "rows.json"
    output.write_text(json.dumps([a_row("vanilla", 32, 4), a_row("striped", 32, 4)]))
    written = []

    def planned(pod, system, trajectories, parts):
        written.append(len(earlier_rows(output)))
        return a_row(system, trajectories, parts or 4, peak=3.0)

    monkeypatch.setattr(plan_exorl, "plan", planned)
    monkeypatch.setattr(plan_exorl, "described_pod", lambda name: name)
    command = ["--systems", "vanilla", "ring", "--trajectories", "32"]
    assert plan_exorl.main([*command, "--output", str(output)]) == 0
    assert written == [2, 2]
    assert capsys.readouterr().err.splitlines() == [
        f"compiling {system} attention to 32 trajectories for v5e:2x4: 0 s so far"
        for system in ("vanilla", "ring")
    ]
    rows = earlier_rows(output)
    assert [row["system"] for row in rows] == ["vanilla", "ring", "striped"]
    assert [row["peak_gib"] for row in rows] == [3.0, 3.0, 1.0]


@pytest.mark.parametrize("content", ["no rows", '[{"system": "ring"}]', "7"])
def test_nothing_is_compiled_for_a_file_of_something_else(
    tmp_path, monkeypatch, capsys, content
):
    monkeypatch.delattr(plan_exorl, "plan")
    output = tmp_path / "rows.json"
    output.write_text(content)
    assert plan_exorl.main(["--output", str(output)]) == 1
    assert f"error: {output} has no rows" in capsys.readouterr().err
    assert output.read_text() == content


def test_nothing_is_compiled_for_a_directory_that_is_not_there(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.delattr(plan_exorl, "plan")
    assert plan_exorl.main(["--output", str(tmp_path / "none" / "rows.json")]) == 1
    assert f"error: {tmp_path}/none is not a directory" in capsys.readouterr().err
