"""Returns of agents in worlds that they were not trained on, by what they have read.

From files that `evaluate exorl` wrote, for each agent and seed; contexts may be in
files of their own. Left: episode by episode. Right: after episodes of drawn actions, by
their number. Bands are bootstrap intervals (95 %) over worlds and seeds.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from configs import base
from data.json_text import parse_json
from tasks import exorl
from tasks.config_errors import fields_by_name
from tools.lib.exorl.scores import interval, of_worlds
from tools.lib.figures.returns import agent, colours_of
from tools.lib.figures.style import GREY, INK, style
from training.stored_step import differences

LOOKS = {
    "own": ("own episodes before", "-"),
    "empty": ("emptied before every episode", "--"),
    "none": ("emptied before every step", ":"),
    "other": ("own of another world before", "x"),
}
"""Words and look of each context, left."""
RANDOM = "random_"
TRAINED_BY = (
    *(f"data.{name}" for name in exorl.DATA_FIELDS if name != "trajectories"),
    "data.batch_rows",
    "data.context_tokens",
    "train.steps",
)
"""Fields that make an agent, besides those of its model and optimizer."""
Runs = list[dict[str, Any]]
"""Results of one agent in one task, of several seeds."""


def read(files: Sequence[Path]) -> dict[str, dict[str, Runs]]:
    """Returns results by task and agent, with the mean of the rows of each world.

    Raises:
      ValueError: a file holds no results in many worlds that were held out; it has a
        context that was there for its seed; or it differs from another in what would
        make their means mean nothing.
    """
    found: dict[str, dict[str, Runs]] = {}
    for file in files:
        try:
            results = _of_worlds(parse_json(Path(file).read_text()))
            agents = found.setdefault(results["task"], {})
            runs = agents.setdefault(agent(results), [])
            _check_alike(results, runs, [run for r in agents.values() for run in r])
            seed = results["config"]["seed"]
            same = [run for run in runs if run["config"]["seed"] == seed]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{file} holds no results of tools.evaluate exorl in many worlds, or "
                f"not of the kind of the other files ({type(error).__name__}: {error})"
            ) from error
        there = {context for run in same for context in run["contexts"]}
        if both := sorted(there & set(results["contexts"])):
            raise ValueError(
                f"{file}: {agent(results)} with seed {seed} in {results['task']} has "
                f"{', '.join(both)} already: give each context of a seed once"
            )
        if not same:
            runs.append(results)
            continue
        same[0]["contexts"] |= results["contexts"]
        both = [same[0]["references"], results["references"]]
        same[0]["references"] = max(both, key=_learnt)
    return found


def _of_worlds(results: dict[str, Any]) -> dict[str, Any]:
    """Returns results with the mean of the rows of each world, and how each was drawn.

    Raises:
      ValueError, KeyError, TypeError: they are none in worlds that were held out.
    """
    for outcome in results["contexts"].values():
        returns = np.array(outcome["returns"], float)
        # Rows that do not say their worlds are of one each.
        of_rows = np.array(results.get("worlds", range(len(returns))))
        outcome["returns"] = of_worlds(returns, of_rows)
        drawn = results.get("temperature", 1.0), results.get("hold", 1)
        drawn += (results.get("window"),)
        outcome["drawn"] = "temperature {} held for {}, window {}".format(*drawn)
    results["worlds"] = np.unique(of_rows).tolist()
    results["references"]["oracle"]
    if results.get("trained_on"):
        raise ValueError("its worlds were trained on: leave out --trained")
    return results


def _check_alike(results: dict[str, Any], runs: Runs, others: Runs) -> None:
    """Refuses results that no mean can be taken of with those before.

    runs: of the same agent. others: of the same task.

    Raises:
      ValueError: other worlds, or of the agent other settings, data or episodes.
    """
    if any(run["worlds"] != results["worlds"] for run in others):
        raise ValueError("its worlds are not those of the other files")
    for run in runs:
        for name, (old, new) in differences(_settings(run), _settings(results)).items():
            raise ValueError(f"{name} is {new}, in another file {old}")
        digests = [x["digests"] for x in (run, results) if "digests" in x]
        is_same = run["config"]["seed"] == results["config"]["seed"]
        for name in ("trajectories", *["parameters"] * is_same):
            if len({of_file[name] for of_file in digests}) > 1:
                raise ValueError(f"its {name} are not those of another file")
        for name in results["contexts"].keys() & run["contexts"].keys():
            new, old = (_played(x["contexts"][name]) for x in (results, run))
            if new != old:
                raise ValueError(f"{name!r} is {new}, in another file {old}")


def _settings(results: dict[str, Any]) -> dict[str, Any]:
    """Returns what makes an agent, by name; of older programs with today's defaults."""
    given = fields_by_name(ml_collections.ConfigDict(results["config"]))
    fields = fields_by_name(base.get_config()) | given
    found = {
        name: value
        for name, value in fields.items()
        if name.split(".")[0] in ("agent", "model", "optimizer") or name in TRAINED_BY
    }
    return found | {"step": results.get("step")}


def _played(outcome: dict[str, Any]) -> str:
    """Says how many episodes were played, and how."""
    before, played = len(outcome["recorded_returns"][0]), outcome["returns"].shape[1]
    return f"{before} + {played} episodes, {outcome['drawn']}"


def _learnt(references: dict[str, Any]) -> int:
    """Returns of how many episodes references have what a learner gets."""
    return len(references.get("tabular", ()))


def references(agents: dict[str, Runs]) -> dict[str, Any]:
    """Returns what a task's agents are compared with, for as long as any has it."""
    found = [run["references"] for runs in agents.values() for run in runs]
    return max(found, key=_learnt)


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
        axes.plot([], [], color=colours[name], label=name)
        for context, (words, look) in LOOKS.items():
            found = [r["contexts"][context] for r in runs if context in r["contexts"]]
            if not found:
                continue
            low, mean, high = bounds(returns_of(runs, context))
            before = len(found[0]["recorded_returns"][0])
            episodes = before + np.arange(1, len(mean) + 1)
            colour = colours[name]
            axes.plot(episodes, mean, look, color=colour, markersize=7)
            drawn[words] = look
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
    """Draws two levels with their names, and a learner with a table, in grey."""
    known, left = references(agents), axes.get_yaxis_transform()
    for key, words in ("oracle", "knows the world"), ("random", "random actions"):
        axes.axhline(known[key], color=GREY, lw=1)
        place = {"transform": left, "va": "bottom", "ha": "right"}
        axes.text(0.99, known[key], words, color=GREY, fontsize=8, **place)
    if with_learner and "tabular" in known:
        learner = known["tabular"]
        episodes = range(1, len(learner) + 1)
        axes.plot(episodes, learner, color=GREY, lw=1, label="Q-learning from nothing")


def _legend(axes: Axes) -> None:
    axes.set_ylim(bottom=0)
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14), "ncols": 1}
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, **below)
