"""Estimates what a ring in natural order exchanges before and after itself."""

import functools

import numpy as np

from ..devices.chips import Chip
from ..layouts import Layout, divisor
from .clock import Heads
from .work import RowOnRing

QUERY_ARRAYS = 5
"""Exchanged with query heads: q and out; in the backward q again, do and dq."""

KEY_VALUE_ARRAYS = 6
"""Exchanged with key/value heads: k and v; in the backward both again, dk and dv."""


@functools.lru_cache(maxsize=256)
def exchanged_share(layout: Layout, ring_size: int) -> float:
    """Returns the share of a sequence's tokens that its devices exchange."""
    slots = divisor(layout, ring_size, natural_order=True) // ring_size
    stayed = 0
    for shard in range(ring_size):
        slices = np.asarray(layout.index(shard, ring_size, slots)) // slots
        stayed += np.count_nonzero(slices == shard)
    return 1 - stayed / (ring_size * slots)


def exchange_seconds(sequence: RowOnRing, heads: Heads, chip: Chip) -> float:
    """Returns seconds of a layer's exchanges, forward and backward, of a row.

    As if no kernel hid any, and no other device's used the same links: on torus links
    neither is so.
    """
    numbers = QUERY_ARRAYS * heads.query + KEY_VALUE_ARRAYS * heads.key_value
    sent = exchanged_share(sequence.layout, sequence.ring_size) * sequence.length
    sent *= numbers * heads.size * heads.itemsize
    return sent / chip.interconnect_bytes_per_second
