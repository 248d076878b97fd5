"""Counts the query-key pairs of a ring's steps from the bounds that the kernels get."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..backends.tile_ranges import TileRanges, key_ranges
from ..layouts import Layout
from ..masks import Mask, Visible, causal, full, window

TILE = 1024
"""Rows and keys of a kernel's tile."""

SUB_TILE = 256
"""Rows and keys of the sub-tiles in which visible pairs are counted."""

MOST_DEVICES = 64
"""Devices of a ring that are looked at, evenly spread."""


# Equal only to itself: caches take it as a key, and arrays cannot be compared.
@dataclass(frozen=True, eq=False)
class Row:
    """What the tokens of a row see, in natural order.

    k_start, k_end: int (T,), or (m, T) of intervals that share no key.
    window: tokens that each sees at most; 0 for all.
    is_causal: whether no token sees a later one.
    """

    k_start: np.ndarray
    k_end: np.ndarray
    window: int = 0
    is_causal: bool = True

    @classmethod
    def of(cls, documents: tuple[int, ...], tokens: int) -> "Row":
        """Returns a causal row of documents, repeated until it is full; () for one."""
        index = np.arange(tokens, dtype=np.int32)
        first, _ = document_spans(documents, index, tokens)
        return cls(first.astype(np.int32), index + 1)

    def seen_within(self, size: int) -> "Row":
        """Returns the row in a layer whose window has this size; 0 for no window."""
        return self if not size or 0 < self.window <= size else _windowed(self, size)

    @property
    def intervals(self) -> int:
        """Intervals of keys that a token sees, m."""
        return 1 if self.k_start.ndim == 1 else len(self.k_start)

    def at(self, token: np.ndarray) -> Visible:
        """Returns the bounds of some tokens; those behind the row's end see nothing."""
        end = self.k_start.shape[-1]
        is_real = token < end
        # Tokens of padding read the last row, and `where` hides what they read.
        token = np.minimum(token, end - 1)
        k_start = np.where(is_real, self.k_start[..., token], end)
        k_end = np.where(is_real, self.k_end[..., token], end)
        return Visible(k_start, k_end)

    @functools.cached_property
    def pairs(self) -> int:
        """Query-key pairs that are visible."""
        return int((self.k_end - self.k_start).clip(0).sum(dtype=np.int64))

    @property
    def within(self) -> Mask:
        """The mask of indices alone that shows all that this row does."""
        if self.window:
            return window(self.window)
        return causal() if self.is_causal else full()


@functools.lru_cache(maxsize=64)
def _windowed(row: Row, size: int) -> Row:
    index = np.arange(row.k_start.shape[-1], dtype=np.int32)
    k_start = np.maximum(row.k_start, index + 1 - size)
    return Row(k_start, np.minimum(row.k_end, index + 1), size)


def document_spans(
    documents: tuple[int, ...], token: np.ndarray, tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first token, and one after the last, of each token's document.

    documents: lengths, repeated; none for one document. tokens: of the row.
    """
    if not documents:
        return np.zeros_like(token), np.full_like(token, tokens)
    ends = np.cumsum(documents)
    repeat, rest = np.divmod(token, ends[-1])
    document = np.searchsorted(ends, rest, side="right")
    before = repeat * ends[-1]  # tokens of whole repetitions
    first = before + (ends - documents)[document]
    end = before + ends[document]
    return first, np.minimum(end, tokens)


class Work(NamedTuple):
    """Work of a head on each device with each shard of keys, (devices, N).

    pairs: visible ones, in sub-tiles. partial: tiles. rows: rows of tiles, of all
    intervals with visible keys; of one interval where there are none.
    """

    pairs: np.ndarray
    partial: np.ndarray
    rows: np.ndarray


@dataclass(frozen=True)
class RowOnRing:
    """A row over a ring.

    length: slots of a shard.
    """

    row: Row
    layout: Layout
    ring_size: int
    length: int

    @property
    def devices(self) -> np.ndarray:
        """The devices that are looked at, the first and the last among them."""
        few = min(self.ring_size, MOST_DEVICES)
        return np.linspace(0, self.ring_size - 1, few).astype(np.int32)

    def work(self, slots: tuple[int, int] | None = None) -> Work:
        """Counts the work on some slots [begin, end) of the shards' keys, or on all."""
        return _work(self, slots or (0, self.length))

    @property
    def area(self) -> float:
        """Query-key pairs of the slowest device, the mean over ring steps, one way."""
        steps = np.arange(self.ring_size)
        sources = (self.devices[:, None] - steps) % self.ring_size  # (devices, N)
        pairs = np.take_along_axis(self.work().pairs, sources, axis=1)
        return float(pairs.max(axis=0).mean())


@functools.lru_cache(maxsize=256)
def _work(sequence: RowOnRing, slots: tuple[int, int]) -> Work:
    queries = sequence.length
    keys = slots[1] - slots[0]
    devices = sequence.devices[:, None]
    # Shards of keys, intervals, devices: below, intervals are summed.
    shape = (sequence.ring_size, sequence.row.intervals, devices.size)
    index = np.asarray(sequence.layout.index(devices, sequence.ring_size, queries))
    tiles = _tile_ranges(sequence, slots, index, min(TILE, queries, keys))
    sub = min(SUB_TILE, queries, keys)
    sub_tiles = _tile_ranges(sequence, slots, index, sub)
    full = tiles.full_end - tiles.full_begin
    partial = np.reshape((tiles.work() - full).sum(axis=1), shape)
    pairs = sub_tiles.work().sum(axis=1) * float(sub**2)
    # Sub-tiles at the end of a shard reach beyond it.
    pairs = np.reshape(pairs.clip(max=queries * keys), shape)
    # A kernel for each interval with keys in sight; one where nothing is.
    kernels = (pairs > 0).sum(axis=1).clip(1)  # (N, devices)
    rows = -(-queries // TILE) * kernels
    return Work(pairs.sum(axis=1).T, partial.sum(axis=1).T, rows.T)


def _tile_ranges(
    sequence: RowOnRing, slots: tuple[int, int], index: np.ndarray, size: int
) -> TileRanges:
    """Returns the tiles that are live: (N * m * devices, rows of tiles).

    index: tokens of each device that is looked at, (devices, L). size: of a tile.
    """
    first = np.arange(0, sequence.length, size)
    last = np.minimum(first + size, sequence.length) - 1
    # Bounds do not decrease along a shard: a tile's first and last row say all.
    edges = np.stack((first, last), 1).ravel()
    shards = np.arange(sequence.ring_size, dtype=np.int32)[:, None, None, None]
    begin, end = slots
    bounds = []
    for bound in sequence.row.at(index[:, edges]):
        # (N, m, devices, edges)
        slot = sequence.layout.count(shards, bound, sequence.ring_size, sequence.length)
        bounds.append((slot.clip(begin, end) - begin).reshape(-1, edges.size))
    k_start, k_end = bounds
    return key_ranges(k_start, k_end, 2, size)
