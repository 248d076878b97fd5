from collections import Counter

import matplotlib.image
import pytest

from tools import plot_overlap
from tools.lib.planning.hlo import TRANSFER, Instruction, Program
from tools.plot_overlap import LOOKS, Bar, compile_ring, draw, main, timelines


def start(name: str) -> Instruction:
    return Instruction(name, TRANSFER, "start", group=2)


def done(name: str, size: int = 2**20) -> Instruction:
    return Instruction(f"{name}-done", TRANSFER, "done", name, size)


def kernel(direction: str) -> Instruction:
    return Instruction(direction, "kernel", kernel=direction)


FORWARD = (
    start("k"),
    start("v"),
    Instruction("call", "call", called=("fused",)),
    done("v"),
    done("k"),
    kernel("forward"),
)
BACKWARD = (kernel("backward"), start("dk"), done("dk", 2**21))
COMPUTATIONS = {"back": BACKWARD, "body": FORWARD, "fused": (kernel("forward"),)}
PROGRAM = Program("body", COMPUTATIONS)


@pytest.fixture
def widths(monkeypatch):
    monkeypatch.setattr(plot_overlap, "KERNEL_WIDTH", 10.0)
    monkeypatch.setattr(plot_overlap, "EDGE_WIDTH", 1.0)


def test_bars_reach_from_start_to_done_in_the_order_of_the_schedule(widths):
    found = timelines(PROGRAM)
    assert list(found) == ["forward", "backward"]
    assert found["forward"] == [
        Bar("kernel", 2, 12),
        Bar("1", 1, 13, 2**20, is_hidden=True),
        Bar("0", 0, 14, 2**20, is_hidden=True),
        Bar("kernel", 14, 24),
    ]
    assert found["backward"] == [
        Bar("kernel", 0, 10),
        Bar("0", 10, 12, 2**21, is_hidden=False),
    ]


def test_a_transfer_that_is_not_asynchronous_hides_nothing(widths):
    both = (Instruction("k", TRANSFER, size=8), kernel("forward"))
    found = timelines(Program("body", {"body": both}))
    assert found["forward"][0] == Bar("0", 0, 1, 8, is_hidden=False)


def test_a_program_without_transfers_is_refused():
    with pytest.raises(ValueError, match="no computation with kernels and transfers"):
        timelines(Program("body", {"body": (kernel("forward"),)}))


def test_bars_and_sizes_are_drawn(monkeypatch, tmp_path, capsys):
    figure = draw(timelines(PROGRAM), "title")
    forward, backward = figure.axes
    assert figure.get_suptitle() == "title"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(LOOKS)
    texts = [text.get_text() for text in forward.texts]
    assert texts == ["0", "1 MiB", "1 MiB", "1"]
    assert [text.get_text() for text in backward.texts] == ["0", ""]
    monkeypatch.setattr(plot_overlap, "compile_ring", lambda *_: PROGRAM)
    assert main(["--output", str(tmp_path / "new")]) == 0
    printed = capsys.readouterr().out
    assert "forward: 2 of 2 transfers behind a kernel" in printed
    assert "backward: 0 of 1 transfers behind a kernel" in printed
    assert matplotlib.image.imread(tmp_path / "new/overlap.png").shape[1] == 1760
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["overlap.png"]


def test_the_legend_has_nothing_that_never_occurs():
    hidden = {"forward": timelines(PROGRAM)["forward"]}
    (legend,) = draw(hidden, "title").legends
    shown = [text.get_text() for text in legend.get_texts()]
    assert shown == ["kernel of a hop", "transfer, behind a kernel"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--tokens", "0"], "--tokens: must be a whole number of at least 1, got 0"),
        (["--topology", "v9:2x2"], "'v9' of topology='v9:2x2' is not one of v3"),
    ],
)
def test_bad_arguments_are_refused(arguments, complaint, tmp_path, capsys):
    assert main([*arguments, "--output", str(tmp_path / "new")]) == 1
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_of_a_compiled_ring_no_transfer_is_bare():
    found = timelines(compile_ring("v4:2x2x1", 1024))
    counts = {
        name: Counter("kernel" if bar.lane == "kernel" else "transfer" for bar in bars)
        for name, bars in found.items()
    }
    # Keys and values three times; back, the queries at home in two halves, and dk and
    # dv four times.
    assert counts == {
        "forward": {"kernel": 4, "transfer": 6},
        "backward": {"kernel": 5, "transfer": 14},
    }
    assert all(bar.is_hidden for bars in found.values() for bar in bars)
