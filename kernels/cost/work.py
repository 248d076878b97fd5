"""Counts the query-key pairs of a ring's steps from the bounds that the kernels get."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..backends.tile_ranges import TileRanges, key_ranges
from ..layouts import Layout
from ..masks import Mask, Visible, causal, full, window

TILE, SUB_TILE = 1024, 256
"""Rows and keys of a kernel's tile, and of the sub-tiles that areas are counted in."""

MOST_DEVICES = 64
"""Devices of a ring that are looked at, evenly spread."""


@dataclass(frozen=True, eq=False)
class Row:
    """What the tokens of a row see, in natural order.

    k_start, k_end: int (T,), or (m, T) of intervals that share no key.
    window: tokens that each sees at most; 0 for all.
    is_causal: whether no token sees one behind it.
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
        place, is_real = np.minimum(token, end - 1), token < end
        k_start, k_end = self.k_start[..., place], self.k_end[..., place]
        return Visible(np.where(is_real, k_start, end), np.where(is_real, k_end, end))

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
    whole, rest = np.divmod(token, ends[-1])
    place = np.searchsorted(ends, rest, side="right")
    first, end = (whole * ends[-1] + at[place] for at in (ends - documents, ends))
    return first, np.minimum(end, tokens)


class Work(NamedTuple):
    """Work of a head on each device with each shard of keys, (devices, N).

    pairs: visible ones, in sub-tiles. partial: tiles. rows: of tiles, of all intervals
    with keys in sight, or of one.
    """

    pairs: np.ndarray
    partial: np.ndarray
    rows: np.ndarray


@dataclass(frozen=True)
class Sequence:
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
        devices, steps = self.devices, np.arange(self.ring_size)
        sources = (devices[:, None] - steps) % self.ring_size
        pairs = np.take_along_axis(self.work().pairs, sources, axis=1)
        return float(pairs.max(axis=0).mean())


@functools.lru_cache(maxsize=256)
def _work(sequence: Sequence, slots: tuple[int, int]) -> Work:
    begin, end = slots
    queries, keys = sequence.length, end - begin
    shape, devices = (sequence.ring_size, sequence.length), sequence.devices
    many = (sequence.ring_size, sequence.row.intervals, devices.size)
    sources = np.arange(sequence.ring_size, dtype=np.int32)[:, None, None, None]
    index = np.asarray(sequence.layout.index(devices[:, None], *shape))  # (devices, L)

    def ranges(piece: int) -> TileRanges:
        first = np.arange(0, queries, piece)
        last = np.minimum(first + piece, queries) - 1
        edges = np.stack((first, last), 1).ravel()
        k_start, k_end = (
            (
                sequence.layout.count(sources, bound, *shape).clip(begin, end) - begin
            ).reshape(-1, edges.size)  # (N * m * devices, 2 n)
            for bound in sequence.row.at(index[:, edges])
        )
        return key_ranges(k_start, k_end, 2, piece)

    sub = min(SUB_TILE, queries, keys)
    tiles = ranges(min(TILE, queries, keys))
    partial = (tiles.work() - (tiles.full_end - tiles.full_begin)).sum(axis=1)
    pairs = (ranges(sub).work().sum(axis=1) * float(sub**2)).clip(max=queries * keys)
    pairs, partial = (np.reshape(x, many) for x in (pairs, partial))
    kernels = (pairs > 0).sum(axis=1).clip(1)  # (N, devices)
    rows = -(-queries // TILE) * kernels
    return Work(pairs.sum(axis=1).T, partial.sum(axis=1).T, rows.T)
