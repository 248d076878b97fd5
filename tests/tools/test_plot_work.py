import json
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from kernels.layouts import Contiguous, Striped, Zigzag
from kernels.masks import causal, full, window
from tools import plot_work
from tools.lib.benchmarks.work import critical_path
from tools.lib.picture import DOTS_PER_INCH
from tools.plot_work import main, work_per_hop

ROOT = Path(plot_work.__file__).parents[1]


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
    work = work_per_hop(layout, 4, 8, causal())
    assert work.tolist() == rows
    assert critical_path(work) == path


def test_without_a_mask_every_layout_computes_everything():
    for layout in (Contiguous(), Striped(), Zigzag()):
        assert (work_per_hop(layout, 3, 4, full()) == 16).all()


def test_hops_beyond_a_window_are_empty():
    work = work_per_hop(Contiguous(), 4, 2, window(plot_work.TILE))
    assert work.tolist() == [[3, 0, 0, 0]] + [[3, 1, 0, 0]] * 3


def test_program_draws_the_counts_and_writes_them_down(tmp_path, capsys):
    folder = tmp_path / "new" / "results"
    assert main(["--ring", "4", "--tiles", "8", "--output", str(folder)]) == 0
    printed = capsys.readouterr().out
    for path in (228, 144, 132):
        assert f"critical path {path} tiles" in printed
    assert "bound: 128.0 tiles" in printed
    written = json.loads((folder / "work_per_hop.json").read_text())
    assert written["bound"] == pytest.approx(8 * 8 * 4 / 2, rel=1e-3)
    assert {
        name: (numbers["critical_path"], np.sum(numbers["tiles"]))
        for name, numbers in written["layouts"].items()
    } == {"contiguous": (228, 528), "striped": (144, 576), "zigzag": (132, 528)}
    picture = matplotlib.image.imread(folder / "work_per_hop.png")
    assert picture.shape[1] == 9 * DOTS_PER_INCH
    assert sorted(path.name for path in folder.iterdir()) == [
        "work_per_hop.json",
        "work_per_hop.png",
    ]


def test_numbers_in_the_picture_are_the_counts():
    work = {"contiguous": work_per_hop(Contiguous(), 4, 8, causal())}
    figure = plot_work.draw(work, 128.0, 8)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts[:16] == [str(count) for count in work["contiguous"].flat]
    assert "228 tiles" in texts and "36 + 64 + 64 + 64" in texts


def test_program_runs_from_the_root_and_refuses_a_ring_of_nothing(tmp_path):
    command = [sys.executable, "-m", "tools.plot_work", "--ring", "0"]
    refused = subprocess.run(
        [*command, "--output", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: argument --ring: must be a whole number")
    assert not list(tmp_path.iterdir())
