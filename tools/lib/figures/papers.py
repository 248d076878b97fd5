"""Pictures of the papers' tables with our rows."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tools.lib.figures.style import GREY, INK, MODELS, PROGRAMS, legend_below, style

BARS = {
    "paper": ("Ring Attention", "Ring Attention, table 3"),
    "nothing": ("this repository", "compiled here, full rematerialisation"),
    "offload": (
        "this repository, offloaded",
        "and the layers' inputs in the host's memory",
    ),
}
"""Program and label of each bar of the longest contexts."""


def pictures(found: dict[str, Any]) -> dict[str, Figure]:
    """Returns the pictures of `paper_tables.tables`, by name."""
    return {
        "longest_contexts": longest_contexts(found["table_3"]),
        "dataset_flops": dataset_flops(found["figure_5"]),
        "striped_speed_up": striped_speed_up(found["speed_ups"]),
    }


def longest_contexts(rows: list[dict[str, Any]]) -> Figure:
    """Draws table 3: bars of the paper's contexts and of ours that fit."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots()
    title = "Longest contexts, compiled for the pods and not run"
    style(axes, title=title, y="tokens of one sequence")
    pods: dict[tuple[str, str], dict[str, int]] = {}
    for row in rows:
        contexts = pods.setdefault((row["topology"], row["model"]), {})
        contexts["paper"] = row["paper_context"]
        if row["fits"]:
            contexts[row["remat"]] = row["context"]
    shown = {}
    for number, (name, (program, label)) in enumerate(BARS.items()):
        bars = [(i, pod[name]) for i, pod in enumerate(pods.values()) if name in pod]
        for place, context in bars:
            left, tokens = place + 0.26 * (number - 1), context * 1024
            axes.bar(left, tokens, 0.25, color=PROGRAMS[program])
        if bars:
            shown[label] = PROGRAMS[program]
    axes.set_yscale("log", base=2)
    ticks = [2**power for power in range(20, 28)]
    axes.set_yticks(ticks, [f"{tick // 2**20} Mi" for tick in ticks])
    axes.set_ylim(2**19, 2**28)
    axes.set_xticks(range(len(pods)), [f"{m.upper()}\n{t}" for t, m in pods])
    legend_below(figure, shown, 3)
    return figure


def dataset_flops(rows: list[dict[str, Any]]) -> Figure:
    """Draws figure 5: (6h + s₂) / (6h + s₁) by context."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    title = "FLOPs of a data set by context (Ring Attention, figure 5)"
    style(axes, title=title, y="relative to contexts of 4 Ki tokens")
    for model in _names(rows):
        _line(axes, [row for row in rows if row["model"] == model], "ratio", model)
    axes.set_yscale("log")
    axes.legend(frameon=False, labelcolor=INK)
    return figure


def striped_speed_up(rows: list[dict[str, Any]]) -> Figure:
    """Draws the most that striping can gain, by context, model and ring."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    rings = sorted({row["ring"] for row in rows})
    panels = figure.subplots(1, len(rings), sharey=True)
    for axes, ring in zip(panels, rings, strict=True):
        label = "speed over contiguous" if ring == rings[0] else ""
        style(axes, title=f"ring of {ring}", y=label)
        for model in _names(rows):
            mine = [r for r in rows if (r["model"], r["ring"]) == (model, ring)]
            _line(axes, sorted(mine, key=lambda r: r["context"]), "step", model)
        limit = next(row["attention"] for row in rows if row["ring"] == ring)
        axes.axhline(limit, color=GREY, linestyle=":", label="attention alone")
        axes.legend(frameon=False, labelcolor=INK, loc="lower right")
    title = "How much faster a striped step can be at most, by model and context"
    figure.suptitle(title, color=INK, fontsize=12)
    return figure


def _names(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in rows))


def _line(axes: Axes, rows: list[dict], field: str, model: str) -> None:
    contexts = [row["context"] for row in rows]
    values = [row[field] for row in rows]
    axes.plot(contexts, values, "o-", color=MODELS[model], label=model.upper())
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens of context", color=INK)
    ticks = [context for context in contexts if context.bit_count() == 1]
    ticks = ticks[:: max(1, len(ticks) // 6)]
    axes.set_xticks(ticks, [_short(tick) for tick in ticks])


def _short(tokens: int) -> str:
    mebi = tokens / 2**20
    return f"{mebi:g} Mi" if mebi >= 1 else f"{tokens // 1024} Ki"
