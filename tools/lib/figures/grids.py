"""Grids of shaded cells: shares by length and depth, tiles by device and ring step."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from kernels.backends.block_sizes import BlockSizes
from kernels.masks import causal
from tools.lib.benchmarks.rings import LAYOUTS
from tools.lib.benchmarks.work import count_tiles
from tools.lib.figures.style import INK, style

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
