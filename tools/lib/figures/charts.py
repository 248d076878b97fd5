"""Heat maps: shares of right answers by length and depth."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from tools.lib.figures.style import INK, style

SHARES = LinearSegmentedColormap.from_list(
    "shares", ["#b5483a", "#f0c987", "#e8efe2", "#7fb0d6", "#0d3f6e"]
)


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
        _draw(axes, shares)
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        style(axes, title=name, x="tokens")
    for axes in panels[:, 0]:
        axes.set_ylabel("depth of the first answer", color=INK)
    figure.suptitle("Answers that are found, in %", fontsize=13, color=INK)
    return figure


def _draw(axes: Axes, values: np.ndarray) -> None:
    """Draws cells with their percentages; NaN stays empty."""
    axes.imshow(values, cmap=SHARES, vmin=0, vmax=100, aspect="auto")
    for place, value in np.ndenumerate(values):
        if np.isnan(value):
            continue
        red, green, blue, _ = SHARES(value / 100)
        tone = "white" if 0.3 * red + 0.6 * green + 0.1 * blue < 0.5 else INK
        text = f"{value:.0f}"
        axes.text(*reversed(place), text, ha="center", va="center", color=tone)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
