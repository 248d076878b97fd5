"""Returns of agents in worlds that they were not trained on, by what they have read.

From files that `evaluate exorl` wrote, for each agent and seed; contexts may be in
files of their own. Left: episode by episode. Right: after episodes of drawn actions, by
their number. Bands are bootstrap intervals (95 %) over worlds and seeds.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from data.json_text import parse_json
from tools.lib.exorl.scores import interval, of_worlds
from tools.lib.figures.returns import agent, colours_of
from tools.lib.figures.style import GREY, INK, style

LOOKS = {
    "own": ("own episodes before", "-"),
    "empty": ("emptied before every episode", "--"),
    "none": ("emptied before every step", ":"),
    "other": ("own of another world before", "x"),
}
"""Words and look of each context, left."""
RANDOM = "random_"
Runs = list[dict[str, Any]]
"""Results of one agent in one task, of several seeds."""


def read(files: Sequence[Path]) -> dict[str, dict[str, Runs]]:
    """Returns results by task and agent, with the mean of the rows of each world.

    Raises:
      ValueError: a file holds no results in many worlds that were held out; or it has
        a context that was there for its seed, or other worlds or episodes than another.
    """
    found: dict[str, dict[str, Runs]] = {}
    for file in files:
        try:
            results = parse_json(Path(file).read_text())
            runs = found.setdefault(results["task"], {}).setdefault(agent(results), [])
            seed = results["config"]["seed"]
            same = [run for run in runs if run["config"]["seed"] == seed]
            there = {context for run in same for context in run["contexts"]}
            both = sorted(there & set(results["contexts"]))
            for outcome in results["contexts"].values():
                returns = np.array(outcome["returns"], float)
                # Rows that do not say their worlds are of one each.
                of_rows = np.array(results.get("worlds", range(len(returns))))
                outcome["returns"] = of_worlds(returns, of_rows)
            results["worlds"] = np.unique(of_rows).tolist()
            results["references"]["oracle"]
            if results.get("trained_on"):
                raise ValueError("its worlds were trained on: leave out --trained")
            _check_alike(results, runs)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{file} holds no results of tools.evaluate exorl in many worlds "
                f"({type(error).__name__}: {error})"
            ) from error
        if both:
            raise ValueError(
                f"{file}: {agent(results)} with seed {seed} in {results['task']} has "
                f"{', '.join(both)} already: give each context of a seed once"
            )
        if same:
            same[0]["contexts"] |= results["contexts"]
        else:
            runs.append(results)
    return found


def _check_alike(results: dict[str, Any], runs: Runs) -> None:
    """Raises ValueError if results have other worlds or episodes than those before."""
    for run in runs:
        if results["worlds"] != run["worlds"]:
            raise ValueError("its worlds are not those of the other files")
        for name in results["contexts"].keys() & run["contexts"].keys():
            one, other = (
                x["contexts"][name]["returns"].shape[1] for x in (results, run)
            )
            if one != other:
                raise ValueError(f"{one} episodes of {name!r}, {other} in another file")


def returns_of(runs: Runs, context: str) -> np.ndarray:
    """Returns what the agents got, (seeds that have the context, worlds, episodes)."""
    there = [run["contexts"] for run in runs if context in run["contexts"]]
    return np.array([found[context]["returns"] for found in there], float)


def bounds(returns: np.ndarray) -> np.ndarray:
    """Returns low, mean and high of returns (seeds, E, episodes): (3, episodes)."""
    found = [interval(column) for column in np.moveaxis(returns, -1, 0)]
    return np.array([[b[part] for b in found] for part in ("low", "mean", "high")])


def curves(tasks: dict[str, dict[str, Runs]]) -> Figure:
    """Draws a panel for each task, and one of what was read, if any agent did."""
    names = list(dict.fromkeys(name for runs in tasks.values() for name in runs))
    colours = colours_of(names)
    groups = [runs for agents in tasks.values() for runs in agents.values()]
    columns = 2 if any(map(_read_counts, groups)) else 1
    size = (5.6 * columns, 5.2 * len(tasks))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(tasks), columns, squeeze=False)
    for row, (task, agents) in zip(panels, tasks.items(), strict=True):
        _by_episode(row[0], task, agents, colours)
        for right in row[1:]:
            _by_context(right, agents, colours)
    figure.suptitle(
        "Returns in held-out worlds; 95 % over worlds and seeds",
        color=INK,
        fontsize=12,
    )
    return figure


def _by_episode(
    axes: Axes, task: str, agents: dict[str, Runs], colours: dict[str, str]
) -> None:
    drawn = {}
    for name, runs in agents.items():
        label = name  # of its first line alone; looks are named below
        for context, (words, look) in LOOKS.items():
            found = [r["contexts"][context] for r in runs if context in r["contexts"]]
            if not found:
                continue
            low, mean, high = bounds(returns_of(runs, context))
            before = len(found[0]["recorded_returns"][0])
            episodes = before + np.arange(1, len(mean) + 1)
            colour = colours[name]
            axes.plot(episodes, mean, look, color=colour, label=label, markersize=7)
            label, drawn[words] = None, look
            if look == "x":
                errors = [mean - low, high - mean]
                axes.errorbar(episodes, mean, errors, color=colour, fmt="none", lw=1)
            else:
                axes.fill_between(episodes, low, high, color=colour, alpha=0.12, lw=0)
    for words, look in drawn.items():
        axes.plot([], [], look, color=INK, label=words)
    _references(axes, agents, with_learner=True)
    style(axes, title=task, x="episode", y="return")
    _legend(axes)


def _read_counts(runs: Runs) -> list[int]:
    """Returns of how many drawn episodes there are contexts, increasing."""
    contexts = {c for run in runs for c in run["contexts"] if c.startswith(RANDOM)}
    return sorted(int(context.removeprefix(RANDOM)) for context in contexts)


def _by_context(axes: Axes, agents: dict[str, Runs], colours: dict[str, str]) -> None:
    for name, runs in agents.items():
        counts = _read_counts(runs)
        if not counts:
            continue
        each = [bounds(returns_of(runs, f"{RANDOM}{count}"))[:, 0] for count in counts]
        low, mean, high = np.array(each).T
        axes.plot(counts, mean, "o-", color=colours[name], label=name)
        axes.fill_between(counts, low, high, color=colours[name], alpha=0.12, lw=0)
        axes.set_xscale("log")
    _references(axes, agents, with_learner=False)
    title, x = "one episode, after others' of drawn actions", "episodes in the context"
    style(axes, title=title, x=x, y="return")
    _legend(axes)


def _references(axes: Axes, agents: dict[str, Runs], *, with_learner: bool) -> None:
    """Draws who knows the world, chance, and a learner with a table, in grey."""
    known = next(iter(agents.values()))[0]["references"]
    axes.axhline(known["oracle"], color=GREY, ls="--", lw=1, label="knows the world")
    axes.axhline(known["random"], color=GREY, ls=":", lw=1, label="random actions")
    if with_learner and "tabular" in known:
        learner = known["tabular"]
        episodes = range(1, len(learner) + 1)
        axes.plot(episodes, learner, color=GREY, lw=1, label="Q-learning from nothing")


def _legend(axes: Axes) -> None:
    axes.set_ylim(bottom=0)
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14), "ncols": 1}
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, **below)
