"""Bars of the benchmarks' rows: a panel for each problem, a bar for each row."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from tools.lib.figures.style import COLOURS, GREY, INK, style

FIELDS = (
    *("commit", "date", "device_count", "device_kind", "cores", "length", "head_dim"),
    *("mask", "tflops", "seconds_median", "seconds_spread", "peak_share"),
)
"""Required of every row."""


def bars(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draws rows of `bench_kernels` or of `bench_ring`, from one kind of device.

    Raises:
      ValueError: there are no rows, or some of another kind of device.
    """
    kinds = {(row["device_kind"], row["device_count"]) for row in rows}
    if len(kinds) != 1:
        raise ValueError(f"rows of {sorted(kinds)}: draw those of one kind of device")
    panels: dict[str, list[tuple[dict[str, Any], str]]] = {}
    for row in rows:
        title = f"{row.get('direction', 'forward and backward')}, mask {row['mask']}\n"
        title += f"{row['length']:,} tokens, heads of {row['head_dim']}"
        title += f", {row['dtype']}" if "dtype" in row else ""
        label = row.get("contestant") or f"{row['implementation']}, {row['layout']}"
        label += f"\n{row['block_q']} x {row['block_k']}" if "block_q" in row else ""
        panels.setdefault(title, []).append((row, label))
    columns, tallest = min(3, len(panels)), max(map(len, panels.values()))
    lines = -(-len(panels) // columns)
    size = (2 + 4 * columns, 1.1 + lines * (0.8 + 0.42 * tallest))
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    grid = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes, (title, drawn) in zip(grid, panels.items(), strict=False):
        values, notes = [row["tflops"] for row, _ in drawn], []
        for row, _ in drawn:
            note = f"{1e3 * row['seconds_median']:,.1f} ms"
            note += f" ± {row['seconds_spread'] / 2:.0%}"
            share = row["peak_share"]
            notes.append(f"{note}, {share:.0%} of peak" if share else note)
        container = axes.barh(range(len(drawn)), values, color=COLOURS[0], height=0.7)
        axes.bar_label(container, notes, padding=3, color=GREY, fontsize=8)
        axes.set_yticks(range(len(drawn)), [label for _, label in drawn], fontsize=8)
        axes.invert_yaxis()  # the first row is on top
        axes.set_xlim(0, 1.6 * max(values) or 1)
        style(axes, title=title, x="TFLOP/s")
    for axes in grid[len(panels) :]:
        axes.remove()
    commits, dates = (sorted({row[n] or "" for row in rows}) for n in FIELDS[:2])
    (device, count), cores = kinds.pop(), rows[0]["cores"]
    where = f"{count} simulated devices on {cores} cores" if device == "cpu" else device
    title = f"{where}, {dates[0][:10]}, at {', '.join(c[:7] for c in commits)}"
    figure.suptitle(title, color=INK, fontsize=11)
    return figure
