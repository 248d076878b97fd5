"""Draws rows of the benchmarks: a panel for each problem, a bar for each row.

    python -m tools.plot_results results/cpu/ringattention.json --output rings.png
    python -m tools.plot_results results/cpu/attention_ring8.json --output rings.png

Rows of `bench_kernels.py`, `bench_attention.py` and `bench_ringattention.py` are drawn
as TFLOP/s of the visible pairs, those of `bench_train.py` as tokens per second; the
picture says on what, when and at which commit they were measured. Rows of several files
are drawn in one picture if they were measured on the same kind of device.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tasks.command_line import Parser, as_program
from tools.lib.benchmarks.peers import PEERS
from tools.lib.benchmarks.rows import check_numbers, read_rows
from tools.lib.picture import GREY, INK, PROGRAMS, style, write_picture

FIELDS = "commit", "date", "device_count", "device_kind", "cores"
"""Of the rows of every benchmark."""

OURS = "this repository"
OTHERS = {name: name for name in PEERS} | {"ringattention": "Ring Attention"}
"""Programs that are not of this repository, by the names of their rows."""

Row = dict[str, Any]


class Bar(NamedTuple):
    """One row, as it is drawn.

    panel: the problem that was solved. unit: of the value. note: written on the bar.
    program: of PROGRAMS, which was measured.
    """

    panel: str
    label: str
    value: float
    unit: str
    note: str
    program: str


def bar(row: Row) -> Bar:
    """What is drawn of a row.

    Raises:
      ValueError: it is of none of the benchmarks.
    """
    try:
        if "step_seconds" in row:
            return _training_bar(row)
        return _attention_bar(row)
    except KeyError as missing:
        raise ValueError(
            f"a row has no {missing}: give rows of bench_kernels.py, "
            "bench_attention.py, bench_ringattention.py or bench_train.py"
        ) from missing


def _attention_bar(row: Row) -> Bar:
    name = row.get("contestant") or row["implementation"]
    panel = f"{row.get('direction', 'forward and backward')}, {row['length']:,} tokens"
    panel += f"\nmask {row['mask']}, heads of {row['head_dim']}"
    panel += f", {row['dtype']}" if "dtype" in row else ""
    shown = OTHERS.get(name, name)
    label = f"{shown}, {row['layout']}" if "layout" in row else shown
    if row.get("block_q"):
        label += f"\ntiles of {row['block_q']} x {row['block_k']}"
    note = f"{_seconds(row['seconds_median'])} ± {row['seconds_spread'] / 2:.0%}"
    if row["peak_share"]:
        note += f", {row['peak_share']:.0%} of peak"
    return Bar(panel, label, row["tflops"], "TFLOP/s", note, OTHERS.get(name, OURS))


def _training_bar(row: Row) -> Bar:
    panel = " ".join([Path(row["config"]).stem, *row["overrides"]])
    note = f"{_seconds(row['step_seconds'])} ± {row['step_spread'] / 2:.0%}"
    if row["mfu"]:
        note += f", MFU {row['mfu']:.0%}"
    label = f"{row['context_tokens']:,} tokens"
    return Bar(panel, label, row["tokens_per_second"], "tokens/s", note, OURS)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.2f} ms"


def draw(rows: Sequence[Row]) -> Figure:
    """A panel for each problem, in the order of the rows.

    Raises:
      ValueError: there are no rows, or some of another benchmark or kind of device, or
        rates that are no numbers.
    """
    if not rows:
        raise ValueError("there are no rows: measure some")
    bars = [bar(row) for row in rows]
    check_numbers([bar._asdict() for bar in bars], ["value"])
    kinds = {(row["device_kind"], row["device_count"]) for row in rows}
    units = {bar.unit for bar in bars}
    if len(kinds) > 1 or len(units) > 1:
        raise ValueError(
            f"rows of {sorted(kinds)} in {sorted(units)} are not comparable: draw them "
            "in pictures of their own"
        )
    panels = list(dict.fromkeys(bar.panel for bar in bars))
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    tallest = max(sum(bar.panel == panel for bar in bars) for panel in panels)
    figure = Figure(
        figsize=(2 + 4 * columns, 1.1 + lines * (0.8 + 0.42 * tallest)),
        layout="constrained",
        facecolor="white",
    )
    grid = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes, panel in zip(grid, panels, strict=False):
        _draw_panel(axes, [bar for bar in bars if bar.panel == panel])
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    programs = {bar.program: None for bar in bars}
    handles = [Patch(color=PROGRAMS[name], label=name) for name in programs]
    below = {"loc": "outside lower center", "ncols": 4, "labelcolor": INK}
    figure.legend(handles=handles, frameon=False, **below)
    figure.suptitle(_origin(rows), color=INK, fontsize=11)
    return figure


def _draw_panel(axes: Any, bars: Sequence[Bar]) -> None:
    places = range(len(bars))
    colours = [PROGRAMS[bar.program] for bar in bars]
    drawn = axes.barh(places, [bar.value for bar in bars], color=colours, height=0.7)
    axes.bar_label(drawn, [bar.note for bar in bars], padding=3, color=GREY, fontsize=8)
    axes.set_yticks(places, [bar.label for bar in bars], fontsize=8)
    axes.invert_yaxis()  # the first row is on top
    axes.set_xlim(0, 1.6 * max(bar.value for bar in bars) or 1)
    style(axes, title=bars[0].panel, x=bars[0].unit)


def _origin(rows: Sequence[Row]) -> str:
    row = rows[0]
    commits = sorted({(row["commit"] or "no commit")[:7] for row in rows})
    dates = sorted({row["date"][:10] for row in rows})
    devices = f"{row['device_count']} x {row['device_kind']}"
    if row["device_kind"] == "cpu":
        devices = f"{row['device_count']} simulated devices on {row['cores']} CPU cores"
    return f"Measured on {devices}, {' to '.join(dates)}, at {', '.join(commits)}"


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("rows", type=Path, nargs="+", help="files of a benchmark")
    parser.add_argument("--output", required=True, type=Path, help="PNG to write")
    return parser.parse_args(arguments)


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    chosen = _arguments(arguments)
    figure = draw([row for path in chosen.rows for row in read_rows(path, *FIELDS)])
    write_picture(chosen.output, figure)
    print(f"written to {chosen.output}")


if __name__ == "__main__":
    sys.exit(main())
