"""Pictures of the papers' tables beside ours."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tools.picture import write_picture

INK, GREY = "#1b2733", "#5c6b7a"
PAPER, OURS, OFFLOADED = "#b9c4cf", "#2a70ab", "#0d3f6e"
SHADES = ("#7fb0d6", "#2a70ab", "#0d3f6e", "#c2571a")


def draw(found: dict[str, Any], folder: Path) -> None:
    """Writes the pictures of what `paper_tables.tables` found."""
    pictures = {
        "longest_contexts": longest_contexts(found["table_3"]),
        "dataset_flops": dataset_flops(found["figure_5"]),
        "striped_speed_up": striped_speed_up(found["speed_ups"]),
    }
    for name, figure in pictures.items():
        write_picture(folder / f"{name}.png", figure)


def longest_contexts(rows: list[dict[str, Any]]) -> Figure:
    """Table 3: bars of the paper's contexts and of ours that fit."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = _axes(figure, "tokens of one sequence")
    names: dict[tuple[str, str], dict[str, dict]] = {}
    for row in rows:
        names.setdefault((row["topology"], row["model"]), {})[row["remat"]] = row
    for place, by_remat in enumerate(names.values()):
        bars = [(next(iter(by_remat.values()))["paper_context"], PAPER, "paper")]
        for remat, colour in (("nothing", OURS), ("offload", OFFLOADED)):
            row = by_remat.get(remat)
            bars.append((row["context"] if row and row["fits"] else 0, colour, remat))
        for number, (context, colour, _) in enumerate(bars):
            axes.bar(place + 0.26 * (number - 1), context * 1024, 0.25, color=colour)
    for colour, label in (
        (PAPER, "Ring Attention, table 3"),
        (OURS, "compiled here, full rematerialisation"),
        (OFFLOADED, "and the layers' inputs in the host's memory"),
    ):
        axes.bar(0, 0, color=colour, label=label)
    axes.set_yscale("log", base=2)
    ticks = [2**power for power in range(20, 28)]
    axes.set_yticks(ticks, [f"{tick // 2**20} Mi" for tick in ticks])
    axes.set_ylim(2**19, 2**28)
    axes.set_xticks(range(len(names)), [f"{m}\n{t}" for t, m in names])
    figure.legend(frameon=False, loc="outside lower center", ncols=3, labelcolor=INK)
    axes.set_title("Longest contexts, compiled for the pods and not run", color=INK)
    return figure


def dataset_flops(rows: list[dict[str, Any]]) -> Figure:
    """Figure 5: (6h + s₂) / (6h + s₁) by context."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = _axes(figure, "FLOPs of a data set, in contexts of 4 Ki = 1")
    for model, colour in zip(_names(rows), SHADES, strict=False):
        mine = [row for row in rows if row["model"] == model]
        _line(axes, mine, "ratio", colour, model)
    axes.set_yscale("log")
    axes.legend(frameon=False, labelcolor=INK)
    return figure


def striped_speed_up(rows: list[dict[str, Any]]) -> Figure:
    """The most that striping can gain, by context, model and ring."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    rings = sorted({row["ring"] for row in rows})
    panels = figure.subplots(1, len(rings), sharey=True)
    for axes, ring in zip(panels, rings, strict=True):
        _style(axes, "striped over contiguous, at most" if ring == rings[0] else "")
        for model, colour in zip(_names(rows), SHADES, strict=False):
            mine = [r for r in rows if (r["model"], r["ring"]) == (model, ring)]
            _line(axes, sorted(mine, key=lambda r: r["context"]), "step", colour, model)
        limit = next(row["attention"] for row in rows if row["ring"] == ring)
        axes.axhline(limit, color=GREY, linestyle=":", label="attention alone")
        axes.set_title(f"ring of {ring}", color=INK)
        axes.legend(frameon=False, labelcolor=INK, loc="lower right")
    return figure


def _names(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in rows))


def _line(axes: Axes, rows: list[dict], field: str, colour: str, label: str) -> None:
    contexts = [row["context"] for row in rows]
    axes.plot(contexts, [row[field] for row in rows], "o-", color=colour, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens of context", color=INK)
    ticks = contexts[:: max(1, len(contexts) // 6)]
    axes.set_xticks(ticks, [_short(tick) for tick in ticks])


def _short(tokens: int) -> str:
    mebi = tokens / 2**20
    return f"{mebi:g} Mi" if mebi >= 1 else f"{tokens // 1024} Ki"


def _axes(figure: Figure, label: str) -> Axes:
    return _style(figure.subplots(), label)


def _style(axes: Axes, label: str) -> Axes:
    axes.set_ylabel(label, color=INK)
    axes.tick_params(labelcolor=INK, color=GREY)
    axes.spines[["top", "right"]].set_visible(False)
    return axes
