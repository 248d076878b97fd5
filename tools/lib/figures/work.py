"""Tiles of scores that each device of a causal ring computes in each ring step.

All devices wait for the slowest one before keys and values travel on, so a ring takes
as long as the sum, over its steps, of the most that any device computes: its critical
path.
"""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from kernels.block_sizes import BlockSizes
from kernels.layouts import Contiguous, Layout, Striped, Zigzag
from kernels.masks import Mask, Visible, causal
from tools.lib.benchmarks.work import balanced_tiles, critical_path, tiles_per_step
from tools.lib.figures.style import GREY, INK

LAYOUTS: dict[str, tuple[Layout, str]] = {
    "contiguous": (Contiguous(), "Ring Attention"),
    "striped": (Striped(), "Striped Attention"),
    "zigzag": (Zigzag(), "two chunks a device"),
}
"""Layouts, and what they are known by."""

TILE = 128
"""Query rows and key slots of a tile; causal counts are the same from 2 on."""

BLUES = LinearSegmentedColormap.from_list(
    "work", ["#eef3f8", "#7fb0d6", "#2a70ab", "#0d3f6e"]
)


def work_per_step(
    layout: Layout, ring_size: int, tiles_per_shard: int, mask: Mask
) -> np.ndarray:
    """Counts the tiles that each device computes in each step: (devices, steps).

    tiles_per_shard: L / TILE, so a step in which nothing is skipped has its square.
    """
    visible = _visible(ring_size, tiles_per_shard, mask)
    return tiles_per_step(layout, ring_size, visible, BlockSizes(TILE, TILE))


def _visible(ring_size: int, tiles_per_shard: int, mask: Mask) -> Visible:
    length = ring_size * tiles_per_shard * TILE
    return mask(np.arange(length, dtype=np.int32), length)


def ideal_tiles(ring_size: int, tiles_per_shard: int) -> float:
    """Counts the visible pairs, in tiles, spread evenly over the devices."""
    visible = _visible(ring_size, tiles_per_shard, causal())
    return balanced_tiles(ring_size, visible, BlockSizes(TILE, TILE))


def table(work: dict[str, np.ndarray], ideal: float) -> str:
    """Returns the counts as text, a block of lines for each layout."""
    lines = []
    for name, tiles in work.items():
        steps = range(tiles.shape[1])
        lines.append(f"{name:12}" + "".join(f"{f'step {step}':>8}" for step in steps))
        lines += [
            f"  device {device:<3}" + "".join(f"{count:8}" for count in row)
            for device, row in enumerate(tiles)
        ]
        slowest = "".join(f"{count:8}" for count in tiles.max(axis=0))
        path = critical_path(tiles)
        lines.append(
            f"  slowest   {slowest}   critical path {path} tiles, all devices "
            f"{tiles.sum()}, bound / path {ideal / path:.0%}"
        )
    lines.append(f"bound: {ideal:.1f} tiles (visible pairs, evenly spread)")
    return "\n".join(lines)


def grids(work: dict[str, np.ndarray], ideal: float, tiles_per_shard: int) -> Figure:
    """Draws a panel for each layout: devices by steps, and the critical path.

    work: counts (devices, steps) by the names of LAYOUTS.
    """
    everything = tiles_per_shard**2
    longest = max(critical_path(tiles) for tiles in work.values())
    figure = Figure(figsize=(9, 4.7), facecolor="white")
    panels = figure.subplots(1, len(work), squeeze=False)[0]
    for axes, (name, tiles) in zip(panels, work.items(), strict=True):
        _draw_grid(axes, tiles, everything)
        _draw_captions(axes, name, tiles, longest)
    panels[0].set_ylabel("device", fontsize=11, color=INK)
    title = f"Causal attention on a ring of {len(tiles)}: tiles of scores that each "
    title += "device computes in each step"
    figure.text(0.5, 0.94, title, ha="center", fontsize=13, color=INK)
    note = "Devices wait for the slowest one of each step: the sums below the grids "
    note += f"add up the slowest.\n{ideal:.0f} tiles would be the best, "
    note += f"{everything * len(tiles)} if nothing were skipped."
    look = {"ha": "center", "fontsize": 11, "color": GREY, "linespacing": 1.4}
    figure.text(0.5, 0.03, note, **look)
    figure.subplots_adjust(left=0.06, right=0.985, top=0.79, bottom=0.39, wspace=0.14)
    return figure


def _draw_captions(axes: Axes, name: str, tiles: np.ndarray, longest: int) -> None:
    """Writes name and origin of a layout above its grid, the critical path below."""

    def write(height: float, text: str, size: float, **style: str) -> None:
        place = {"transform": axes.transAxes, "ha": "center", "va": "baseline"}
        axes.text(0.5, height, text, fontsize=size, **place, **{"color": INK} | style)

    write(1.14, name, 14, fontweight="bold")
    write(1.035, LAYOUTS[name][1], 11, color=GREY)
    path, slowest = critical_path(tiles), tiles.max(axis=0)
    write(-0.37, f"{path} tiles", 19, fontweight="bold")
    terms = " + ".join(map(str, slowest)) if len(slowest) <= 4 else ""
    gain = f"{longest / path:.2f} x fewer" if path < longest else ""
    write(-0.51, " :  ".join(filter(None, (terms, gain))), 11)


def _draw_grid(axes: Axes, tiles: np.ndarray, everything: int) -> None:
    """Draws devices by steps, darker where more is computed, with the counts."""
    axes.imshow(tiles / everything, cmap=BLUES, vmin=0, vmax=1, aspect="auto")
    devices, steps = tiles.shape
    look = {"ha": "center", "va": "center", "fontsize": min(13.0, 80 / steps)}
    for (device, step), count in np.ndenumerate(tiles):
        tone = "white" if count / everything > 0.45 else INK
        axes.text(step, device, count, color=tone, **look)
    word = "step " if steps <= 4 else ""
    axes.set_xticks(range(steps), [f"{word}{step}" for step in range(steps)])
    axes.set_yticks(range(devices))
    axes.set_xticks(np.arange(steps + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(devices + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=2.5)
    axes.tick_params(which="both", length=0, labelsize=11, labelcolor=INK)
    axes.spines[:].set_visible(False)
