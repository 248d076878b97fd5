"""The numbers behind pictures and the papers' tables, and what is refused."""

import json
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from tests.cases import pairs, table
from tools import figures, paper_tables
from tools.lib.exorl.scores import interval
from tools.lib.figures.curves import agent, bounds, read_returns, returns

COMMITTED = Path(figures.__file__).parents[1] / "results/cpu"


def test_committed_rows_are_drawn(tmp_path, capsys):
    rows = sorted(map(str, COMMITTED.glob("icrl_dark_room_9x9_dpt*.json")))
    output = tmp_path / "x.png"
    assert figures.main(["returns", *rows, "--output", str(output)]) == 0
    assert matplotlib.image.imread(output).shape[1] > 800
    assert capsys.readouterr().out.endswith(f"written to {output}\n")
    assert list(tmp_path.iterdir()) == [output]


def results(returns, seed=0, data=(), agent=(), contexts=(), **fields):
    """Returns results of `evaluate exorl`: an agent in worlds, by what it has read."""
    made = {"method": "transformer", "chain_length": 4} | dict(agent)
    kept = {"chain_order": "drawn", "predict": "targets"} | dict(data)
    played = {"own": returns} | dict(contexts)
    outcomes = {
        name: {"returns": found, "recorded_returns": [[0] * (name == "other")]}
        for name, found in played.items()
    }
    config = {"agent": made, "data": kept, "seed": seed}
    whole = {"task": "walk", "target": 5.0, "config": config, "contexts": outcomes}
    known = {"oracle": 20.0, "random": 0.5, "tabular": [1.0, 2.0]}
    return whole | {"references": known} | fields


@pytest.mark.parametrize("fields, name", table("runs.txt", "called"))
def test_agents_are_called_by_their_configs(fields, name):
    assert agent(results([[1.0]], **fields)) == name


def read(directory, *contents):
    paths = [directory / f"{number}.json" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_returns(paths)


def test_seeds_make_one_curve_and_rows_of_one_world_one_value(tmp_path):
    """Rows of one world are not independent: each world is one value of the mean."""
    drawn = {"random_10": [[8.0]] * 3, "random_4": [[5.0]] * 3}
    one = results([[1.0, 9.0], [3.0, 7.0], [5.0, 7.0]], 0, worlds=[7, 2, 2])
    two = results([[2.0, 5.0], [4.0, 5.0], [4.0, 7.0]], 1, worlds=[7, 2, 2])
    more = results([[0.0]], 1, contexts=drawn, worlds=[7, 2, 2])
    del more["contexts"]["own"]
    tasks = read(tmp_path, one, two, more)
    ((name, runs),) = tasks["walk"].items()
    # Of worlds 2 and 7 in seeds 0 and 1: 4 and 1, 4 and 2; 7 and 9, 6 and 5.
    low, mean, high = bounds(runs, "own")
    assert mean.tolist() == [2.75, 6.75]
    found = interval(np.array([[4.0, 1.0], [4.0, 2.0]]))
    assert (low[0], high[0]) == (found["low"], found["high"])
    left, right = returns(tasks).axes
    lines = {line.get_label(): line for line in left.lines}
    own = lines[f"{name}, own episodes before"].get_xydata()
    assert own.tolist() == [[1, 2.75], [2, 6.75]]
    assert lines["Q-learning from scratch"].get_ydata()[-1] == 2
    levels = {text.get_text(): text.get_position()[1] for text in left.texts}
    assert levels == {"knows the world": 20, "random actions": 0.5}
    assert right.lines[0].get_xydata().tolist() == [[4, 5], [10, 8]]


DIGESTS = {"trajectories": "a", "parameters": "b"}


@pytest.mark.parametrize(("case", "said"), pairs("agent_results.txt"))
def test_results_that_make_no_picture_are_refused(case, said, tmp_path):
    contents = [
        results(**({"returns": [[1.0]], "digests": DIGESTS} | each))
        if isinstance(each, dict)
        else each
        for each in json.loads(case)
    ]
    with pytest.raises(ValueError) as error:
        read(tmp_path, *contents)
    assert all(part in str(error.value) for part in said.split(" | "))


# The papers' tables: formulas against numbers by hand, rows of compiled steps.

ROW = {
    "memory": {"peak": 30, "capacity": 40, "host": 2**31, "spare_share": 0.25},
    "transfers": {"hidden_bytes": 300.0, "exposed_bytes": 100.0},
    "estimate": {"mfu": 0.6},
    "compile_seconds": 7.0,
    "environment": {"commit": "abc"},
}
TIGHT = ROW["memory"] | {"spare_share": 0.04}
CONTEXTS = "tpu/contexts"
KEPT = {"7b_v3_nothing": ROW, "7b_v3_offload": ROW | {"memory": TIGHT}}


def test_smallest_blocks_are_those_of_table_2():
    """To the digits that the paper gives, where it gives the rates that it used."""
    rows = {row["chip"]: row for row in paper_tables.table_2()}
    for name in ("A100 80GB", "A100 over InfiniBand", "TPU v4"):
        found = [rows[name][column] / 1024 for column in ("block", "sequence")]
        assert found == pytest.approx(rows[name]["paper"], rel=0.05)
    v4 = rows["TPU v4 (one link)"]
    assert v4["block"] == pytest.approx(275e12 / 45e9)
    assert v4["sequence"] == 6 * v4["block"]
    assert paper_tables.dataset_flops("7b", 4096) == 1  # its hidden size is 4096
    found = paper_tables.dataset_flops("7b", 32768)
    assert found == (6 * 4096 + 32768) / (7 * 4096)


@pytest.mark.parametrize("ring, limit", [(2, 1.5), (4, 1.75), (8, 1.875)])
def test_striping_gains_less_than_in_attention_alone(ring, limit):
    """With a context so long that nothing else counts, and one tile a device."""
    model = paper_tables._model("1b")
    step, attention = paper_tables.largest_speed_ups(model, ring, ring << 24)
    assert attention == limit and step == pytest.approx(limit, rel=1e-3)
    one_tile = paper_tables.TILE * ring
    assert paper_tables.largest_speed_ups(model, ring, one_tile)[0] == 1


def test_tables_are_printed_and_written(tmp_path, capsys):
    (tmp_path / CONTEXTS).mkdir(parents=True)
    for name, content in KEPT.items():
        (tmp_path / CONTEXTS / f"{name}.json").write_text(json.dumps(content))
    paper_tables.main(["--output", str(tmp_path)])
    text = capsys.readouterr().out
    row = "       2   75.0%          60%"
    ends = [x.partition(row)[2] for x in text.splitlines() if row in x]
    assert ends == ["", "  < 5 % spare"]  # of the tight one
    tables, _, _ = text.partition("not compiled")
    assert max(map(len, tables.splitlines())) <= 100
    assert f"--output={tmp_path}/tpu/contexts/13b_v3_nothing.json\n" in text
    assert (tmp_path / "paper_tables.txt").read_text() == text
    assert text.count("not compiled: ") == 14


@pytest.mark.parametrize(
    "content", ["", "7", "{}", '{"rows": [7]}', '{"rows": [{"ring": 4}]}']
)
def test_files_of_something_else_are_named_and_nothing_is_written(
    content, tmp_path, capsys
):
    path = tmp_path / CONTEXTS / "7b_v3_nothing.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert paper_tables.main(["--output", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {path} holds nothing that was compiled here (")
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path]
