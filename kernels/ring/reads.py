"""Reads: which slots of other shards the devices of a ring attend to."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..layouts import Layout
from ..masks import Visible

Span = tuple[int, int]
"""Half-open range [begin, end)."""

TILE = 128
"""Slots at whose multiples shards are cut, where they are longer than two."""

EVERY_ROW = 1 << 22
"""Rows times shards up to which the bounds of each row are looked at."""


class Read(NamedTuple):
    """What devices read of a shard before their own.

    offset: how many places before, 1 … N - 1. slots: the least span that holds what any
      device reads.
    """

    offset: int
    slots: Span


def reads_of(visible: Visible, layout: Layout, ring_size: int) -> tuple[Read, ...]:
    """Returns what devices read of other shards, in the order of the offsets.

    visible: known bounds (B or 1, T) in layout order.
    """
    rows, length = visible.k_start.shape[0], visible.k_start.shape[1] // ring_size
    if not length:
        return ()
    shape = rows, ring_size, length
    k_start, k_end = (np.reshape(bound, shape) for bound in visible)
    if k_start.size * ring_size > EVERY_ROW:
        # Of bounds that do not decrease, along either half of a shard (see `Zigzag`).
        tile = math.gcd(length, length // 2, TILE)
        k_start, k_end = k_start[..., ::tile], k_end[..., tile - 1 :: tile]
    found = []
    for offset in range(1, ring_size):
        shard = (np.arange(ring_size) - offset)[:, None] % ring_size
        begin, end = (
            layout.count(shard, bound, ring_size, length) for bound in (k_start, k_end)
        )
        is_read = begin < end
        if is_read.any():
            span = int(begin[is_read].min()), int(end[is_read].max())
            found.append(Read(offset, _in_tiles(span, length)))
    return tuple(found)


def runs(reads: Sequence[Read]) -> list[tuple[range, Span]]:
    """Joins reads of successive offsets: (offsets, span of slots) of each run."""
    found: list[tuple[range, Span]] = []
    for offset, (begin, end) in reads:
        if found and found[-1][0].stop == offset:
            offsets, span = found.pop()
            joined = min(span[0], begin), max(span[1], end)
            found.append((range(offsets.start, offset + 1), joined))
        else:
            found.append((range(offset, offset + 1), (begin, end)))
    return found


def are_few(reads: Sequence[Read], ring_size: int, length: int) -> bool:
    """Returns whether devices read less than half of what the others have."""
    sent = sum(len(offsets) * (end - begin) for offsets, (begin, end) in runs(reads))
    return 2 * sent <= (ring_size - 1) * length


def _in_tiles(span: Span, length: int) -> Span:
    if length < 2 * TILE:
        return span
    begin, end = span
    return begin // TILE * TILE, min(length, -(-end // TILE) * TILE)
