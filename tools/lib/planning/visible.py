"""Counts the query-key pairs of a ring's steps from the bounds that the kernels get."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from data.document_mask import DocumentMask
from kernels.backends.tile_ranges import TileRanges, key_ranges
from kernels.layouts import Layout

CAUSAL = DocumentMask()

SAMPLED_STEPS = 8

TILE, SUB_TILE = 1024, 256
"""Rows and keys of a kernel's tile, and of the sub-tiles that areas are counted in."""


class Count(NamedTuple):
    """Work of a head: visible pairs, in sub-tiles; and tiles, by rows and partial."""

    pairs: float
    rows: int
    partial: int


@dataclass(frozen=True)
class Sequence:
    """A sequence over a ring.

    length: of a shard, tokens. documents: lengths of packed documents, repeated until
      the sequence is full; none for one document.
    mask: of the queries of a document.
    part: "front" for the first half of a shard's queries on the first half of the keys,
      "tail" for the second on all; see `make_ring_attention`'s keep_tail.
    span: slots [begin, end) of a shard's keys, of a piece; None for all of that.
    """

    layout: Layout
    ring_size: int
    length: int
    documents: tuple[int, ...] = ()
    mask: DocumentMask = CAUSAL
    part: str = "whole"
    span: tuple[int, int] | None = None

    @property
    def queries(self) -> range:
        """Slots of a shard's queries."""
        half = self.length // 2
        parts = {"front": range(half), "tail": range(half, self.length)}
        return parts.get(self.part, range(self.length))

    @property
    def keys(self) -> int:
        """Slots of a shard's keys."""
        begin, end = self.slots
        return end - begin

    @property
    def slots(self) -> tuple[int, int]:
        """Those slots, [begin, end)."""
        half = self.length // 2 if self.part == "front" else self.length
        return self.span or (0, half)

    def count(self, device: int, source: int) -> Count:
        """Counts a device's work on the keys of another; kept for the next time."""
        return _count(self, device, source)

    def visible(self, token: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens [k_start, k_end) that some tokens see."""
        total = self.ring_size * self.length
        return self.mask.bounds(token, *document_spans(self.documents, token, total))

    @property
    def area(self) -> float:
        """Query-key pairs of the slowest device, the mean over ring steps, one way.

        Of the first, the middle and the last device; of all steps where windows see few
        of them.
        """
        size = self.ring_size
        alone = range(size) if self.mask.window else (0,)
        return (
            sum(
                steps
                * max(self.count(at, (at - step) % size).pairs for at in self.devices)
                for step, steps in sampled(size, alone)
            )
            / size
        )

    @property
    def devices(self) -> list[int]:
        """The first, the middle and the last device."""
        return sorted({0, self.ring_size // 2, self.ring_size - 1})


def sampled(steps: int, alone: Iterable[int] = (0,)) -> list[tuple[int, float]]:
    """Samples a ring's steps, each with the number that it stands for.

    alone: steps that stand for themselves; of the others SAMPLED_STEPS, evenly.
    """
    apart = {step: 1.0 for step in alone}
    others = np.array([step for step in range(steps) if step not in apart], int)
    if not others.size:
        return list(apart.items())
    few = np.unique(others[np.linspace(0, others.size - 1, SAMPLED_STEPS).astype(int)])
    return [*apart.items(), *((int(one), others.size / few.size) for one in few)]


@functools.cache
def _count(sequence: Sequence, device: int, source: int) -> Count:
    queries, keys = len(sequence.queries), sequence.keys
    begin, end = sequence.slots

    def ranges(piece: int) -> TileRanges:
        piece = min(piece, queries, keys)
        shape = sequence.ring_size, sequence.length
        visible = sequence.visible(_edges(sequence, device, piece))
        slots = (sequence.layout.count(source, bound, *shape) for bound in visible)
        return key_ranges(*(slot.clip(begin, end) - begin for slot in slots), 2, piece)

    sub = min(SUB_TILE, queries, keys)
    tiles = ranges(TILE)
    full = (tiles.full_end - tiles.full_begin).sum()
    live = float(ranges(SUB_TILE).work().sum() * sub**2)
    rows = -(-queries // TILE)
    return Count(min(live, queries * keys), rows, int(tiles.work().sum() - full))


@functools.cache
def _edges(sequence: Sequence, device: int, piece: int) -> np.ndarray:
    """Returns the tokens of the first and the last row of each piece, (1, 2 n)."""
    first = np.arange(0, len(sequence.queries), piece)
    last = np.minimum(first + piece, len(sequence.queries)) - 1
    rows = sequence.queries.start + np.stack((first, last), 1).ravel()
    layout, shape = sequence.layout, (sequence.ring_size, sequence.length)
    return np.asarray(layout.index(device, *shape))[rows][None]


def document_spans(
    documents: tuple[int, ...], token: np.ndarray, tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first token, and one after the last, of each token's document.

    tokens: of the row.
    """
    if not documents:
        return np.zeros_like(token), np.full_like(token, tokens)
    ends = np.cumsum(documents)
    whole, rest = np.divmod(token, ends[-1])
    place = np.searchsorted(ends, rest, side="right")
    first, end = (whole * ends[-1] + at[place] for at in (ends - documents, ends))
    return first, np.minimum(end, tokens)


def visible_pairs(
    documents: tuple[int, ...], tokens: int, mask: DocumentMask = CAUSAL
) -> int:
    """Returns the query-key pairs of a row of packed documents."""

    def pairs(length: int) -> int:
        unseen = max(0, length - mask.window) if mask.window else 0
        ahead = min(mask.prefix, length)
        behind = length * (length + 1) - unseen * (unseen + 1)
        return (behind + ahead * max(0, ahead - 1)) // 2

    whole, rest = divmod(tokens, sum(documents) or tokens)
    cut = []
    for length in documents:
        cut.append(min(length, rest))
        rest -= cut[-1]
    return whole * sum(map(pairs, documents or (tokens,))) + sum(map(pairs, cut))
