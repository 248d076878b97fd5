"""What pictures have in common: colours, axes, and the PNG file."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

DOTS_PER_INCH = 160

INK, GREY = "#1b2733", "#5c6b7a"
"""Of titles and labels; of what stands back."""

BLUE, PALE_BLUE, ORANGE, GREEN = "#0d3f6e", "#7fb0d6", "#c2571a", "#3d8a5f"
VIOLET, OCHRE, PINK = "#8a5fa8", "#b08a2e", "#c75b8e"

PROGRAMS = {
    "this repository": BLUE,
    "this repository, offloaded": PALE_BLUE,
    "Ring Attention": ORANGE,
    "cudnn": GREEN,
    "jax_mosaic_gpu": VIOLET,
    "tokamax": OCHRE,
    "torch_flash": PINK,
    "torch_cudnn": GREY,
}
"""Of what computes attention: the same in every picture."""

AGENTS = {
    "Agentic Transformer": BLUE,
    "Agentic Transformer, unsorted chains": ORANGE,
    "behaviour cloning": GREEN,
    "Decision Transformer": VIOLET,
}

MODELS = {
    "1b": PALE_BLUE,
    "3b": GREEN,
    "7b": BLUE,
    "13b": VIOLET,
    "30b": OCHRE,
    "65b": ORANGE,
}


def style(axes: Axes, *, title: str = "", x: str = "", y: str = "") -> Axes:
    """Titles, labels and ticks in INK, without a frame; returns the axes."""
    axes.set_title(title, color=INK, fontsize=11)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.tick_params(labelcolor=INK, color=GREY)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def write_picture(path: Path, figure: Figure) -> None:
    """Writes a PNG, under a temporary name until it is complete.

    Raises:
      ValueError: there is no such folder, or the path is one.
      OSError: it cannot be written to.
    """
    if path.is_dir() or not path.parent.is_dir():
        wrong = f"{path} is" if path.is_dir() else f"{path.parent} is not"
        raise ValueError(f"{wrong} a directory: give the path of a PNG in one")
    part = path.with_name(path.name + ".part")
    try:
        figure.savefig(part, format="png", dpi=DOTS_PER_INCH)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
