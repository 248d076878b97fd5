"""Speed of attention kernels: bundles of compiled ones, or a share of the peak.

Nothing here is measured of our kernels, but the share that one H100 reaches.
"""

from typing import NamedTuple

from ..devices.chips import Chip
from ..devices.device import is_hopper
from .work import TILE

PRODUCTS = {"forward": 2, "backward": 5}
"""Matrix products of a tile."""

LANES = 128
"""Numbers to whose multiples a TPU pads a head."""

COLUMNS = {"TPU v6e": 256, "TPU7x": 256}
"""Columns of a matrix unit, if not LANES: heads that are wider take several passes."""


class Speed(NamedTuple):
    """Cost of a kernel's parts for one head of 128 numbers, in cycles or in seconds.

    full: a tile of 1024 x 1024 visible pairs. row: overhead of a program, which
      computes a row of tiles. diagonal: extra for the first partial tile of a row.
    partial: extra for any other partial tile. Both come on top of the visible pairs of
      the tile at the rate of a full one.
    """

    full: float
    row: float
    diagonal: float
    partial: float


CYCLES = {
    "TPU v4": {"forward": (4142, 1281, 324, 3500), "backward": (9522, 393, 1127, 1816)},
    "TPU v5e": {"forward": (3877, 740, 172, 2120), "backward": (8711, 437, 634, 1945)},
    "TPU v5p": {"forward": (3909, 721, 203, 2150), "backward": (8971, 431, 471, 1962)},
    "TPU v6e": {"forward": (1831, 229, 249, 1900), "backward": (4340, 310, 261, 1894)},
    "TPU7x": {"forward": (1791, 253, 191, 1730), "backward": (3681, 273, 570, 1964)},
}
"""Cycles: full tile; per-program overhead; extra for a diagonal tile; extra for any
other partial tile. From results/tpu/kernel_parts.json, made at 43b984f, where overhead
is begin + end, a diagonal tile has 10 live sub-tiles of 16, and partial tiles include
masks and (forward) the sums that their programs begin with. TPU7x's parts are from the
same tool with its blocks of today (results/2026-11-29-stalls.md), its full tile from
tools/tpu_schedule.py."""

ATTENTION_SHARE = {"forward": 0.6, "backward": 0.5}
"""Share of the peak of kernels of other chips: those of results/2026-11-27-h100.md, of
16 Ki tokens and more."""


def source(chip: Chip) -> str:
    """Returns where the speed of a chip's kernels comes from, in words."""
    if chip.name in CYCLES:
        what = "bundles of a full tile of 1024 x 1024"
        figures = [f"{name} {full}" for name, (full, *_) in CYCLES[chip.name].items()]
    else:
        what = "shares of the peak, as one H100 reaches them"
        if not is_hopper(chip.device_kinds[0]):
            what += f" (those of {chip.name} are not known)"
        figures = [f"{name} {share:.0%}" for name, share in ATTENTION_SHARE.items()]
    if chip.stalls:
        what = f"stalls as others' kernels have them; {what}"
    return f"{what}: {', '.join(figures)}"


def speed(chip: Chip, direction: str) -> Speed:
    """Returns the speed of a chip's kernels, no more than their products' peak."""
    least = 2.0 * PRODUCTS[direction] * TILE**2 * LANES / chip.peak_flops
    if chip.name not in CYCLES:
        return Speed(least / ATTENTION_SHARE[direction], 0, 0, 0)
    cycles = Speed._make(CYCLES[chip.name][direction])
    factor = 1.0
    if stalls := dict(chip.stalls):
        factor, row, diagonal = stalls.get(direction, stalls["forward"])
        cycles = cycles._replace(row=row, diagonal=diagonal)
    seconds = Speed._make(count / chip.bundles_per_second for count in cycles)
    return seconds._replace(full=factor * max(seconds.full, least))


def padded(head_dim: int) -> int:
    """Returns the size of a head in whole LANES."""
    return -(-head_dim // LANES) * LANES
