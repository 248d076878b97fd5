"""Charts: bars of benchmarks, shares by length and depth, tiles by ring step."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from kernels.backends.block_sizes import BlockSizes
from kernels.masks import causal
from tools.lib.benchmarks.problems import count_tiles
from tools.lib.benchmarks.rings import LAYOUTS
from tools.lib.figures.style import COLOURS, GREY, INK, style

FIELDS = (
    *("commit", "date", "device_count", "device_kind", "cores", "length", "head_dim"),
    *("mask", "tflops", "seconds_median", "seconds_spread", "peak_share"),
)
"""Required of every row."""


def bars(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draws rows of `bench_kernels` or of `bench_ring`, from one kind of device.

    Raises:
      ValueError: rows are missing, or some are of another kind of device.
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


SHARES = LinearSegmentedColormap.from_list(
    "shares", ["#b5483a", "#f0c987", "#e8efe2", "#7fb0d6", "#0d3f6e"]
)
WORK = LinearSegmentedColormap.from_list(
    "work", ["#eef3f8", "#7fb0d6", "#2a70ab", "#0d3f6e"]
)

TILE = 128
"""Query rows and key slots of a tile; causal counts are the same from 2 on."""


def heat_maps(tasks: Mapping[str, Mapping[tuple[int, float], float]]) -> Figure:
    """Draws the percentage of right answers, a map for each task, four in a row.

    tasks: of each the percentages, by length in tokens and by depth, from 0 to 1.
    """
    across, down = min(len(tasks), 4), -(-len(tasks) // 4)
    size = (4.9 * across + 0.6, 4.0 * down)
    figure = Figure(figsize=size, facecolor="white", layout="tight")
    panels = figure.subplots(down, across, squeeze=False)
    for axes in panels.flat[len(tasks) :]:
        axes.remove()
    for axes, (name, cells) in zip(panels.flat, tasks.items(), strict=False):
        lengths, depths = (sorted(set(places)) for places in zip(*cells, strict=True))
        shares = np.full((len(depths), len(lengths)), np.nan)
        for (length, depth), share in cells.items():
            shares[depths.index(depth), lengths.index(length)] = share
        _draw(axes, shares, SHARES, 100)
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        style(axes, title=name, x="tokens")
    for axes in panels[:, 0]:
        axes.set_ylabel("depth of the first answer", color=INK)
    figure.suptitle("Answers that are found, in %", fontsize=13, color=INK)
    return figure


def work_per_step(ring: int = 4, tiles: int = 8) -> dict[str, Any]:
    """Counts the tiles that each device of a causal ring computes in each ring step.

    All devices wait for the slowest one before keys and values travel on, so a ring
    takes as long as its critical path: the sum, over its steps, of the most that any
    device computes.

    tiles: along a device's shard, so a step that skips nothing computes their square.
    """
    length, sizes = ring * tiles * TILE, BlockSizes(TILE, TILE)
    visible = causal()(np.arange(length, dtype=np.int32), length)
    layouts = {}
    for name, layout in LAYOUTS.items():
        work = count_tiles(layout, ring, visible, sizes)
        path, bound = work["tiles_critical_path"], work["tiles_bound"]
        layouts[name] = {"critical_path": path, "tiles": work["tiles"]}
    found: dict[str, Any] = {"mask": "causal", "ring_size": ring}
    return found | {"tiles_per_shard": tiles, "bound": bound, "layouts": layouts}


def work_grids(work: dict[str, Any]) -> Figure:
    """Draws what `work_per_step` counted: devices by steps, a panel for each layout."""
    layouts, everything = work["layouts"], work["tiles_per_shard"] ** 2
    figure = Figure(figsize=(9, 3.9), facecolor="white", layout="tight")
    panels = figure.subplots(1, len(layouts), squeeze=False)[0]
    for axes, (name, found) in zip(panels, layouts.items(), strict=True):
        _draw(axes, np.array(found["tiles"]), WORK, everything)
        axes.set_xticks(range(work["ring_size"]))
        axes.set_yticks(range(work["ring_size"]))
        slowest = f"slowest devices: {found['critical_path']} tiles"
        style(axes, title=name, x=f"ring step\n{slowest}", y="device")
    title = f"Causal ring of {work['ring_size']}: tiles of the score matrix that each "
    title += f"device computes\n{work['bound']:.0f} if spread evenly, "
    title += f"{everything * work['ring_size']} if none were skipped"
    figure.suptitle(title, fontsize=12, color=INK)
    return figure


def _draw(axes: Axes, values: np.ndarray, shades: Any, most: float) -> None:
    """Draws cells with their numbers; NaN stays empty."""
    axes.imshow(values, cmap=shades, vmin=0, vmax=most, aspect="auto")
    for place, value in np.ndenumerate(values):
        if np.isnan(value):
            continue
        red, green, blue, _ = shades(value / most)
        tone = "white" if 0.3 * red + 0.6 * green + 0.1 * blue < 0.5 else INK
        text = f"{value:.0f}"
        axes.text(*reversed(place), text, ha="center", va="center", color=tone)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
