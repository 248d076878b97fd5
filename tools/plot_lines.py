"""Heat maps of line retrieval: length across, depth down, one map for each run.

python tools/plot_lines.py results/cpu/line_retrieval.json --output results/lines.png
"""

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

if not __package__:  # run as a script, which puts tools/ on the path, not the root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from tools.picture import write_picture

INK = "#1b2733"
SHADES = LinearSegmentedColormap.from_list(
    "accuracy", ["#b5483a", "#f0c987", "#e8efe2", "#7fb0d6", "#0d3f6e"]
)


def heat_maps(rows: Sequence[dict[str, Any]]) -> Figure:
    """A map of generated answers for each run, in the order of the rows."""
    runs = [(run, list(mine)) for run, mine in groupby(rows, lambda r: r["run"])]
    figure = Figure(figsize=(4.9 * len(runs) + 0.6, 4.0), facecolor="white")
    panels = figure.subplots(1, len(runs), squeeze=False, sharey=True)[0]
    for axes, (run, mine) in zip(panels, runs, strict=True):
        _draw(axes, mine)
        axes.set_title(run, fontsize=12, color=INK, fontweight="bold")
    panels[0].set_ylabel("depth of the line", fontsize=11, color=INK)
    figure.suptitle(
        "Line retrieval: answers that are right, in %", fontsize=13, color=INK
    )
    figure.tight_layout()
    return figure


def _draw(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    lengths = sorted({row["length"] for row in rows})
    depths = sorted({row["depth"] for row in rows})
    shares = np.full((len(depths), len(lengths)), np.nan)
    for row in rows:
        place = depths.index(row["depth"]), lengths.index(row["length"])
        shares[place] = row["generated"]
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status, 0 or 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("rows", nargs="+", type=Path, help="files that evaluate.py has written")
    add("--output", required=True, type=Path, help="PNG to write, replacing any")
    chosen = parser.parse_args(arguments)
    try:
        rows = [row for path in chosen.rows for row in json.loads(path.read_text())]
        write_picture(chosen.output, heat_maps(rows))
    except (ValueError, OSError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
