"""The numbers behind the pictures, what is refused, and that each one is drawn."""

import json
from functools import partial
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from kernels.layouts import Striped
from kernels.masks import causal
from tools import figures
from tools.lib.exorl.scores import interval
from tools.lib.figures import work, world_table, worlds
from tools.lib.figures.lines import heat_maps
from tools.lib.figures.rates import bars
from tools.lib.figures.returns import CONTEXTS, colours_of, curve, read
from tools.lib.figures.style import AGENTS, write_picture
from tools.lib.figures.work import work_per_step

COMMITTED = Path(figures.__file__).parents[1] / "results/cpu"
UNSORTED = "Agentic Transformer, unsorted chains"
AGENT_FILES = [
    *(str(path) for path in sorted(COMMITTED.glob("exorl_*_??.json"))),
    f"{UNSORTED}={COMMITTED / 'exorl_cartpole_at_drawn.json'}",
]


def draw(output, *arguments):
    """Runs the program, which must leave one whole picture in the folder of output."""
    assert figures.main([*map(str, arguments), "--output", str(output)]) == 0
    (picture,) = output.parent.rglob("*.png")
    assert matplotlib.image.imread(picture).shape[1] > 900
    assert not list(output.parent.rglob("*.part"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["rates", COMMITTED / "ringattention.json"],
        ["rates", COMMITTED / "attention_ring8.json"],
        ["lines", COMMITTED / "line_retrieval.json", "--names", "long", "short"],
        ["returns", *AGENT_FILES],
    ],
    ids=lambda arguments: Path(arguments[1]).stem,
)
def test_committed_rows_are_drawn(arguments, tmp_path, capsys):
    draw(tmp_path / "x.png", *arguments)
    assert capsys.readouterr().out == f"written to {tmp_path / 'x.png'}\n"


# Work of a ring.


@pytest.mark.parametrize(
    ("name", "said"), [("nowhere/x.png", "nowhere is not"), ("folder", "folder is")]
)
def test_a_path_that_cannot_be_a_picture_is_named(tmp_path, name, said):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=f"{said} a directory: give the path of a PNG"):
        write_picture(tmp_path / name, Figure())
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]


BY_HAND = {
    "contiguous": (
        228,
        [[36, 0, 0, 0], [36, 64, 0, 0], [36, 64, 64, 0], [36, 64, 64, 64]],
    ),
    "striped": (144, [[36, 36, 36, 36]] * 4),
    "zigzag": (132, [[36, 32, 32, 32]] * 4),
}


def test_causal_ring_of_4_computes_the_tiles_that_can_be_counted_by_hand(
    tmp_path, capsys
):
    output = tmp_path / "new/results"
    draw(output, "work")
    printed = capsys.readouterr().out
    assert "bound: 128.0 tiles" in printed
    assert printed.endswith(f"written to {output}\n")
    written = json.loads((output / "work_per_step.json").read_text())
    assert written["bound"] == pytest.approx(8 * 8 * 4 / 2, rel=1e-3)
    for name, (path, tiles) in BY_HAND.items():
        assert written["layouts"][name] == {"critical_path": path, "tiles": tiles}
        assert f"critical path {path} tiles" in printed
    striped = work_per_step(Striped(4), 4, 8, causal())
    assert striped.tolist() == BY_HAND["striped"][1]
    title, *_ = work.grids({"striped": striped}, 128.0, 8).texts
    assert title.get_text().startswith("Causal attention on a ring of 4: tiles of sco")


# Rates of benchmarks.

PLACE = {"commit": "0123456789abcdef", "date": "2026-11-22T01:02:03+00:00"}
PLACE |= {"device_kind": "NVIDIA H200", "device_count": 1, "cores": 16}
KERNEL = PLACE | {"direction": "backward", "length": 8192, "head_dim": 128}
KERNEL |= {"dtype": "bfloat16", "mask": "causal"}
KERNEL |= {"seconds_median": 0.004, "seconds_spread": 0.1}
FAST = KERNEL | {"contestant": "hopper", "tflops": 600.0, "peak_share": 0.61}
PEER = KERNEL | {"contestant": "cudnn", "tflops": 500.0, "peak_share": None}
TRAINING = PLACE | {"config": "configs/h200_1b.py", "context_tokens": 32768}
TRAINING |= {"overrides": ["--config.remat=nothing"], "tokens_per_second": 21845.3}
TRAINING |= {"step_seconds": 1.5, "step_spread": 0.02, "mfu": 0.456}


# Line retrieval.


def cells(run: str, shares: dict[tuple[int, float], float]) -> list[dict]:
    return [
        {"run": run, "length": length, "depth": depth, "generated": share}
        for (length, depth), share in shares.items()
    ]


LONG = cells("long", {(128, 0.0): 1.0, (128, 1.0): 0.95, (512, 0.0): 0.5})
SHORT = cells("short", {(128, 0.0): 0.25, (512, 1.0): 0.0})


with_one_name = partial(heat_maps, names=["one"])


@pytest.mark.parametrize(
    ("picture_of", "rows", "said"),
    [
        (bars, [], "there are no rows"),
        (bars, [{"device_kind": "cpu"}], "row has no 'implementation': give rows of b"),
        (bars, [FAST, PEER | {"device_kind": "TPU v4"}], "TPU v4.* not comparable"),
        (bars, [FAST, TRAINING], "TFLOP/s', 'tokens/s'.*are not comparable"),
        (bars, [FAST | {"tflops": np.nan}], "value of row 0 must be a number.*got nan"),
        (bars, [FAST, FAST | {"tflops": -1.0}], "value of row 1 must be .*got -1.0"),
        (bars, [FAST | {"tflops": "600"}], "value of row 0 must be a number.*'600'"),
        (heat_maps, [], "0 names for 0 runs .no rows.: there must be a run"),
        (with_one_name, LONG + SHORT, "1 names for 2 runs .long, short.: there must"),
        (heat_maps, LONG + LONG[:1], "long, 128 tokens, depth 0%: .* is there twice"),
        (heat_maps, cells("a", {(128, 0.5): 1.5}), "a, 128 tok.* 50%: .*more than all"),
        (heat_maps, cells("a", {(128, 0.5): -0.5}), "generated of row 0 must be a num"),
        (heat_maps, cells("a", {(128, 0.5): None}), "generated of row 0 .* got None"),
        (heat_maps, cells("a", {("128", 0.5): 1.0}), "length of row 0 .* got '128'"),
    ],
)
def test_rows_that_make_no_picture_are_refused(picture_of, rows, said):
    with pytest.raises(ValueError, match=said):
        picture_of(rows)


# Returns of agents.


def own(returns, recorded=()):
    return {"own": {"returns": returns, "recorded_returns": [list(recorded)]}}


def results(chain_length=4, method="transformer", order="ascending", **fields):
    agent = {"method": method, "chain_length": chain_length}
    config = {"agent": agent, "data": {"chain_order": order}}
    whole = {"task": "walk", "target": 5.0, "config": config}
    return whole | {"contexts": own([[1.0, 2.0], [3.0, 6.0]])} | fields


def test_curves_are_means_and_begin_after_what_was_recorded():
    outcome = own([[1.0, 2.0], [3.0, 6.0]], recorded=(7, 8, 9))["own"]
    episodes, low, mean, high = curve(outcome)
    assert episodes.tolist() == [4, 5] and mean.tolist() == [2, 4]
    assert (low <= mean).all() and (mean <= high).all()


AGENTS_BY_CONFIG = {
    "Algorithm Distillation": {"order": "learnt"},
    "Agentic Transformer": {},
    UNSORTED: {"order": "drawn"},
    "Decision Transformer": {"chain_length": 1},
    "behaviour cloning": {"chain_length": 1, "method": "perceptron"},
}


@pytest.mark.parametrize("name", AGENTS_BY_CONFIG)
def test_agents_are_called_by_their_configs(name, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(results(**AGENTS_BY_CONFIG[name])))
    assert list(read([str(path)])["walk"]) == [name]
    assert list(read([f"mine={path}"])["walk"]) == ["mine"]


def test_agents_and_contexts_are_told_apart():
    found = colours_of(["mine", "behaviour cloning", "yours"])
    assert len(set(found.values())) == len(found) == len(AGENTS) + 2
    with pytest.raises(ValueError, match="4 agents of other names, at most 3"):
        colours_of(list("abcd"))
    words, looks = zip(*CONTEXTS.values(), strict=True)
    assert len(set(words)) == len(set(looks)) == len(CONTEXTS)


NO_RESULTS = r"0\.json holds no results "


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        ([""], NO_RESULTS + ".*JSONDecodeError"),
        (["7"], NO_RESULTS + ".*TypeError"),
        ([results(contexts=own([]))], r"returns of shape \(0,\) must be finite"),
        ([results(contexts=own([[np.nan]]))], r"of shape \(1, 1\) must be finite"),
        ([results(contexts=own([[1, 2], [3]]))], NO_RESULTS + ".*ValueError"),
        ([results(contexts={"dream": 7})], NO_RESULTS),
        ([results(contexts={"none": 7})], NO_RESULTS + ".*use `tools.figures worlds`"),
        ([{"task": "walk"}], NO_RESULTS + ".*'config'"),
        ([results(), results()], r"1\.json, walk: Agentic .* is there already; draw"),
        (
            [results(), results(chain_length=1, target=6.0)],
            r"1\.json, walk: agents have targets [56]\.0 and [56]\.0; draw",
        ),
    ],
)
def test_results_that_make_no_picture_are_refused(contents, said, tmp_path):
    paths = [tmp_path / f"{number}.json" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=said):
        read([str(path) for path in paths])


def in_worlds(returns, seed=0, **contexts):
    """What `evaluate exorl` writes of an agent in many worlds."""
    contexts = {name: outcome["own"] for name, outcome in contexts.items()}
    known = {"oracle": 20.0, "random": 0.5, "tabular": [1.0, 2.0]}
    whole = results(contexts=own(returns) | contexts, references=known)
    whole["config"] = whole["config"] | {"seed": seed}
    whole["config"]["data"] = {"chain_order": "drawn", "predict": "targets"}
    return whole


def written(directory, *contents):
    paths = [directory / f"{number}.json" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_text(json.dumps(content))
    return paths


def test_runs_of_several_seeds_make_one_curve(tmp_path):
    read_before = {"random_10": own([[8.0], [9.0]]), "random_4": own([[5.0], [6.0]])}
    one = in_worlds([[1.0, 9.0], [3.0, 7.0]], 0, **read_before)
    two = in_worlds([[2.0, 5.0], [4.0, 5.0]], 1, **read_before)
    tasks = worlds.read(written(tmp_path, one, two))
    figure = worlds.curves(tasks)
    left, right = figure.axes
    lines = {line.get_label(): line for line in left.lines}
    name = "Decision-Pretrained Transformer"
    assert "own episodes before" in lines  # the look of its line
    drawn = left.lines[1]  # behind the one that names its colour
    assert drawn.get_color() == lines[name].get_color()
    assert drawn.get_xydata().tolist() == [[1, 2.5], [2, 6.5]]
    levels = {text.get_text(): text.get_position()[1] for text in left.texts}
    assert levels["knows the world"] == 20 and len(levels) == 2
    shown = [x for x in left.lines if not x.get_label().startswith("_")]
    assert len({(x.get_linestyle(), x.get_color()) for x in shown}) == len(shown)
    assert lines["Q-learning from nothing"].get_ydata()[-1] == 2
    by_length = {line.get_label(): line for line in right.lines}[name]
    assert by_length.get_xydata().tolist() == [[4, 5.5], [10, 8.5]]


def test_numbers_are_those_of_the_picture_and_differences_row_by_row(tmp_path):
    played = np.array([[[1.0, 9.0], [3.0, 7.0]], [[2.0, 5.0], [4.0, 5.0]]])
    rows = []
    for seed, returns in enumerate(played):
        other = {"own": own([[4.0], [1.0]])["own"] | {"recorded_returns": [[0], [0]]}}
        rows.append(in_worlds(returns.tolist(), seed, other=other))
    text = world_table.table(worlds.read(written(tmp_path, *rows)))
    lines = [line.strip("| ").split(" | ") for line in text.splitlines()]
    cells = {words.rpartition("seeds, ")[2]: rest for words, *rest in lines}
    assert lines[0] == ["walk", "1", "2"]

    def cell(values):
        return "{mean:.1f} ({low:.1f} to {high:.1f})".format(**interval(values))

    assert cells["own episodes before"] == [cell(played[..., n]) for n in (0, 1)]
    gained = cell(played[..., 1] - played[..., 0])
    assert cells["own above the first"] == ["0.0 (0.0 to 0.0)", gained]
    above = cell(played[..., 1] - [4.0, 1.0])
    assert cells["own above own of another world before"] == ["", above]
    assert cells["knows the world"][-1] == "20.0"


def test_rows_of_one_world_are_one(tmp_path):
    """Means and intervals are those of worlds, whose rows are not independent."""
    run = in_worlds([[1.0], [3.0], [8.0], [2.0]]) | {"worlds": [7, 7, 5, 7]}
    (runs,) = worlds.read(written(tmp_path, run))["walk"].values()
    assert worlds.returns_of(runs, "own").tolist() == [[[8], [2]]]


def test_contexts_of_one_run_may_be_in_files_of_their_own(tmp_path):
    one, two = in_worlds([[1.0]]), in_worlds([[2.0]], random_4=own([[5.0]]))
    del two["contexts"]["own"]
    (run,) = worlds.read(written(tmp_path, one, two))["walk"].popitem()[1]
    assert list(run["contexts"]) == ["own", "random_4"]


def test_settings_of_older_programs_are_todays_defaults(tmp_path):
    old, new = in_worlds([[1.0]]), in_worlds([[3.0]], 1)
    new["config"]["data"]["latest_begin"] = 0.0
    (runs,) = worlds.read(written(tmp_path, old, new))["walk"].values()
    assert len(runs) == 2
    new["config"]["data"]["latest_begin"] = 0.8
    with pytest.raises(ValueError, match=r"latest_begin is 0\.8, in another file 0\.0"):
        worlds.read(written(tmp_path, old, new))


def test_worlds_that_make_no_picture_are_refused(tmp_path):
    same = in_worlds([[1.0]]), in_worlds([[2.0]])
    with pytest.raises(
        ValueError, match=r"1\.json: Decision-P.* seed 0 in walk has own"
    ):
        worlds.read(written(tmp_path, *same))
    trained = in_worlds([[1.0]]) | {"trained_on": True}
    longer, elsewhere = in_worlds([[1.0, 2.0]], 1), in_worlds([[1.0]], 1)
    elsewhere["worlds"] = [3]
    agent_elsewhere = in_worlds([[1.0]], 1)
    agent_elsewhere["worlds"], agent_elsewhere["config"]["data"] = (
        [3],
        {"chain_order": "learnt"},
    )
    narrow = in_worlds([[1.0]], 1)
    narrow["config"]["model"] = {"hidden_size": 8}
    digests = {"trajectories": "a", "parameters": "b"}
    one, two = (in_worlds([[1.0]], seed) | {"digests": digests} for seed in (0, 1))
    again = in_worlds([[1.0]], random_4=own([[5.0]]))
    del again["contexts"]["own"]
    for files, said in (
        ((same[0], agent_elsewhere), "its worlds are not those of the other files"),
        ((same[0], narrow), r"model\.hidden_size is 8, in another file \d+"),
        ((same[0], in_worlds([[1.0]], 1) | {"step": 7}), "step is 7, in another file"),
        (
            (same[0], in_worlds([[1.0]], 1) | {"temperature": 2.0}),
            r"'own' is 0 \+ 1 episodes, temperature 2.0 held for 1, win.* 1.0 h",
        ),
        (
            (one, two | {"digests": digests | {"trajectories": "c"}}),
            "its trajectories are not those of another file",
        ),
        (
            (one, again | {"digests": digests | {"parameters": "c"}}),
            "its parameters are not those of another file",
        ),
        ((trained,), "its worlds were trained on: leave out --trained"),
        ((same[0], longer), r"'own' is 0 \+ 2 episodes, .* file 0 \+ 1 ep"),
        ((same[0], elsewhere), "its worlds are not those of the other files"),
    ):
        with pytest.raises(ValueError, match=said):
            worlds.read(written(tmp_path, *files))
    with pytest.raises(ValueError, match=r"0\.json holds no results .*KeyError"):
        worlds.read(written(tmp_path, results()))
