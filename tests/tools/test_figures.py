"""The numbers behind the pictures, what is refused, and that each one is drawn."""

import json
import re
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from kernels.layouts import Contiguous, Striped, Zigzag
from kernels.masks import causal, full, window
from tools import figures
from tools.lib.benchmarks.peers import PEERS
from tools.lib.benchmarks.work import critical_path
from tools.lib.figures import rates, returns, work
from tools.lib.figures.lines import heat_maps
from tools.lib.figures.rates import OTHERS, Bar, bar, bars
from tools.lib.figures.returns import CONTEXTS, TARGET, colours_of, curve, curves, read
from tools.lib.figures.style import AGENTS, MODELS, PROGRAMS, write_picture
from tools.lib.figures.work import work_per_step

COMMITTED = Path(figures.__file__).parents[1] / "results/cpu"
UNSORTED = "Agentic Transformer, unsorted chains"
AGENT_FILES = [
    *(str(path) for path in sorted(COMMITTED.glob("exorl_*_??.json"))),
    f"{UNSORTED}={COMMITTED / 'exorl_cartpole_at_drawn.json'}",
]


@pytest.mark.parametrize(
    "arguments",
    [
        ["work"],
        ["rates", COMMITTED / "ringattention.json"],
        ["rates", COMMITTED / "attention_ring8.json"],
        ["lines", COMMITTED / "line_retrieval.json", "--names", "long", "short"],
        ["returns", *AGENT_FILES],
    ],
    ids=lambda arguments: Path(arguments[min(1, len(arguments) - 1)]).stem,
)
def test_committed_rows_are_drawn(arguments, tmp_path, capsys):
    output = tmp_path / ("new/results" if arguments == ["work"] else "x.png")
    assert figures.main([*map(str, arguments), "--output", str(output)]) == 0
    assert capsys.readouterr().out.endswith(f"written to {output}\n")
    (picture,) = tmp_path.rglob("*.png")
    assert matplotlib.image.imread(picture).shape[1] > 900
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("colours", [PROGRAMS, AGENTS, MODELS])
def test_no_two_have_one_colour(colours):
    assert len(set(colours.values())) == len(colours) > 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere/x.png", "nowhere is not a directory: give the path of a PNG"),
        ("folder", "folder is a directory: give the path of a PNG"),
    ],
)
def test_a_path_that_cannot_be_a_picture_is_named(tmp_path, name, said):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=said):
        write_picture(tmp_path / name, Figure())
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]


# Work of a ring.


@pytest.mark.parametrize(
    ("layout", "rows", "path"),
    [
        (
            Contiguous(),
            [[36, 0, 0, 0], [36, 64, 0, 0], [36, 64, 64, 0], [36, 64, 64, 64]],
            228,
        ),
        (Striped(), [[36, 36, 36, 36]] * 4, 144),
        (Striped(4), [[36, 36, 36, 36]] * 4, 144),
        (Zigzag(), [[36, 32, 32, 32]] * 4, 132),
    ],
    ids=str,
)
def test_causal_ring_of_4_computes_the_tiles_that_can_be_counted_by_hand(
    layout, rows, path
):
    counts = work_per_step(layout, 4, 8, causal())
    assert counts.tolist() == rows
    assert critical_path(counts) == path


def test_steps_without_a_mask_are_whole_and_those_beyond_a_window_empty():
    for layout in (Contiguous(), Striped(), Zigzag()):
        assert (work_per_step(layout, 3, 4, full()) == 16).all()
    counts = work_per_step(Contiguous(), 4, 2, window(work.TILE))
    assert counts.tolist() == [[3, 0, 0, 0]] + [[3, 1, 0, 0]] * 3


def test_work_is_printed_and_written_down(tmp_path, capsys):
    assert figures.main(["work", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for path in (228, 144, 132):
        assert f"critical path {path} tiles" in printed
    assert "bound: 128.0 tiles" in printed
    written = json.loads((tmp_path / "work_per_step.json").read_text())
    assert written["bound"] == pytest.approx(8 * 8 * 4 / 2, rel=1e-3)
    assert {
        name: (numbers["critical_path"], np.sum(numbers["tiles"]))
        for name, numbers in written["layouts"].items()
    } == {"contiguous": (228, 528), "striped": (144, 576), "zigzag": (132, 528)}


# Rates of benchmarks.

PLACE = {
    "commit": "0123456789abcdef",
    "date": "2026-11-22T01:02:03+00:00",
    "device_kind": "NVIDIA H200",
    "device_count": 1,
    "cores": 16,
}
KERNEL = PLACE | {
    "direction": "backward",
    "length": 8192,
    "head_dim": 128,
    "dtype": "bfloat16",
    "mask": "causal",
    "seconds_median": 0.004,
    "seconds_spread": 0.1,
}
FAST = KERNEL | {"contestant": "hopper", "tflops": 600.0, "peak_share": 0.61}
PEER = KERNEL | {"contestant": "cudnn", "tflops": 500.0, "peak_share": None}
TRAINING = PLACE | {
    "config": "configs/h200_1b.py",
    "overrides": ["--config.remat=nothing"],
    "context_tokens": 32768,
    "step_seconds": 1.5,
    "step_spread": 0.02,
    "tokens_per_second": 21845.3,
    "mfu": 0.456,
}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            FAST,
            Bar(
                "backward, 8,192 tokens\nmask causal, heads of 128, bfloat16",
                "hopper",
                600.0,
                "TFLOP/s",
                "4.00 ms ± 5%, 61% of peak",
                "this repository",
            ),
        ),
        (
            PEER | {"length": 16384},
            Bar(
                "backward, 16,384 tokens\nmask causal, heads of 128, bfloat16",
                "cudnn",
                500.0,
                "TFLOP/s",
                "4.00 ms ± 5%",
                "cudnn",
            ),
        ),
        (
            TRAINING,
            Bar(
                "h200_1b --config.remat=nothing",
                "32,768 tokens",
                21845.3,
                "tokens/s",
                "1.50 s ± 1%, MFU 46%",
                "this repository",
            ),
        ),
    ],
    ids=["ours", "peer", "training"],
)
def test_a_bar_is_the_rate_of_its_row(row, expected):
    assert bar(row) == expected
    assert bars([row]).get_suptitle() == (
        "Measured on 1 x NVIDIA H200, 2026-11-22, at 0123456"
    )


def test_every_program_of_others_has_a_colour():
    assert set(PEERS) < set(OTHERS)
    assert set(OTHERS.values()) < set(PROGRAMS)


@pytest.mark.parametrize(
    "rows, said",
    [
        ([], "there are no rows"),
        ([{"device_kind": "cpu"}], "a row has no 'implementation': give rows of bench"),
        ([FAST, PEER | {"device_kind": "TPU v4"}], "TPU v4.*are not comparable"),
        ([FAST, TRAINING], "TFLOP/s', 'tokens/s'.*are not comparable"),
        ([FAST | {"tflops": float("nan")}], "value of row 0 must be a number.*got nan"),
        ([FAST, FAST | {"tflops": -1.0}], "value of row 1 must be a number.*got -1.0"),
        ([FAST | {"tflops": "600"}], "value of row 0 must be a number.*got '600'"),
    ],
)
def test_rows_that_make_no_bars_are_refused(rows, said):
    with pytest.raises(ValueError, match=said):
        rates.bars(rows)


# Line retrieval.


def cells(run: str, shares: dict[tuple[int, float], float]) -> list[dict]:
    return [
        {"run": run, "length": length, "depth": depth, "generated": share}
        for (length, depth), share in shares.items()
    ]


LONG = cells("long", {(128, 0.0): 1.0, (128, 1.0): 0.95, (512, 0.0): 0.5})
SHORT = cells("short", {(128, 0.0): 0.25, (512, 1.0): 0.0})


def test_each_run_has_a_map_with_lengths_across_and_depths_down():
    long, short = heat_maps(LONG + SHORT).axes
    # The cell that has no cases stays empty.
    for axes, expected in (
        (long, {(0, 0): "100", (0, 1): "95", (1, 0): "50"}),
        (short, {(0, 0): "25", (1, 1): "0"}),
    ):
        assert {t.get_position(): t.get_text() for t in axes.texts} == expected
    shares = long.images[0].get_array()
    assert shares[0].tolist() == [1.0, 0.5] and shares[1, 0] == 0.95


@pytest.mark.parametrize(
    ("runs", "names", "titles"),
    [
        (["runs/lines/160", "runs/lines/32"], [], ["160", "32"]),
        (["runs/a/one", "runs/b/one"], [], ["runs/a/one", "runs/b/one"]),
        (["runs/lines/160", "runs/lines/32"], ["long", "short"], ["long", "short"]),
    ],
    ids=["folders", "paths", "names"],
)
def test_runs_have_names(runs, names, titles):
    first, second = (cells(run, {(128, 0.0): 1.0, (256, 0.0): 0.5}) for run in runs)
    # A run's rows need not follow each other.
    figure = heat_maps([first[0], *second, first[1]], names)
    assert [axes.get_title() for axes in figure.axes] == titles
    assert all(len(axes.texts) == 2 for axes in figure.axes)


@pytest.mark.parametrize(
    ("some", "names", "said"),
    [
        ([], [], "0 names for 0 runs .no rows.: there must be a run"),
        (LONG + SHORT, ["one"], "1 names for 2 runs .long, short.: there must be"),
        (LONG + LONG[:1], [], "long, 128 tokens, depth 0%: .* is there twice"),
        (
            cells("a", {(128, 0.5): 1.5}),
            [],
            "a, 128 tokens, depth 50%: .*more than all",
        ),
        (cells("a", {(128, 0.5): -0.5}), [], "generated of row 0 must be a number"),
        (cells("a", {(128, 0.5): None}), [], "generated of row 0 .* got None"),
        (cells("a", {("128", 0.5): 1.0}), [], "length of row 0 .* got '128'"),
    ],
)
def test_rows_that_make_no_map_are_refused(some, names, said):
    with pytest.raises(ValueError, match=said):
        heat_maps(some, names)


# Returns of agents.


def results(chain_length=4, method="transformer", order="ascending", **fields):
    own = {"returns": [[1.0, 2.0], [3.0, 6.0]], "recorded_returns": [[], []]}
    agent = {"method": method, "chain_length": chain_length}
    config = {"agent": agent, "data": {"chain_order": order}}
    whole = {"task": "walk", "target": 5.0, "config": config}
    return whole | {"contexts": {"own": own}} | fields


def test_every_line_is_in_the_legend_under_a_name():
    figure = curves(read(AGENT_FILES))
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["cartpole swingup", "walker stand"]
    for axes in figure.axes:
        shown = [text.get_text() for text in axes.get_legend().get_texts()]
        assert shown == [line.get_label() for line in axes.lines]
        assert len(shown) == len(set(shown)) and TARGET in shown
        assert not any(re.search("exorl_|_at|_bc|_dt|json", label) for label in shown)


def test_curves_are_means_and_begin_after_what_was_recorded():
    own = results()["contexts"]["own"] | {"recorded_returns": [[7, 8, 9], [7, 8, 9]]}
    episodes, low, mean, high = curve(own)
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


def test_agents_and_contexts_are_told_apart():
    found = colours_of(["mine", "behaviour cloning", "yours"])
    assert len(set(found.values())) == len(found) == len(AGENTS) + 2
    with pytest.raises(ValueError, match="4 agents of other names, at most 3"):
        colours_of(list("abcd"))
    words, looks = zip(*CONTEXTS.values(), strict=True)
    assert len(set(words)) == len(set(looks)) == len(CONTEXTS)


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
            r"1\.json, walk: agents have targets [56]\.0 and [56]\.0; draw",
        ),
    ],
)
def test_results_that_make_no_picture_are_refused(contents, said, tmp_path):
    paths = [tmp_path / f"{number}.json" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=said):
        returns.read([str(path) for path in paths])
