"""A figure as a PNG file."""

from pathlib import Path

from matplotlib.figure import Figure

DOTS_PER_INCH = 160


def write_picture(path: Path, figure: Figure) -> None:
    """Writes a PNG, under a temporary name until it is complete.

    Raises:
      OSError: there is no such folder, or it cannot be written to.
    """
    part = path.with_name(path.name + ".part")
    figure.savefig(part, format="png", dpi=DOTS_PER_INCH)
    part.replace(path)
