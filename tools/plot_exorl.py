"""Draws what tools/evaluate_exorl.py wrote: returns by episode, for every context.

    python tools/plot_exorl.py results/cpu/exorl_*.json --output results/exorl_tiny.png

One panel a task. Bands are bootstrap intervals (95 %) over the environments; the dashed
line is the return that agents are told to reach, the best of the data.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a script, which puts tools/ on the path, not the root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tools.evaluate_exorl import interval
from tools.picture import write_picture

INK, GREY = "#1b2733", "#5c6b7a"
COLOURS = ["#0d3f6e", "#c8562b", "#3d8a5f", "#8a5fa8", "#b08a2e", "#7fb0d6", "#7a2e3a"]
STYLES = {"own": "-", "empty": ":", "recorded": "o", "other": "x"}


def read(paths: Sequence[Path]) -> dict[str, dict[str, dict[str, Any]]]:
    """Results by task and by name, that of the file without what they share.

    Raises:
      ValueError: a file holds no results.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for path in paths:
        try:
            results = json.loads(path.read_text())
            found.setdefault(results["task"], {})[path.stem] = results
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} holds no results of tools/evaluate_exorl.py "
                f"({type(error).__name__}: {error})"
            ) from error
    return found


def draw(axes: Axes, task: str, runs: dict[str, dict[str, Any]]) -> None:
    """One task: a colour for each run, a style for each context."""
    last = 1
    for (name, results), colour in zip(runs.items(), COLOURS, strict=False):
        for context, outcome in results["contexts"].items():
            returns = np.array(outcome["returns"])
            before = len(outcome["recorded_returns"][0])
            episodes = before + np.arange(1, returns.shape[1] + 1)
            last = max(last, episodes[-1])
            bounds = [interval(column) for column in returns.T]
            low, mean, high = (
                np.array([bound[part] for bound in bounds])
                for part in ("low", "mean", "high")
            )
            label = f"{name.removeprefix('exorl_')}, {context}"
            style = STYLES[context]
            axes.plot(episodes, mean, style, color=colour, label=label, markersize=6)
            if style in "-:":
                axes.fill_between(episodes, low, high, color=colour, alpha=0.12, lw=0)
            else:
                errors = [mean - low, high - mean]
                axes.errorbar(episodes, mean, errors, color=colour, fmt="none", lw=1)
    target = next(iter(runs.values()))["target"]
    axes.axhline(target, color=GREY, linestyle="--", linewidth=1)
    axes.set_title(task, color=INK, fontsize=11)
    axes.set_xlabel("episode", color=GREY)
    axes.set_ylabel("return", color=GREY)
    axes.set_xticks(range(1, last + 1))
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": 2}
    axes.legend(frameon=False, fontsize=7, **below)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status, 0 or 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path, help="files to draw")
    parser.add_argument("--output", required=True, type=Path, help="picture, PNG")
    chosen = parser.parse_args(arguments)
    try:
        tasks = read(chosen.results)
        figure = Figure(figsize=(5.2 * len(tasks), 5), layout="constrained")
        panels = np.atleast_1d(figure.subplots(1, len(tasks)))
        for axes, (task, runs) in zip(panels, tasks.items(), strict=True):
            draw(axes, task, runs)
        write_picture(chosen.output, figure)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"written to {chosen.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
