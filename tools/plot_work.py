"""Draws what each device of a ring computes in each hop, for every layout.

    python -m tools.plot_work --ring 4 --tiles 8 --output results

Causal attention. The counts come from the layouts and from the tile ranges that drive
the kernels' loops. All devices wait for the slowest one before keys and values travel
on, so a ring takes as long as the sum, over its hops, of the most that any device has
to compute: its critical path.

Writes `work_per_hop.png` and `work_per_hop.json` (the numbers in the picture) into the
output directory, in place of those of an earlier run.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from kernels.block_sizes import BlockSizes
from kernels.layouts import Contiguous, Layout, Striped, Zigzag
from kernels.masks import Mask, Visible, causal
from tasks.command_line import Parser, as_program, at_least
from tools.lib.benchmarks.work import balanced_tiles, critical_path, tiles_per_hop
from tools.lib.picture import GREY, INK, write_picture

LAYOUTS: dict[str, Layout] = {
    "contiguous": Contiguous(),
    "striped": Striped(),
    "zigzag": Zigzag(),
}

ORIGINS = {
    "contiguous": "Ring Attention",
    "striped": "Striped Attention",
    "zigzag": "two chunks a device",
}

TILE = 128
"""Query rows and key slots of a tile; causal counts are the same from 2 on."""

BLUES = LinearSegmentedColormap.from_list(
    "work", ["#eef3f8", "#7fb0d6", "#2a70ab", "#0d3f6e"]
)


def work_per_hop(
    layout: Layout, ring_size: int, tiles_per_shard: int, mask: Mask
) -> np.ndarray:
    """The tiles of scores that each device computes in each hop: (devices, hops).

    tiles_per_shard: L / TILE, so a hop in which nothing is skipped has its square.
    Otherwise as `ring_work.tiles_per_hop`.
    """
    visible = _visible(ring_size, tiles_per_shard, mask)
    return tiles_per_hop(layout, ring_size, visible, BlockSizes(TILE, TILE))


def _visible(ring_size: int, tiles_per_shard: int, mask: Mask) -> Visible:
    if ring_size < 1 or tiles_per_shard < 1:
        raise ValueError(f"{ring_size=} and {tiles_per_shard=} must be at least 1")
    length = ring_size * tiles_per_shard * TILE
    return mask(np.arange(length, dtype=np.int32), length)


def table(work: dict[str, np.ndarray], ideal: float) -> str:
    """The counts as text, a block of lines for each layout."""
    lines = []
    for name, tiles in work.items():
        hops = range(tiles.shape[1])
        lines.append(f"{name:12}" + "".join(f"{f'hop {hop}':>8}" for hop in hops))
        lines += [
            f"  device {device:<3}" + "".join(f"{count:8}" for count in row)
            for device, row in enumerate(tiles)
        ]
        slowest = "".join(f"{count:8}" for count in tiles.max(axis=0))
        path = critical_path(tiles)
        lines.append(
            f"  slowest   {slowest}   critical path {path} tiles, all devices "
            f"{tiles.sum()}, bound / path {ideal / path:.0%}"
        )
    lines.append(f"bound: {ideal:.1f} tiles (visible pairs, evenly spread)")
    return "\n".join(lines)


def draw(work: dict[str, np.ndarray], ideal: float, tiles_per_shard: int) -> Figure:
    """A panel for each layout: a grid of devices and hops, and the critical path."""
    everything = tiles_per_shard**2
    longest = max(critical_path(tiles) for tiles in work.values())
    figure = Figure(figsize=(9, 4.7), facecolor="white")
    panels = figure.subplots(1, len(work), squeeze=False)[0]
    for axes, (name, tiles) in zip(panels, work.items(), strict=True):
        _draw_grid(axes, tiles, everything)
        _draw_captions(axes, name, tiles, longest)
    panels[0].set_ylabel("device", fontsize=11, color=INK)
    figure.text(
        0.5,
        0.94,
        f"Causal attention on a ring of {len(tiles)}: tiles of scores that each device "
        "computes in each hop",
        ha="center",
        fontsize=13,
        color=INK,
    )
    figure.text(
        0.5,
        0.03,
        "Devices wait for the slowest one of each hop: the sums below the grids add up "
        f"the slowest.\n{ideal:.0f} tiles would be the best, "
        f"{everything * len(tiles)} if nothing were skipped.",
        ha="center",
        fontsize=11,
        color=GREY,
        linespacing=1.4,
    )
    figure.subplots_adjust(left=0.06, right=0.985, top=0.79, bottom=0.39, wspace=0.14)
    return figure


def _draw_captions(axes: Axes, name: str, tiles: np.ndarray, longest: int) -> None:
    """Name and origin of a layout above its grid, and its critical path below."""

    def write(height: float, text: str, size: float, **style: str) -> None:
        place = {"transform": axes.transAxes, "ha": "center", "va": "baseline"}
        axes.text(0.5, height, text, fontsize=size, **place, **{"color": INK} | style)

    write(1.14, name, 14, fontweight="bold")
    write(1.035, ORIGINS[name], 11, color=GREY)
    path, slowest = critical_path(tiles), tiles.max(axis=0)
    write(-0.37, f"{path} tiles", 19, fontweight="bold")
    terms = " + ".join(map(str, slowest)) if len(slowest) <= 4 else ""
    gain = f"{longest / path:.2f} x fewer" if path < longest else ""
    write(-0.51, " :  ".join(filter(None, (terms, gain))), 11)


def _draw_grid(axes: Axes, tiles: np.ndarray, everything: int) -> None:
    """Cells of devices and hops, darker where more is computed, numbers inside."""
    axes.imshow(tiles / everything, cmap=BLUES, vmin=0, vmax=1, aspect="auto")
    devices, hops = tiles.shape
    size = min(13.0, 80 / hops)
    for (device, hop), count in np.ndenumerate(tiles):
        tone = "white" if count / everything > 0.45 else INK
        axes.text(
            hop, device, count, ha="center", va="center", color=tone, fontsize=size
        )
    word = "hop " if hops <= 4 else ""
    axes.set_xticks(range(hops), [f"{word}{hop}" for hop in range(hops)])
    axes.set_yticks(range(devices))
    axes.set_xticks(np.arange(hops + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(devices + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=2.5)
    axes.tick_params(which="both", length=0, labelsize=11, labelcolor=INK)
    axes.spines[:].set_visible(False)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add(
        "--ring",
        default=4,
        type=at_least(1),
        help="devices in the ring (default: %(default)s)",
    )
    add(
        "--tiles",
        default=8,
        type=at_least(1),
        help="tiles along a device's shard of the sequence (default: %(default)s)",
    )
    add("--output", required=True, type=Path, help="directory to write into")
    return parser.parse_args(arguments)


def _write(
    folder: Path, work: dict[str, np.ndarray], ideal: float, tiles_per_shard: int
) -> None:
    """Both files, each under a temporary name until it is complete."""
    numbers = {
        "mask": "causal",
        "ring_size": len(next(iter(work.values()))),
        "tiles_per_shard": tiles_per_shard,
        "bound": ideal,
        "layouts": {
            name: {"critical_path": critical_path(tiles), "tiles": tiles.tolist()}
            for name, tiles in work.items()
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "work_per_hop.json.part"
    text.write_text(json.dumps(numbers) + "\n", encoding="utf-8")
    write_picture(folder / "work_per_hop.png", draw(work, ideal, tiles_per_shard))
    text.replace(text.with_suffix(""))


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    chosen = _arguments(arguments)
    work = {
        name: work_per_hop(layout, chosen.ring, chosen.tiles, causal())
        for name, layout in LAYOUTS.items()
    }
    visible = _visible(chosen.ring, chosen.tiles, causal())
    ideal = balanced_tiles(chosen.ring, visible, BlockSizes(TILE, TILE))
    _write(chosen.output, work, ideal, chosen.tiles)
    print(table(work, ideal))
    print(f"written to {chosen.output}")


if __name__ == "__main__":
    sys.exit(main())
