"""Returns of agents, drawn: what is named, what is coloured, what is refused."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tools import plot_exorl
from tools.lib.picture import AGENTS
from tools.plot_exorl import CONTEXTS, TARGET, colours_of, curve, draw, main, read

COMMITTED = Path(plot_exorl.__file__).parents[1] / "results/cpu"
UNSORTED = "Agentic Transformer, unsorted chains"
ALL = [
    *(str(path) for path in sorted(COMMITTED.glob("exorl_*_??.json"))),
    f"{UNSORTED}={COMMITTED / 'exorl_cartpole_at_drawn.json'}",
]


def results(chain_length=4, method="transformer", order="ascending", **fields):
    seen = {"returns": [[1.0, 2.0], [3.0, 6.0]], "recorded_returns": [[], []]}
    agent = {"method": method, "chain_length": chain_length}
    config = {"agent": agent, "data": {"chain_order": order}}
    whole = {"task": "walk", "target": 5.0, "config": config}
    return whole | {"contexts": {"own": seen}} | fields


def test_every_line_is_in_the_legend_under_a_name():
    figure = draw(read(ALL))
    assert len(figure.axes) == 2 and figure.get_suptitle()
    assert [axes.get_title() for axes in figure.axes] == [
        "cartpole swingup",
        "walker stand",
    ]
    for axes in figure.axes:
        shown = [text.get_text() for text in axes.get_legend().get_texts()]
        assert shown == [line.get_label() for line in axes.lines]
        assert len(shown) == len(set(shown)) and TARGET in shown
        assert not any(re.search("exorl_|_at|_bc|_dt|json", label) for label in shown)


def test_an_agent_has_one_colour_in_all_panels():
    found: dict[str, set[str]] = {}
    for axes in draw(read(ALL)).axes:
        for line in axes.lines:
            whole = line.get_label()
            names = [name for name in AGENTS if whole.startswith(name)]
            if names:
                found.setdefault(max(names, key=len), set()).add(line.get_color())
    assert found == {name: {colour} for name, colour in AGENTS.items()}


def test_curves_are_means_and_begin_after_what_was_recorded():
    seen = results()["contexts"]["own"] | {"recorded_returns": [[7, 8, 9], [7, 8, 9]]}
    episodes, low, mean, high = curve(seen)
    assert episodes.tolist() == [4, 5] and mean.tolist() == [2, 4]
    assert (low <= mean).all() and (mean <= high).all()


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "Agentic Transformer"),
        ({"order": "drawn"}, UNSORTED),
        ({"chain_length": 1}, "Decision Transformer"),
        ({"chain_length": 1, "method": "perceptron"}, "behaviour cloning"),
    ],
)
def test_agents_are_called_by_their_configs(fields, name, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(results(**fields)))
    assert list(read([str(path)])["walk"]) == [name]
    assert list(read([f"mine={path}"])["walk"]) == ["mine"]


def test_other_names_get_colours_that_no_agent_has():
    found = colours_of(["mine", "behaviour cloning", "yours"])
    assert len(set(found.values())) == len(found) == len(AGENTS) + 2
    with pytest.raises(ValueError, match="4 agents of other names, at most 3"):
        colours_of(list("abcd"))


EMPTY = {"own": {"returns": [], "recorded_returns": [[]]}}
NAN = {"own": {"returns": [[np.nan]], "recorded_returns": [[]]}}
RAGGED = {"own": {"returns": [[1, 2], [3]], "recorded_returns": [[]]}}


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        ([""], r"0\.json holds no results .*JSONDecodeError"),
        (["7"], r"0\.json holds no results .*TypeError"),
        ([results(contexts=EMPTY)], r"returns of shape \(0,\) must be finite"),
        ([results(contexts=NAN)], r"returns of shape \(1, 1\) must be finite"),
        ([results(contexts=RAGGED)], r"0\.json holds no results .*ValueError"),
        ([results(contexts={"dream": 7})], r"0\.json holds no results"),
        ([{"task": "walk"}], r"0\.json holds no results .*'config'"),
        ([results(), results()], r"1\.json, walk: Agentic .* is there already; draw"),
        (
            [results(), results(chain_length=1, target=6.0)],
            r"1\.json, walk: agents are told to reach [56]\.0 and [56]\.0; draw",
        ),
    ],
)
def test_results_that_make_no_picture_are_refused(contents, said, tmp_path, capsys):
    paths = [tmp_path / f"{number}.json" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    picture = tmp_path / "x.png"
    assert main([*map(str, paths), "--output", str(picture)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(said, line), line
    assert sorted(tmp_path.iterdir()) == paths


def test_contexts_look_differently():
    words, looks = zip(*CONTEXTS.values(), strict=True)
    assert len(set(words)) == len(set(looks)) == len(CONTEXTS)
