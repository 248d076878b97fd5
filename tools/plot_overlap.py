"""Draws which transfers of a compiled ring run beside which kernels.

    python -m tools.plot_overlap --topology v5e:2x4 --tokens 16384 --output results

Two scanned layers of striped causal attention, forward and backward, are compiled for a
ring of all devices of a described TPU pod, by the real compiler. What it schedules is
read by `tools/lib/planning/hlo.py`, and each computation with transfers is a panel: a
bar for every kernel, and one for every transfer from its start to its done. From left
to right is the order of the schedule: widths are no times, and nothing was run.

Writes `overlap.png` into the output directory, in place of that of an earlier run.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kernels.tpu import launch as pallas_tpu
from tasks.command_line import Parser, as_program, at_least
from tools.lib.benchmarks.layers import layers_gradient
from tools.lib.picture import BLUE, INK, ORANGE, PALE_BLUE, write_picture
from tools.lib.planning.hlo import TRANSFER, Program
from tools.lib.planning.progress import progress
from tools.lib.planning.topology import compile_for, described
from training.chips import compiler_options
from training.torus import ring_along

KERNEL_WIDTH, EDGE_WIDTH = 2.0, 0.3
"""Of a kernel's bar, and of what a start or a done takes along the axis."""

LOOKS = {
    "kernel of a hop": BLUE,
    "transfer, behind a kernel": PALE_BLUE,
    "transfer that nothing hides": ORANGE,
}
"""Colours of bars, by what they are."""


@dataclass(frozen=True)
class Bar:
    """A kernel, or a transfer from its start to its done.

    lane: "kernel", or the number of its lane: transfers in a lane do not overlap.
    begin, end: along the schedule, in the units of KERNEL_WIDTH.
    size: bytes that are sent, of a transfer.
    is_hidden: whether a kernel runs between its ends, of a transfer.
    """

    lane: str
    begin: float
    end: float
    size: int = 0
    is_hidden: bool = True

    @property
    def name(self) -> str:
        """What it is, of LOOKS."""
        kernel, hidden, exposed = LOOKS
        if self.lane == "kernel":
            return kernel
        return hidden if self.is_hidden else exposed


def compile_ring(topology: str, tokens: int) -> Program:
    """The gradient of scanned layers of attention, as it is scheduled.

    topology: of the pod, all of whose devices are one ring ("v5e:2x4").
    tokens: of each device.

    Raises:
      ValueError: there is no such pod, or there are no tokens.
    """
    if tokens < 1:
        raise ValueError(f"--tokens {tokens} must be at least 1 token of each device")
    devices = np.array(described(topology))
    mesh = Mesh(ring_along(devices, 0), ("ring",))
    gradient, inputs = layers_gradient(mesh, pallas_tpu, tokens)
    options = compiler_options(devices.flat[0].device_kind)
    program = jax.jit(gradient, compiler_options=options)
    with progress(f"compiling a ring of {devices.size} for {topology}", sys.stderr):
        text = compile_for(mesh, program, *inputs).as_text()
    return Program.parse(text, devices.size)


def timelines(program: Program) -> dict[str, list[Bar]]:
    """Bars of each computation that has transfers and kernels, forward first.

    Raises:
      ValueError: there is none.
    """
    found = {}
    for name in program.computations:
        kinds = {i.kernel for i in program.sequence(name)}
        bars = list(_bars(program, name))
        if {bar.lane for bar in bars} - {"kernel"} and kinds - {""}:
            found["backward" if "backward" in kinds else "forward"] = bars
    if not found:
        raise ValueError("the program has no computation with kernels and transfers")
    return dict(sorted(found.items(), reverse=True))


def _bars(program: Program, name: str) -> list[Bar]:
    """In the order in which they end."""
    started: dict[str, tuple[str, float, int]] = {}
    bars: list[Bar] = []
    place, kernels = 0.0, 0
    for instruction in program.sequence(name):
        begin = place
        place += KERNEL_WIDTH if instruction.kind == "kernel" else EDGE_WIDTH
        if instruction.kind == "kernel":
            kernels += 1
            bars.append(Bar("kernel", begin, place))
        elif instruction.phase == "start":
            taken = {lane for lane, _, _ in started.values()}
            lane = next(str(i) for i in range(99) if str(i) not in taken)
            started[instruction.name] = lane, begin, kernels
        elif instruction.phase == "done":
            lane, first, before = started.pop(instruction.first_operand)
            hidden = kernels > before
            bars.append(Bar(lane, first, place, instruction.size, hidden))
        elif instruction.kind == TRANSFER:
            bars.append(Bar("0", begin, place, instruction.size, False))
    return bars


def draw(found: dict[str, list[Bar]], title: str) -> Figure:
    """A panel for each timeline, one above the other."""
    lanes = [sorted({bar.lane for bar in bars} - {"kernel"}) for bars in found.values()]
    figure = Figure(
        figsize=(11, 1.9 + 0.42 * sum(len(those) + 1 for those in lanes)),
        layout="constrained",
        facecolor="white",
    )
    heights = [len(those) + 1.5 for those in lanes]
    panels = figure.subplots(len(found), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, bars), those in zip(panels, found.items(), lanes, strict=True):
        _draw_panel(axes, name, bars, those)
    panels[-1].set_xlabel(
        "order of the compiled schedule (widths are no times)", color=INK
    )
    shown = {bar.name for bars in found.values() for bar in bars}
    handles = [Patch(color=LOOKS[name], label=name) for name in LOOKS if name in shown]
    below = {"loc": "outside lower center", "ncols": 3, "labelcolor": INK}
    figure.legend(handles=handles, frameon=False, **below)
    figure.suptitle(title, color=INK)
    return figure


def _draw_panel(axes: Axes, name: str, bars: list[Bar], lanes: list[str]) -> None:
    rows = {lane: row for row, lane in enumerate(["kernel", *lanes])}
    hop = 0
    for bar in bars:
        width = bar.end - bar.begin
        row = rows[bar.lane]
        axes.barh(row, width, 0.74, bar.begin, color=LOOKS[bar.name], edgecolor="white")
        label = f"{bar.size / 2**20:.3g} MiB" if width >= KERNEL_WIDTH else ""
        tone = INK
        if bar.lane == "kernel":
            label, tone, hop = str(hop), "white", hop + 1
        place = bar.begin + width / 2, row
        axes.text(*place, label, ha="center", va="center", color=tone, fontsize=8)
    axes.set_yticks(
        list(rows.values()), ["kernel", *(f"transfer {int(i) + 1}" for i in lanes)]
    )
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.set_xlim(0, max(bar.end for bar in bars))
    axes.tick_params(length=0, labelcolor=INK)
    axes.spines[:].set_visible(False)
    axes.set_title(name, loc="left", color=INK, fontsize=11)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--topology", default="v5e:2x4", help="default: %(default)s")
    add("--tokens", default=16384, type=at_least(1), help="of a device (%(default)s)")
    add("--output", required=True, type=Path, help="directory to write into")
    return parser.parse_args(arguments)


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    chosen = _arguments(arguments)
    found = timelines(compile_ring(chosen.topology, chosen.tokens))
    title = (
        f"A striped ring compiled for {chosen.topology}, {chosen.tokens:,} tokens "
        "a device: what runs beside what"
    )
    figure = draw(found, title)
    chosen.output.mkdir(parents=True, exist_ok=True)
    write_picture(chosen.output / "overlap.png", figure)
    for name, bars in found.items():
        transfers = [bar for bar in bars if bar.lane != "kernel"]
        hidden = sum(bar.is_hidden for bar in transfers)
        print(f"{name}: {hidden} of {len(transfers)} transfers behind a kernel")
    print(f"written to {chosen.output}")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
