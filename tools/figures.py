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

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from data.json_text import parse_json
from tasks.command_line import Parser, as_program
from tools.lib.exorl.results import CONTEXTS, RANDOM, Runs, read_returns, summary
from tools.lib.exorl.scores import interval
from tools.lib.files import replacing, write_json

INK, GREY = "#1b2733", "#5c6b7a"
"""Of titles and labels; of reference lines."""

COLOURS = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"
"""Of agents: those of Okabe and Ito, which colour-blind readers tell apart."""


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
    colours = dict(zip(names, COLOURS, strict=False))
    groups = [runs for agents in tasks.values() for runs in agents.values()]
    columns = 2 if any(map(_drawn_counts, groups)) else 1
    size = (max(5.4 * columns, 7), 4.2 * len(tasks) + 1)
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
            axes.set_ylabel("return (sum of rewards)", color=INK)
            axes.spines[["top", "right"]].set_visible(False)
            # Of an axis with 0, so that a level's label stays below the title.
            low = min(axes.dataLim.y0, 0)
            high = max(axes.dataLim.y1, 0)
            margin = 0.06 * (high - low) or 1
            axes.set_ylim(low - margin * (low < 0), high + margin)
    figure.suptitle("Returns, with 95 % intervals", color=INK, fontsize=12)
    _explain(figure, colours)
    return figure


def _explain(figure: Figure, colours: dict[str, str]) -> None:
    """Adds one legend below all panels: agents by colour, contexts by their look."""
    shown: dict[str, Line2D] = {}
    for axes in figure.axes:
        for line in axes.lines:
            shown.setdefault(str(line.get_label()), line)
    handles = [Line2D([], [], color=colours[name], label=name) for name in colours]
    for words, look in CONTEXTS.values():
        if any(label.endswith(f", {words}") for label in shown):
            handles.append(Line2D([], [], **_line(look), color=INK, label=words))
    for words, _ in LEARNERS.values():
        if words in shown:
            handles.append(shown[words])
    below = {"loc": "outside lower center", "ncols": 2, "frameon": False}
    figure.legend(handles=handles, fontsize=9, labelcolor=INK, **below)


def _line(look: str) -> dict[str, str]:
    """Returns how a context's look is drawn: a line's style, or a marker."""
    return {"ls": "", "marker": look} if look in "xo" else {"ls": look}


def _by_episode(axes: Axes, runs: Runs, colour: str, name: str) -> None:
    for context, (words, look) in CONTEXTS.items():
        having = [run for run in runs if context in run["contexts"]]
        if not having:
            continue
        low, mean, high = bounds(runs, context)
        before = having[0]["contexts"][context]["before"]
        episodes = before + np.arange(1, len(mean) + 1)
        made = {"color": colour, "label": f"{name}, {words}", "clip_on": False}
        axes.plot(episodes, mean, **_line(look), **made)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlim(left=0.5)  # there is no episode 0
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
        axes.set_xticks(counts)
        axes.set_xticks([], minor=True)
        axes.xaxis.set_major_formatter("{x:g}")


PANELS = {"episode": _by_episode, "drawn episodes read (log scale)": _by_drawn}
"""What draws each column of panels, by its horizontal axis."""


LEARNERS = {
    "tabular": ("Q-learning from scratch", "-."),
    "explorer": ("nearest unseen cell, then the goal", (0, (1, 1))),
}
"""Words and look of what learns or explores without an agent."""


def _references(axes: Axes, runs: Runs, x: str) -> None:
    """Draws in grey the levels that returns are compared with."""
    known = {k: v for run in runs for k, v in run["references"].items()}
    levels = {"oracle": "knows the world", "random": "random actions"}
    shown = {words: known[key] for key, words in levels.items() if key in known}
    if not shown:
        shown = {"return that agents are conditioned on": runs[0]["target"]}
    beside = {"transform": axes.get_yaxis_transform(), "va": "center", "ha": "left"}
    for words, level in shown.items():
        axes.axhline(level, color=GREY, lw=0.8)
        axes.text(1.01, level, words, color=GREY, fontsize=8, **beside)
    for key, (words, look) in LEARNERS.items():
        if x == "episode" and (learner := known.get(key)):
            episodes = range(1, len(learner) + 1)
            axes.plot(episodes, learner, ls=look, color=GREY, lw=1.5, label=words)


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
