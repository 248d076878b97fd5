"""The numbers behind pictures, and what is refused."""

import json
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from tests.cases import pairs, table
from tools import figures
from tools.figures import bounds, last_over, returns
from tools.lib.exorl.results import agent, read_returns
from tools.lib.exorl.scores import interval

COMMITTED = Path(figures.__file__).parents[1] / "results/cpu"


def test_committed_rows_are_drawn(tmp_path, capsys):
    rows = sorted(map(str, COMMITTED.glob("icrl_dark_room_9x9_dpt*.json")))
    output = tmp_path / "x.png"
    assert figures.main(["returns", *rows, "--output", str(output)]) == 0
    assert matplotlib.image.imread(output).shape[1] > 800
    assert capsys.readouterr().out.endswith(f"written to {output}\n")
    assert list(tmp_path.iterdir()) == [output]


def results(returns, seed=0, data=(), agent=(), model=(), contexts=(), **fields):
    """Returns results of `evaluate exorl`: an agent in worlds, by what it has read."""
    made = {"method": "transformer", "chain_length": 4} | dict(agent)
    kept = {"chain_order": "drawn", "predict": "targets"} | dict(data)
    played = {"own": returns} | dict(contexts)
    outcomes = {
        name: {"returns": found, "recorded_returns": [[0] * (name == "other")]}
        for name, found in played.items()
    }
    config = {"agent": made, "data": kept, "model": dict(model), "seed": seed}
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
    more["references"]["tabular"] = [1.0]  # of its one episode
    tasks = read(tmp_path, one, two, more)
    ((name, runs),) = tasks["walk"].items()
    # Of worlds 2 and 7 in seeds 0 and 1: 4 and 1, 4 and 2; 7 and 9, 6 and 5.
    low, mean, high = bounds(runs, "own")
    assert mean.tolist() == [2.75, 6.75]
    found = interval(np.array([[4.0, 1.0], [4.0, 2.0]]))
    assert (low[0], high[0]) == (found["low"], found["high"])
    # The last above the first: 3 and 8 in seed 0, 2 and 3 in seed 1.
    over = last_over(runs)
    assert over["its first"]["mean"] == over["the best before"]["mean"] == 4.0
    assert over["its first"] == interval(np.array([[3.0, 8.0], [2.0, 3.0]]))
    left, right = returns(tasks).axes
    lines = {line.get_label(): line for line in left.lines}
    own = lines[f"{name}, own episodes before"].get_xydata()
    assert own.tolist() == [[1, 2.75], [2, 6.75]]
    assert lines["Q-learning from scratch"].get_ydata()[-1] == 2
    levels = {text.get_text(): text.get_position()[1] for text in left.texts}
    assert levels == {"knows the world": 20, "random actions": 0.5}
    assert right.lines[0].get_xydata().tolist() == [[4, 5], [10, 8]]
    assert right.get_xticks().tolist() == [4, 10]
    assert left.get_xlim()[0] == 0.5
    (legend,) = left.figure.legends
    words = [text.get_text() for text in legend.get_texts()]
    assert words == [name, "own episodes before", "Q-learning from scratch"]


def test_of_one_world_intervals_are_of_its_rows(tmp_path):
    """Also with one seed; and words lie neither on others nor on a power of ten."""
    drawn = {"random_1": [[8.0], [9.0], [8.5]], "random_16": [[9.0]] * 3}
    made = {"worlds": [7] * 3, "references": {}, "target": 9.5}
    rows = [[8.0, 9.0], [8.5, 8.0], [9.0, 9.5]]
    one = results(rows, contexts=drawn, **made)
    tasks = read(tmp_path, one)
    ((_, runs),) = tasks["walk"].items()
    low, mean, high = bounds(runs, "own")
    found = interval(np.array([8.0, 8.5, 9.0]))
    assert (low[0], mean[0], high[0]) == (found["low"], 8.5, found["high"])
    assert low[0] < 8.2 and high[0] > 8.8
    over = last_over(runs)
    found = interval(np.array([1.0, -0.5, 0.5]))
    assert over["its first"] == over["the best before"] == found
    figure = returns(tasks)
    figure.canvas.draw()
    for axes in figure.axes:
        (level,) = axes.texts
        assert not level.get_window_extent().overlaps(axes.title.get_window_extent())
        first, last = axes.get_xlim()
        ticks = {tick.get_position()[0]: tick for tick in axes.get_xticklabels()}
        shown = [tick.get_text() for x, tick in ticks.items() if first <= x <= last]
        assert len(shown) > 1 and all(text.isdigit() for text in shown)
    # What is below 0 is shown too.
    below = results((-np.array(rows)).tolist(), **made | {"target": -1.0})
    low, high = returns(read(tmp_path, below)).axes[0].get_ylim()
    assert low < -9.5 and high > 0
    with pytest.raises(ValueError, match="episodes, .*, 2 worlds or rows.* 3 w"):
        read(tmp_path, one, results(rows[:2], 1, **made | {"worlds": [7] * 2}))


def test_a_summary_makes_the_same_numbers_without_rows(tmp_path, capsys):
    """Means of worlds in the place of rows, and the best of each row's episodes."""
    rows = [[1.0, 9.0, 4.0], [3.0, 7.0, 8.0], [5.0, 1.0, 6.0]]
    others = {"other": [[2.0], [4.0], [6.0]]}
    for worlds in [7, 2, 2], [7, 7, 7]:
        made = {"worlds": worlds, "seeds": [[1, 2, 3]] * 3}
        whole = tmp_path / "rows.json"
        whole.write_text(json.dumps(results(rows, contexts=others, **made)))
        short = tmp_path / "short.json"
        command = ["summary", str(whole), "--output", str(short)]
        assert figures.main(command) == 0
        written = json.loads(short.read_text())
        assert "seeds" not in written
        groups = 2 if worlds == [7, 2, 2] else 3
        assert len(written["contexts"]["own"]["returns"]) == groups
        assert figures.table(read_returns([short])) == figures.table(
            read_returns([whole])
        )
        again = tmp_path / "again.json"
        assert figures.main(["summary", str(short), "--output", str(again)]) == 0
        assert again.read_text() == short.read_text()
    other = tmp_path / "other.json"
    other.write_text(json.dumps(results(rows, 1, contexts=others, worlds=[7] * 3)))
    capsys.readouterr()
    assert figures.main(["summary", str(whole), str(other), "--output", "x"]) != 0
    assert "a summary is of one file, got 2" in capsys.readouterr().err


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
