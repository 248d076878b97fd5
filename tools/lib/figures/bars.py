"""Bars of the benchmarks' rows: a panel for each problem, a bar for each row."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from tools.lib.benchmarks.peers import PEERS
from tools.lib.benchmarks.rows import check_numbers
from tools.lib.figures.style import GREY, INK, colours_of, style

FIELDS = "commit", "date", "device_count", "device_kind", "cores"
"""Required of every row."""

OTHERS = {name: name for name in PEERS} | {"ringattention": "Ring Attention"}
"""Programs outside this repository, by the names in their rows."""

OURS = "this repository"

Row = dict[str, Any]


class Bar(NamedTuple):
    """One row, as it is drawn.

    panel: the problem that was solved. unit: of the value. note: written on the bar.
    program: what was measured.
    """

    panel: str
    label: str
    value: float
    unit: str
    note: str
    program: str


def bar(row: Row) -> Bar:
    """Returns the bar of a row.

    Raises:
      ValueError: no benchmark writes rows like it.
    """
    try:
        if "step_seconds" in row:
            panel = " ".join([Path(row["config"]).stem, *row["overrides"]])
            label, value = f"{row['context_tokens']:,} tokens", row["tokens_per_second"]
            note = _seconds(row["step_seconds"], row["step_spread"])
            note += f", MFU {row['mfu']:.0%}" if row["mfu"] else ""
            return Bar(panel, label, value, "tokens/s", note, OURS)
        name = row.get("contestant") or row["implementation"]
        panel = f"{row.get('direction', 'forward and backward')}, {row['length']:,} "
        panel += f"tokens\nmask {row['mask']}, heads of {row['head_dim']}"
        panel += f", {row['dtype']}" if "dtype" in row else ""
        label = OTHERS.get(name, name)
        label += f", {row['layout']}" if "layout" in row else ""
        if row.get("block_q"):
            label += f"\ntiles of {row['block_q']} x {row['block_k']}"
        note = _seconds(row["seconds_median"], row["seconds_spread"])
        note += f", {row['peak_share']:.0%} of peak" if row["peak_share"] else ""
        return Bar(panel, label, row["tflops"], "TFLOP/s", note, OTHERS.get(name, OURS))
    except KeyError as missing:
        raise ValueError(
            f"a row has no {missing}: give rows of tools.bench_kernels, bench_ring or "
            "bench_train"
        ) from missing


def _seconds(seconds: float, spread: float) -> str:
    shown = f"{seconds:.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.2f} ms"
    return f"{shown} ± {spread / 2:.0%}"


def bars(rows: Sequence[Row]) -> Figure:
    """Draws rows of one benchmark, from one kind of device.

    Raises:
      ValueError: there are no rows, or some of another benchmark or kind of device, or
        rates that are not finite numbers of at least 0.
    """
    if not rows:
        raise ValueError("there are no rows: measure some")
    found = [bar(row) for row in rows]
    check_numbers([bar._asdict() for bar in found], ["value"])
    kinds = {(row["device_kind"], row["device_count"]) for row in rows}
    units = {bar.unit for bar in found}
    if len(kinds) > 1 or len(units) > 1:
        raise ValueError(
            f"rows of {sorted(kinds)} in {sorted(units)} are not comparable: draw them "
            "in pictures of their own"
        )
    panels: dict[str, list[Bar]] = {}
    for each in found:
        panels.setdefault(each.panel, []).append(each)
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    tallest = max(map(len, panels.values()))
    size = (2 + 4 * columns, 1.1 + lines * (0.8 + 0.42 * tallest))
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    grid = figure.subplots(lines, columns, squeeze=False).ravel()
    colours = colours_of([each.program for each in found])
    for axes, (title, drawn) in zip(grid, panels.items(), strict=False):
        values, shades = [b.value for b in drawn], [colours[b.program] for b in drawn]
        container = axes.barh(range(len(drawn)), values, color=shades, height=0.7)
        notes = [each.note for each in drawn]
        axes.bar_label(container, notes, padding=3, color=GREY, fontsize=8)
        axes.set_yticks(range(len(drawn)), [each.label for each in drawn], fontsize=8)
        axes.invert_yaxis()  # the first row is on top
        axes.set_xlim(0, 1.6 * max(values) or 1)
        style(axes, title=title, x=drawn[0].unit)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    figure.suptitle(_origin(rows), color=INK, fontsize=11)
    return figure


def _origin(rows: Sequence[Row]) -> str:
    """Returns the title: devices, dates and commits of the measurement."""
    row = rows[0]
    commits = ", ".join(sorted({(row["commit"] or "no commit")[:7] for row in rows}))
    dates = " to ".join(sorted({row["date"][:10] for row in rows}))
    devices = f"{row['device_count']} x {row['device_kind']}"
    if row["device_kind"] == "cpu":
        devices = f"{row['device_count']} simulated devices on {row['cores']} CPU cores"
    return f"Measured on {devices}, {dates}, at {commits}"
