"""Returns of agents by episode, for every context: what `evaluate exorl` wrote.

One panel a task, one colour an agent. Bands are bootstrap intervals (95 %) over the
environments; the dashed line is the return that agents are conditioned on.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from data.json_text import parse_json
from tools.lib.exorl.scores import interval
from tools.lib.figures.style import AGENTS, GREY, INK, PALE_BLUE, style

CONTEXTS = {
    "own": ("own episodes before it", "-"),
    "empty": ("empty context", ":"),
    "recorded": ("recorded episodes before it", "o"),
    "other": ("another task's before it", "x"),
}
"""Words and line style of each context."""

SPARE = GREY, INK, PALE_BLUE
"""For agents of names outside of AGENTS."""

TARGET = "return that agents are conditioned on"

Results = dict[str, Any]


def agent(results: Results) -> str:
    """Returns the name, of AGENTS, of what was rolled out."""
    method = results["config"]["agent"]["method"]
    if method == "perceptron":
        return "behaviour cloning"
    if results["config"]["agent"]["chain_length"] == 1:
        return "Decision Transformer"
    data = results["config"]["data"]
    if data.get("predict") == "targets":
        return "Decision-Pretrained Transformer"
    if data["chain_order"] == "learnt":
        return "Algorithm Distillation"
    is_sorted = data["chain_order"] == "ascending"
    return "Agentic Transformer" + ("" if is_sorted else ", unsorted chains")


def read(files: Sequence[str]) -> dict[str, dict[str, Results]]:
    """Returns results by task and agent.

    files: paths, or NAME=path for an agent of another name than `agent` gives.

    Raises:
      ValueError: a file holds no results, or two are of one agent, or of one task and
        conditioned on different returns.
    """
    found: dict[str, dict[str, Results]] = {}
    for file in files:
        named, _, path = file.rpartition("=")
        text = Path(path).read_text()
        try:
            results = parse_json(text)
            name = named or agent(results)
            if "none" in results["contexts"]:
                raise ValueError("in many worlds: use `tools.figures worlds`")
            runs = found.setdefault(results["task"], {})
            for context, outcome in results["contexts"].items():
                curve(outcome), CONTEXTS[context]
            targets = {run["target"] for run in [*runs.values(), results]}
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(
                f"{path} holds no results of tools.evaluate exorl "
                f"({type(error).__name__}: {error})"
            ) from error
        if name in runs or len(targets) > 1:
            wrong = f"{name} is there already"
            if name not in runs:
                wrong = f"agents have targets {' and '.join(map(str, targets))}"
            raise ValueError(
                f"{path}, {results['task']}: {wrong}; draw them apart, or call one "
                "NAME=FILE"
            )
        runs[name] = results
    return found


def curve(outcome: dict[str, Any]) -> tuple[np.ndarray, ...]:
    """Returns episodes, and low, mean and high of their returns, (n,) each.

    Raises:
      ValueError: there is not a finite return for every environment and episode.
    """
    returns = np.array(outcome["returns"], float)
    if returns.ndim != 2 or not returns.size or not np.isfinite(returns).all():
        raise ValueError(
            f"returns of shape {returns.shape} must be finite, (environments, episodes)"
        )
    before = len(outcome["recorded_returns"][0])
    episodes = before + np.arange(1, returns.shape[1] + 1)
    bounds = [interval(column) for column in returns.T]
    parts = ("low", "mean", "high")
    return episodes, *(np.array([b[part] for b in bounds]) for part in parts)


def curves(tasks: dict[str, dict[str, Results]]) -> Figure:
    """Draws a panel for each task."""
    names = dict.fromkeys(name for runs in tasks.values() for name in runs)
    colours = colours_of(list(names))
    figure = Figure(figsize=(5.6 * len(tasks), 5.4), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(tasks)))
    for axes, (task, runs) in zip(panels, tasks.items(), strict=True):
        _draw_panel(axes, task, runs, colours)
    figure.suptitle(
        "Returns by episode\nbands and bars: 95 % intervals over the environments",
        color=INK,
        fontsize=12,
    )
    return figure


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """Returns a colour for each agent; names outside of AGENTS take those of SPARE.

    Raises:
      ValueError: SPARE has too few.
    """
    others = [name for name in names if name not in AGENTS]
    if len(others) > len(SPARE):
        raise ValueError(f"{len(others)} agents of other names, at most {len(SPARE)}")
    return AGENTS | dict(zip(others, SPARE, strict=False))


def _draw_panel(
    axes: Axes, task: str, runs: dict[str, Results], colours: dict[str, str]
) -> None:
    """Draws one task: a colour for each agent, a style for each context."""
    last = 1
    for name, results in runs.items():
        colour = colours[name]
        for context, outcome in results["contexts"].items():
            episodes, low, mean, high = curve(outcome)
            last = max(last, episodes[-1])
            words, look = CONTEXTS[context]
            # What has no context has nothing before it either.
            label = name if name == "behaviour cloning" else f"{name}, {words}"
            axes.plot(episodes, mean, look, color=colour, label=label, markersize=6)
            if look in "-:":
                axes.fill_between(episodes, low, high, color=colour, alpha=0.12, lw=0)
            else:
                errors = [mean - low, high - mean]
                axes.errorbar(episodes, mean, errors, color=colour, fmt="none", lw=1)
    target = next(iter(runs.values()))["target"]
    axes.axhline(target, color=GREY, linestyle="--", linewidth=1, label=TARGET)
    style(axes, title=task, x="episode", y="return")
    axes.set_xticks(range(1, last + 1))
    axes.set_ylim(bottom=0)
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14), "ncols": 1}
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, **below)
