"""Grids of shaded cells: shares by length and depth, tiles by device and ring step."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from kernels.backends.block_sizes import BlockSizes
from kernels.masks import causal
from tools.lib.benchmarks.rings import LAYOUTS
from tools.lib.benchmarks.rows import check_numbers
from tools.lib.benchmarks.work import balanced_tiles, critical_path, tiles_per_step
from tools.lib.figures.style import INK, style

FIELDS = "run", "length", "depth", "generated"
"""Required of every row of an evaluation."""

SHARES = LinearSegmentedColormap.from_list(
    "shares", ["#b5483a", "#f0c987", "#e8efe2", "#7fb0d6", "#0d3f6e"]
)
WORK = LinearSegmentedColormap.from_list(
    "work", ["#eef3f8", "#7fb0d6", "#2a70ab", "#0d3f6e"]
)

TILE = 128
"""Query rows and key slots of a tile; causal counts are the same from 2 on."""


def heat_maps(
    rows: Sequence[dict[str, Any]],
    names: Sequence[str] = (),
    *,
    title: str = "Line retrieval: answers that are right, in %",
    depth: str = "depth of the line",
) -> Figure:
    """Draws the shares of right generated answers, a map for each run, four in a row.

    names: of the runs, in the order of the rows; by default those of their folders, or
      their paths where two folders have one name.

    Raises:
      ValueError: there are no rows, two of one cell, shares outside of [0, 1], or not
        one name for each run.
    """
    runs: dict[str, dict[tuple[int, float], float]] = {}
    check_numbers(rows, ["length", "depth", "generated"])
    for row in rows:
        mine, cell = runs.setdefault(row["run"], {}), (row["length"], row["depth"])
        if cell in mine or row["generated"] > 1:
            wrong = "is there twice" if cell in mine else "is more than all"
            raise ValueError(
                f"{row['run']}, {cell[0]} tokens, depth {cell[1]:.0%}: the share of "
                f"right answers {wrong}; give one evaluation of each run"
            )
        mine[cell] = row["generated"]
    folders = [Path(run).name for run in runs]
    names = names or (folders if len(set(folders)) == len(runs) else list(runs))
    if not runs or len(names) != len(runs):
        raise ValueError(
            f"{len(names)} names for {len(runs)} runs ({', '.join(runs) or 'no rows'}):"
            " there must be a run, and a name for each"
        )
    across, down = min(len(runs), 4), -(-len(runs) // 4)
    size = (4.9 * across + 0.6, 4.0 * down)
    figure = Figure(figsize=size, facecolor="white", layout="tight")
    panels = figure.subplots(down, across, squeeze=False, sharey=True)
    for axes in panels.flat[len(runs) :]:
        axes.remove()
    for axes, name, mine in zip(panels.flat, names, runs.values(), strict=False):
        lengths = sorted({length for length, _ in mine})
        depths = sorted({depth for _, depth in mine})
        shares = np.full((len(depths), len(lengths)), np.nan)
        for (length, at), share in mine.items():
            shares[depths.index(at), lengths.index(length)] = 100 * share
        _draw(axes, shares, SHARES, 100)
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        style(axes, title=name, x="tokens")
    for axes in panels[:, 0]:
        axes.set_ylabel(depth, color=INK)
    figure.suptitle(title, fontsize=13, color=INK)
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
        counts = tiles_per_step(layout, ring, visible, sizes)
        path = critical_path(counts)
        layouts[name] = {"critical_path": path, "tiles": counts.tolist()}
    bound = balanced_tiles(ring, visible, sizes)
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
