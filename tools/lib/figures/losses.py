"""Losses by the position of the tokens, a curve for each evaluation."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from tools.lib.figures.style import BLUE, GREEN, GREY, OCHRE, ORANGE, VIOLET, style

FIELDS = "run", "corpus", "by", "from", "below", "loss", "standard_error"
"""Required of every row."""

COLOURS = BLUE, ORANGE, GREEN, VIOLET, OCHRE, GREY


def curves(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draws the loss of each part of the positions, with its standard error.

    Raises:
      ValueError: there are no rows of parts, more evaluations than colours, or
        positions in documents beside those in rows.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["below"]:
            found.setdefault(f"{row['run']} on {row['corpus']}", []).append(row)
    ways = {row["by"] for row in rows}
    if not 1 <= len(found) <= len(COLOURS) or len(ways) > 1:
        raise ValueError(
            f"{len(found)} evaluations by {', '.join(sorted(ways)) or 'nothing'}: give "
            f"1 to {len(COLOURS)}, all by document or all by row"
        )
    figure = Figure(figsize=(8, 4.4), facecolor="white", layout="tight")
    axes = figure.subplots()
    for (name, parts), colour in zip(found.items(), COLOURS, strict=False):
        # In the middle of a part, by its logarithm; position 0 has none.
        x = [max(part["from"], 0.5) * 2**0.5 for part in parts]
        y = [part["loss"] for part in parts]
        error = [part["standard_error"] or 0 for part in parts]
        line = {"color": colour, "marker": "o", "markersize": 4, "capsize": 3}
        axes.errorbar(x, y, error, label=name, **line)
    axes.set_xscale("log", base=2)
    axes.legend(frameon=False)
    (by,) = ways
    style(axes, x=f"position in the {by}, tokens", y="loss, nats a token")
    return figure
