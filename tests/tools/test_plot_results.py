import json
from pathlib import Path

import matplotlib.image
import pytest

from tools import plot_results
from tools.lib.benchmarks.peers import PEERS as OTHER_PROGRAMS
from tools.lib.picture import PROGRAMS
from tools.plot_results import OTHERS, draw, main

COMMITTED = Path(plot_results.__file__).parents[1] / "results/cpu"
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
PEERS = KERNEL | {"contestant": "cudnn", "tflops": 500.0, "peak_share": None}
TRAINING = PLACE | {
    "config": "configs/h200_1b.py",
    "overrides": ["--config.remat=nothing"],
    "context_tokens": 32768,
    "step_seconds": 1.5,
    "step_spread": 0.02,
    "tokens_per_second": 21845.3,
    "mfu": 0.456,
}


def panels(rows):
    return [axes for axes in draw(rows).axes if axes.get_visible()]


def test_a_bar_is_the_rate_of_its_row():
    (axes,) = panels([FAST, PEERS])
    assert axes.get_title() == (
        "backward, 8,192 tokens\nmask causal, heads of 128, bfloat16"
    )
    assert [bar.get_width() for bar in axes.patches] == [600, 500]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["hopper", "cudnn"]
    notes = [text.get_text() for text in axes.texts]
    assert notes == ["4.00 ms ± 5%, 61% of peak", "4.00 ms ± 5%"]
    colours = [bar.get_facecolor() for bar in axes.patches]
    shown = ["this repository", "cudnn"]
    assert colours == [matplotlib.colors.to_rgba(PROGRAMS[name]) for name in shown]
    (legend,) = draw([FAST, PEERS]).legends
    assert [text.get_text() for text in legend.get_texts()] == shown
    title = draw([FAST]).get_suptitle()
    assert title == "Measured on 1 x NVIDIA H200, 2026-11-22, at 0123456"


def test_every_program_of_others_has_a_colour():
    assert set(OTHER_PROGRAMS) < set(OTHERS)
    assert set(OTHERS.values()) < set(PROGRAMS)


def test_each_problem_has_a_panel():
    rows = [FAST, FAST | {"direction": "forward"}, PEERS, FAST | {"length": 16384}]
    assert [len(axes.patches) for axes in panels(rows)] == [2, 1, 1]


def test_training_is_drawn_as_tokens_per_second():
    longer = TRAINING | {"context_tokens": 131072, "mfu": None}
    (axes,) = panels([TRAINING, longer])
    assert axes.get_title() == "h200_1b --config.remat=nothing"
    assert axes.get_xlabel() == "tokens/s"
    assert [bar.get_width() for bar in axes.patches] == [21845.3, 21845.3]
    notes = [text.get_text() for text in axes.texts]
    assert notes == ["1.50 s ± 1%, MFU 46%", "1.50 s ± 1%"]


@pytest.mark.parametrize("name", ["ringattention.json", "attention_ring8.json"])
def test_committed_rows_are_drawn(name, tmp_path, capsys):
    output = tmp_path / "rows.png"
    assert main([str(COMMITTED / name), "--output", str(output)]) == 0
    assert capsys.readouterr().out == f"written to {output}\n"
    assert matplotlib.image.imread(output).shape[1] > 900
    assert [path.name for path in tmp_path.iterdir()] == ["rows.png"]
    rows = json.loads((COMMITTED / name).read_text())
    assert sum(len(axes.patches) for axes in panels(rows)) == len(rows)


@pytest.mark.parametrize(
    "rows, said",
    [
        ([], "there are no rows"),
        ([{"device_kind": "cpu"}], "a row has no 'implementation': give rows of bench"),
        ([FAST, PEERS | {"device_kind": "TPU v4"}], "TPU v4.*are not comparable"),
        ([FAST, TRAINING], "TFLOP/s', 'tokens/s'.*are not comparable"),
        ([FAST | {"tflops": float("nan")}], "value of row 0 must be a number.*got nan"),
        ([FAST, FAST | {"tflops": -1.0}], "value of row 1 must be a number.*got -1.0"),
        ([FAST | {"tflops": "600"}], "value of row 0 must be a number.*got '600'"),
    ],
)
def test_rows_that_make_no_picture_are_refused(rows, said):
    with pytest.raises(ValueError, match=said):
        draw(rows)


def test_a_file_that_is_no_json_is_named(tmp_path, capsys):
    path, output = tmp_path / "rows.json", tmp_path / "rows.png"
    path.write_text("[")
    assert main([str(path), "--output", str(output)]) == 1
    assert capsys.readouterr().err.startswith(f"error: {path} is no JSON")
    assert not output.exists()
