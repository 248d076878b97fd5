"""Colours, axes, legends, and the PNG file: the same for every picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tools.lib.files import replacing

DOTS_PER_INCH = 160

INK, GREY = "#1b2733", "#5c6b7a"
"""Of titles and labels; of notes and reference lines."""

COLOURS = (
    *("#0d3f6e", "#c2571a", "#3d8a5f", "#8a5fa8", "#b08a2e", "#c75b8e", "#7fb0d6"),
    *("#6f7d2a", "#7a4b2b", "#2a9d9d"),
)


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """Returns a colour for each name, in their order.

    Raises:
      ValueError: there are more names than colours.
    """
    names = list(dict.fromkeys(names))
    if len(names) > len(COLOURS):
        raise ValueError(
            f"{len(names)} names need a colour each, and there are {len(COLOURS)}: "
            "draw them in several pictures"
        )
    return dict(zip(names, COLOURS, strict=False))


def style(axes: Axes, *, title: str = "", x: str = "", y: str = "") -> Axes:
    """Writes title and labels in INK and removes the frame; returns the axes."""
    axes.set_title(title, color=INK, fontsize=11)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.tick_params(labelcolor=INK, color=GREY)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def write_picture(path: Path, figure: Figure) -> None:
    """Writes a PNG, in place of any earlier one.

    Raises:
      ValueError: the folder does not exist, or the path is a folder.
      OSError: it cannot be written to.
    """
    if path.is_dir() or not path.parent.is_dir():
        wrong = f"{path} is" if path.is_dir() else f"{path.parent} is not"
        raise ValueError(f"{wrong} a directory: give the path of a PNG in one")
    with replacing(path) as part:
        figure.savefig(part, format="png", dpi=DOTS_PER_INCH)
