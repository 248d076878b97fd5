"""Chooses the layout in which a ring's rows should take the least time."""

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..backends import blockwise
from ..checks import whole_number
from ..devices.chips import CHIPS, Chip, find, measured
from ..devices.device import device_kind, rings_both_ways
from ..layouts import (
    Contiguous,
    Layout,
    Mirror,
    Striped,
    Zigzag,
    check_layout,
    padded_length,
)
from .clock import Heads, RingCost, Times
from .exchange import exchange_seconds
from .speed import PRODUCTS
from .work import Row, RowOnRing

STRIPES = 256, 512, 1024
"""Widths that are tried beside stripes of a token: multiples of kernels' sub-blocks."""

ONE_WAY_MARGIN = 2.0
"""A ring goes one way where links this many times slower would do."""

DIGITS = 4
"""Of seconds that are compared: of equals, the first is taken."""


class Choice(NamedTuple):
    """A layout, how the ring goes, and its estimated seconds.

    count_steps, one_way: as of `make_ring_attention`.
    """

    layout: Layout
    count_steps: bool = False
    one_way: bool = False
    seconds: float = 0.0


ASSUMED = {True: "TPU7x", False: "H200"}
"""The chip that devices are taken for that are in no table: of TPUs, and of others."""


@functools.cache  # so that it is logged once
def known_chip(kind: str) -> Chip:
    """Returns the chip of a kind of device, with links as measured, where they were.

    For a kind that is not in the table another chip's, which is logged.
    """
    chip = find(kind)
    if chip is None:
        assumed = ASSUMED[kind.startswith("TPU")]
        # A CPU's devices stand in for others, and a config is checked without any.
        if kind not in ("", "cpu"):
            logging.getLogger(__name__).warning(
                "%s is not in the table of chips: no MFU is reported, and layouts are "
                "chosen, and seconds estimated, as for the %s; name the layout, or add "
                "a row to kernels/devices/chips.py",
                kind,
                assumed,
            )
        chip = next(chip for chip in CHIPS if chip.name == assumed)
    return measured(chip)


def slower_links(chip: Chip, times: float) -> Chip:
    """Returns a chip whose links take `times` as long."""
    rate = chip.interconnect_bytes_per_second / times
    return replace(chip, interconnect_bytes_per_second=rate)


def default_granule(ring_size: int, length: int, kind: str) -> int:
    """Returns the width of stripes where none is named.

    On CPUs they are as wide as a tile, if each shard has several: then all tiles off a
    diagonal are full or empty. Elsewhere they are one token wide.

    kind: of the ring's devices.
    """
    width = blockwise.default_block_sizes(length // ring_size).block_k
    is_wide = kind == "cpu" and length > ring_size * width
    return width if is_wide and length % (ring_size * width) == 0 else 1


def layouts_of(
    ring_size: int, length: int, natural_order: bool = False
) -> list[Layout]:
    """Returns the layouts in which a row of this length needs the least padding.

    natural_order: whether devices exchange what these have elsewhere: only then is
      `Mirror` better than `Zigzag`, and tried.
    """
    if ring_size == 1:
        return [Contiguous()]
    layouts = [Striped(), Contiguous(), Mirror() if natural_order else Zigzag()]
    layouts += [Striped(width) for width in STRIPES if width < length // ring_size]
    padded = {
        layout: padded_length(layout, ring_size, length, natural_order=natural_order)
        for layout in layouts
    }
    return [layout for layout in layouts if padded[layout] == min(padded.values())]


def ranked(
    options: Iterable[Choice], seconds: Callable[[Choice, float], float], chip: Chip
) -> list[Choice]:
    """Returns choices with their seconds, the fastest first.

    One way round is taken if it is as fast even on slower links, as it compiles to half
    of the kernels.

    seconds: of a choice, with links a number of times slower.
    """
    has_ways = rings_both_ways(chip.device_kinds[0])

    choices = []
    for option in options:
        choice = option._replace(seconds=_rounded(seconds(option, 1.0)))
        if has_ways and not option.count_steps:
            one_way = option._replace(one_way=True)
            slowed = _rounded(seconds(one_way, ONE_WAY_MARGIN))
            # Equal seconds too: one way compiles to half of the kernels.
            if slowed <= choice.seconds:
                choice = one_way._replace(seconds=slowed)
        choices.append(choice)
    # The sort is stable, so that of equals the option given first is taken.
    return sorted(choices, key=lambda choice: choice.seconds)


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.{DIGITS}g}")


def options(layouts: Iterable[Layout], may_count: bool) -> list[Choice]:
    """Returns the choices of some layouts, with counted steps where these may end."""
    choices = []
    for layout in layouts:
        choices.append(Choice(layout))
        # In stripes of a token every shard has tokens of every document: no ring ends
        # early.
        if may_count and layout != Striped():
            choices.append(Choice(layout, count_steps=True))
    return choices


def mean_times(rings: Sequence[RingCost], direction: str, chip: Chip) -> Times:
    """Returns the mean of a pass over rings of several rows of a batch.

    Rings that count their steps take as many as the row that needs the most.
    """
    # Rows of a batch go around together.
    counts = [ring.count for ring in rings if ring.count is not None]
    most = max(counts, default=None)
    passes = [_times(replace(ring, count=most), direction, chip) for ring in rings]
    return Times._make(sum(part) / len(rings) for part in zip(*passes, strict=True))


@functools.lru_cache(maxsize=4096)  # meshes have many rings in common
def _times(ring: RingCost, direction: str, chip: Chip) -> Times:
    return ring.times(chip, direction)


def _checked_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> Heads:
    whole_number("num_heads", num_heads, 1)
    whole_number("num_kv_heads", num_kv_heads, 1)
    whole_number("head_dim", head_dim, 1)
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads=} must be a multiple of {num_kv_heads=}")
    return Heads(num_heads, num_kv_heads, head_dim)


def _row_length(documents: Sequence[Sequence[int]]) -> int:
    """Returns the tokens of each row; checks that rows have as many."""
    lengths = {sum(row) for row in documents}
    if len(lengths) != 1 or not all(number > 0 for row in documents for number in row):
        raise ValueError(
            "documents must be rows of as many tokens each, in documents of 1 or more, "
            f"got rows of {sorted(lengths)} tokens: add what pads a row as a document"
        )
    return lengths.pop()


def choose_layout(
    documents: Sequence[Sequence[int]],
    ring_size: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: str | None = None,
    layouts: Sequence[Layout] = (),
    natural_order: bool = False,
) -> Choice:
    """Chooses the layout of causal attention within documents, by estimated seconds.

    documents: lengths of the documents of each of some typical rows, which all have the
      same number of tokens. device: kind, as "TPU v5e"; None for this process's.
    layouts: to choose from; () for all those that need the least padding.
    natural_order: as of `make_ring_attention`: what devices exchange is counted.

    Returns:
      The layout and `count_steps` for `make_ring_attention`, and the seconds of one
      layer's ring, forward and backward, on a row.

    Raises:
      ValueError: documents are empty, or rows of different lengths, or another argument
        is not what it must be.
    """
    whole_number("ring_size", ring_size, 1)
    heads = _checked_heads(num_heads, num_kv_heads, head_dim)
    if not isinstance(device, str | None):
        raise ValueError(
            'device must be a kind of device, as "TPU v5e" or '
            f"jax.devices()[0].device_kind, got {device!r:.60}"
        )
    for layout in layouts:
        check_layout(layout)
    length = _row_length(documents)
    chip = known_chip(device or device_kind())
    rows = [Row.of(tuple(row), length) for row in documents]

    def seconds(choice: Choice, slower: float) -> float:
        padded = padded_length(
            choice.layout, ring_size, length, natural_order=natural_order
        )
        slots = padded // ring_size
        ways = {"counts": choice.count_steps, "one_way": choice.one_way}
        rings = []
        for row in rows:
            on_ring = RowOnRing(row, choice.layout, ring_size, slots)
            rings.append(RingCost.of(on_ring, 1, heads, chip, **ways))
        links = slower_links(chip, slower)
        spent = exchange_seconds(on_ring, heads, links) if natural_order else 0.0
        return spent + sum(sum(mean_times(rings, way, links)) for way in PRODUCTS)

    layouts = layouts or layouts_of(ring_size, length, natural_order)
    choices = options(layouts, may_count=True)
    return ranked(choices, seconds, chip)[0]
