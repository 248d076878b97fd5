"""Draws returns of agents by episode, from the rows that `evaluate exorl` wrote.

    python -m tools.figures returns results/cpu/exorl_*_{at,bc,dt}.json --output x.png
    python -m tools.figures summary rows.json --output results/cpu/agent.json

Takes a file for each agent and seed. A second panel has the returns by the drawn
episodes that were read before, if any were. Prints the numbers. A summary has the mean
of each world's rows in place of the rows: the same picture, from fewer bytes.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from configs import agents as agents_config
from data.json_text import parse_json, short
from tasks import exorl
from tasks.command_line import Parser, as_program
from tasks.config_errors import fields_by_name
from tools.lib.exorl.scores import interval, of_worlds
from tools.lib.files import replacing, write_json
from training.saved.record import is_old
from training.saved.stored_step import differences

INK, GREY = "#1b2733", "#5c6b7a"
"""Of titles and labels; of reference lines."""

CONTEXTS = {
    "own": ("own episodes before", "-"),
    "empty": ("emptied before every episode", "--"),
    "none": ("emptied before every step", ":"),
    "recorded": ("recorded episodes before", "o"),
    "other": ("another task's or world's before", "x"),
}
"""Words and look of each context."""
RANDOM = "random_"
"""Beginning of the names of contexts with drawn episodes; their number follows."""

TRAINED_BY = (
    *(f"data.{name}" for name in exorl.DATA_FIELDS if name != "trajectories"),
    *("data.batch_rows", "data.context_tokens", "train.steps"),
)
"""Fields that make an agent, besides those of its model and optimizer."""

Runs = list[dict[str, Any]]
"""Results of one agent in one task, of several seeds."""


def agent(results: dict[str, Any]) -> str:
    """Returns the name of the method that trained the agent."""
    made = results["config"]["agent"]
    data = results["config"]["data"]
    sees_one = results["config"].get("model", {}).get("window") == 1
    if sees_one or made.get("method") == "perceptron":  # as it was once
        return "behaviour cloning"
    if made["chain_length"] == 1:
        return "Decision Transformer"
    if data.get("predict") == "targets":
        return "Decision-Pretrained Transformer"
    if data["chain_order"] == "learnt":
        return "Algorithm Distillation"
    is_sorted = data["chain_order"] == "ascending"
    return "Agentic Transformer" + ("" if is_sorted else ", unsorted chains")


def read_returns(files: Sequence[Path]) -> dict[str, dict[str, Runs]]:
    """Returns results of `evaluate exorl` by task and agent, a mean for each world.

    files: one for each agent and seed, or for some contexts of it.

    Raises:
      ValueError: a file holds no results, a context of a seed twice, or results whose
        mean with the other files' would mean nothing.
    """
    found: dict[str, dict[str, Runs]] = {}
    for file in files:
        try:
            results = _by_world(parse_json(Path(file).read_text()))
            name = agent(results)
            seed = results["config"].setdefault("seed", 0)
            agents = found.setdefault(results["task"], {})
            for other, runs in agents.items():
                for run in runs:
                    _check_alike(run, results, is_same_agent=other == name)
            runs = agents.setdefault(name, [])
            same = [run for run in runs if run["config"]["seed"] == seed]
            there = {context for run in same for context in run["contexts"]}
            if both := sorted(there & set(results["contexts"])):
                raise ValueError(
                    f"{name} with seed {seed} in {results['task']} has "
                    f"{', '.join(both)} already: give each context of a seed once"
                )
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(
                f"{file} holds no results of tools.evaluate exorl, or not of the kind "
                f"of the other files ({type(error).__name__}: {error})"
            ) from error
        if same:
            same[0]["contexts"] |= results["contexts"]
            known = same[0]["references"]
            for reference, new in results["references"].items():
                # An explorer's are of as many episodes as the file's contexts have.
                known[reference] = max(known.get(reference, new), new, key=np.size)
        else:
            runs.append(results)
    return found


def _by_world(results: dict[str, Any]) -> dict[str, Any]:
    """Returns results with the mean of the rows of each world, and how each was drawn.

    Raises:
      ValueError, KeyError, TypeError: they have another form, or are of worlds that
        the agent was trained on.
    """
    contexts = results["contexts"]
    if not contexts:
        raise ValueError("it has no contexts")
    split = "train" if results.get("trained_on") else results.get("split", "test")
    if split != "test":
        raise ValueError(f"its worlds are of split {split}: leave out --split")
    drawn = results.get("temperature", 1.0), results.get("hold", 1)
    how = "temperature {} held for {}, window {}".format(*drawn, results.get("window"))
    results.setdefault("references", {})
    for name, outcome in contexts.items():
        returns = np.array(outcome["returns"], float)
        if returns.ndim != 2 or not returns.size or not np.isfinite(returns).all():
            raise ValueError(
                f"returns of shape {returns.shape} must be finite, (rows, episodes)"
            )
        # Rows that do not name their worlds are of one each.
        of_rows = np.array(results.get("worlds", range(len(returns))))
        # Rows of one world stay, for an interval; they are independent of each other.
        is_one = len(np.unique(of_rows)) == 1
        groups = np.arange(len(returns)) if is_one else of_rows
        outcome["returns"] = of_worlds(returns, groups)
        # The best of a row's episodes, and not of their mean; a summary has it.
        best = returns[:, : max(returns.shape[1] - 1, 1)].max(axis=1)
        best = np.array(outcome.get("best_before", best), float)
        outcome["best_before"] = of_worlds(best, groups)
        before = len(outcome["recorded_returns"][0])
        outcome["before"] = before
        means = f"{len(outcome['returns'])} worlds or rows"
        outcome["drawn"] = f"{before} + {returns.shape[1]} episodes, {how}, {means}"
        if not name.startswith(RANDOM):
            CONTEXTS[name]
    results["worlds"] = np.unique(of_rows).tolist()
    return results


def _check_alike(
    before: dict[str, Any], results: dict[str, Any], is_same_agent: bool
) -> None:
    """Raises ValueError if no picture can have these results beside earlier ones.

    Of one task the worlds must be the same, and of one agent all that made it.
    """
    both = before, results
    facts = [{name: x.get(name) for name in ("worlds", "target")} for x in both]
    if is_same_agent:
        contexts = before["contexts"].keys() & results["contexts"].keys()
        digests = ["trajectories"]
        if before["config"]["seed"] == results["config"]["seed"]:
            digests.append("parameters")
        if not all("digests" in x for x in both):
            digests.clear()
        for found, x in zip(facts, both, strict=True):
            found |= _settings(x) | {name: x["digests"][name] for name in digests}
            found |= {repr(name): x["contexts"][name]["drawn"] for name in contexts}
    for name, (old, new) in differences(*facts).items():
        raise ValueError(f"{name} is {short(new)}, in another file {short(old)}")


def _settings(results: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that make an agent, by name; older results get defaults."""
    given = fields_by_name(ml_collections.ConfigDict(results["config"]))
    fields = fields_by_name(agents_config.get_config()) | given
    found = {
        name: value
        for name, value in fields.items()
        if (name.split(".")[0] in ("agent", "model", "optimizer") or name in TRAINED_BY)
        and not is_old(name, value)
    }
    return found | {"step": results.get("step")}


def summary(results: dict[str, Any]) -> dict[str, Any]:
    """Returns results with means of each world's rows, without the rows' own numbers.

    What makes the agent, its versions and scores stay; the seed of each episode goes.

    Raises:
      ValueError, KeyError, TypeError: as `_by_world`.
    """
    kept = {name: value for name, value in results.items() if name != "seeds"}
    rows_of_world = kept.get("worlds")
    kept = _by_world(kept)
    if len(kept["worlds"]) == 1:
        kept["worlds"] = rows_of_world  # rows of one world stay
    for outcome in kept["contexts"].values():
        outcome["returns"] = outcome["returns"].round(4).tolist()
        outcome["best_before"] = outcome["best_before"].round(4).tolist()
        recorded = np.array(outcome["recorded_returns"], float)
        outcome["recorded_returns"] = [recorded.mean(axis=0).round(4).tolist()]
        for name in ("before", "drawn"):
            del outcome[name]
    return kept


def of_runs(runs: Runs, context: str, part: str = "returns") -> np.ndarray:
    """Returns what runs have of a context: (runs that have it, worlds or rows, …)."""
    there = [run["contexts"][context] for run in runs if context in run["contexts"]]
    return np.array([outcome[part] for outcome in there], float)


def bounds(runs: Runs, context: str) -> np.ndarray:
    """Returns low, mean and high (95 % over seeds and worlds) of returns, (3, n)."""
    each = map(interval, np.moveaxis(of_runs(runs, context), -1, 0))
    parts = [[b[part] for part in ("low", "mean", "high")] for b in each]
    return np.array(parts).T


def last_over(runs: Runs) -> dict[str, dict[str, float]]:
    """Returns what the last own episode got above others, with intervals.

    Others are the first own one, the best before it, and the last of other contexts
    that the same seeds have.
    """
    contexts = {c for run in runs for c in run["contexts"]}
    if "own" not in contexts:
        return {}
    own = of_runs(runs, "own")
    others = {"its first": own[..., 0]}
    others["the best before"] = of_runs(runs, "own", "best_before")
    for context in sorted(contexts - {"own"}):
        others[f"that of {context}"] = of_runs(runs, context)[..., -1]
    return {
        name: interval(own[..., -1] - other)
        for name, other in others.items()
        if other.shape == own[..., -1].shape
    }


def table(tasks: dict[str, dict[str, Runs]]) -> str:
    """Returns the numbers of the picture: first, middle and last episode."""
    lines = []
    for task, agents in tasks.items():
        runs = next(iter(agents.values()))
        for name, known in runs[0]["references"].items():
            shown = known if isinstance(known, list) else [known]
            places = sorted({0, len(shown) // 2, len(shown) - 1})
            values = "  ".join(f"{shown[place]:6.1f}" for place in places)
            lines.append(f"{task}, reference {name}: {values}")
        for name, runs in agents.items():
            for context in dict.fromkeys(c for run in runs for c in run["contexts"]):
                columns = bounds(runs, context).T
                shown = columns[sorted({0, len(columns) // 2, len(columns) - 1})]
                text = "  ".join(f"{b:6.1f} ({a:.1f}-{c:.1f})" for a, b, c in shown)
                lines.append(f"{task}, {name}, {context}, {len(runs)} seeds: {text}")
            for other, over in last_over(runs).items():
                text = "{mean:.1f} ({low:.1f} to {high:.1f})".format(**over)
                lines.append(f"{task}, {name}, last own episode over {other}: {text}")
    return "\n".join(lines)


def returns(tasks: dict[str, dict[str, Runs]]) -> Figure:
    """Draws a panel for each task, and one by drawn episodes read, if any were."""
    names = dict.fromkeys(name for agents in tasks.values() for name in agents)
    colours = {name: f"C{number}" for number, name in enumerate(names)}
    groups = [runs for agents in tasks.values() for runs in agents.values()]
    columns = 2 if any(map(_drawn_counts, groups)) else 1
    size = (5.6 * columns, 6.4 * len(tasks))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(tasks), columns, squeeze=False)
    for row, (task, agents) in zip(panels, tasks.items(), strict=True):
        for axes, (x, draw) in zip(row, PANELS.items(), strict=False):
            for name, runs in agents.items():
                draw(axes, runs, colours[name], name)
            if not axes.lines:
                axes.set_axis_off()
                continue
            _references(axes, [run for runs in agents.values() for run in runs], x)
            axes.set_title(task, color=INK, fontsize=11)
            axes.set_xlabel(x, color=INK)
            axes.set_ylabel("return", color=INK)
            axes.spines[["top", "right"]].set_visible(False)
            # Of an axis with 0, so that a level's label stays below the title.
            low = min(axes.dataLim.y0, 0)
            high = max(axes.dataLim.y1, 0)
            margin = 0.06 * (high - low) or 1
            axes.set_ylim(low - margin * (low < 0), high + margin)
            below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.18), "ncols": 1}
            axes.legend(frameon=False, fontsize=8, labelcolor=INK, **below)
    figure.suptitle("Returns, with 95 % intervals", color=INK, fontsize=12)
    return figure


def _by_episode(axes: Axes, runs: Runs, colour: str, name: str) -> None:
    for context, (words, look) in CONTEXTS.items():
        found = [run["contexts"][context] for run in runs if context in run["contexts"]]
        if not found:
            continue
        low, mean, high = bounds(runs, context)
        episodes = found[0]["before"] + np.arange(1, len(mean) + 1)
        axes.plot(episodes, mean, look, color=colour, label=f"{name}, {words}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if look in "xo":
            error = [mean - low, high - mean]
            axes.errorbar(episodes, mean, error, color=colour, fmt="none", lw=1)
        else:
            axes.fill_between(episodes, low, high, color=colour, alpha=0.12, lw=0)


def _drawn_counts(runs: Runs) -> list[int]:
    """Returns the numbers of drawn episodes that contexts have, increasing."""
    contexts = {c for run in runs for c in run["contexts"] if c.startswith(RANDOM)}
    return sorted(int(context.removeprefix(RANDOM)) for context in contexts)


def _by_drawn(axes: Axes, runs: Runs, colour: str, name: str) -> None:
    if counts := _drawn_counts(runs):
        each = [bounds(runs, f"{RANDOM}{count}")[:, 0] for count in counts]
        low, mean, high = np.array(each).T
        axes.plot(counts, mean, "o-", color=colour, label=name)
        axes.fill_between(counts, low, high, color=colour, alpha=0.12, lw=0)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")


PANELS = {"episode": _by_episode, "drawn episodes read": _by_drawn}
"""What draws each column of panels, by its horizontal axis."""


def _references(axes: Axes, runs: Runs, x: str) -> None:
    """Draws in grey the levels that returns are compared with."""
    known = {k: v for run in runs for k, v in run["references"].items()}
    levels = {"oracle": "knows the world", "random": "random actions"}
    shown = {words: known[key] for key, words in levels.items() if key in known}
    if not shown:
        shown = {"return that agents are conditioned on": runs[0]["target"]}
    left = {"transform": axes.get_yaxis_transform(), "va": "bottom", "ha": "right"}
    for words, level in shown.items():
        axes.axhline(level, color=GREY, lw=1, linestyle="--")
        axes.text(0.99, level, words, color=GREY, fontsize=8, **left)
    learners = {"tabular": ("Q-learning from scratch", "-")}
    learners["explorer"] = "nearest unseen cell, then the goal", "--"
    for key, (words, look) in learners.items():
        if x == "episode" and (learner := known.get(key)):
            episodes = range(1, len(learner) + 1)
            axes.plot(episodes, learner, look, color=GREY, lw=1, label=words)


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    parser = Parser(__doc__)
    parser.add_argument("made", choices=("returns", "summary"))
    parser.add_argument("rows", nargs="+", type=Path, help="files of rows")
    parser.add_argument("--output", required=True, type=Path, help="PNG or JSON")
    chosen = parser.parse_args(arguments)

    tasks = read_returns(chosen.rows)
    print(table(tasks))
    if chosen.made == "summary":
        if len(chosen.rows) > 1:
            parser.error(f"a summary is of one file, got {len(chosen.rows)}")
        write_json(chosen.output, summary(parse_json(chosen.rows[0].read_text())))
    else:
        with replacing(chosen.output) as part:
            returns(tasks).savefig(part, format="png", dpi=110)
    print(f"written to {chosen.output}")


if __name__ == "__main__":
    sys.exit(main())
