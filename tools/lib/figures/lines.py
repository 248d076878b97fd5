"""Heat maps of line retrieval: length across, depth down, one map for each run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from tools.lib.benchmarks.rows import check_numbers
from tools.lib.figures.style import INK

FIELDS = "run", "length", "depth", "generated"
"""Required of every row."""

SHADES = LinearSegmentedColormap.from_list(
    "accuracy", ["#b5483a", "#f0c987", "#e8efe2", "#7fb0d6", "#0d3f6e"]
)


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
    figure = Figure(figsize=(4.9 * across + 0.6, 4.0 * down), facecolor="white")
    panels = figure.subplots(down, across, squeeze=False, sharey=True)
    for axes in panels.flat[len(runs) :]:
        axes.remove()
    for axes, name, mine in zip(panels.flat, names, runs.values(), strict=False):
        _draw(axes, mine)
        axes.set_title(name, fontsize=12, color=INK, fontweight="bold")
    for axes in panels[:, 0]:
        axes.set_ylabel(depth, fontsize=11, color=INK)
    figure.suptitle(title, fontsize=13, color=INK)
    figure.tight_layout()
    return figure


def _draw(axes: Axes, cells: dict[tuple[int, float], float]) -> None:
    """Draws one map of shares by (length, depth); cells without cases stay empty."""
    lengths = sorted({length for length, _ in cells})
    depths = sorted({depth for _, depth in cells})
    shares = np.full((len(depths), len(lengths)), np.nan)
    for (length, depth), share in cells.items():
        shares[depths.index(depth), lengths.index(length)] = share
    axes.imshow(shares, cmap=SHADES, vmin=0, vmax=1, aspect="auto")
    for place, share in np.ndenumerate(shares):
        if np.isnan(share):
            continue
        tone = "white" if share > 0.8 or share < 0.15 else INK
        text = f"{100 * share:.0f}"
        axes.text(*reversed(place), text, ha="center", va="center", color=tone)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes.set_xlabel("tokens", fontsize=11, color=INK)
    axes.tick_params(length=0, labelcolor=INK)
    axes.spines[:].set_visible(False)
