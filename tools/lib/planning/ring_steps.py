"""Counts what the TPU kernels do in the steps of a ring: programs and kinds of tiles.

The bounds are those of `kernels.ring`: one sequence of packed documents. Only
their edges in every piece of a tile are computed, as bounds do not decrease.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from data.document_mask import DocumentMask
from kernels.layouts import Layout
from kernels.tile_ranges import TileRanges, key_ranges, query_ranges
from kernels.tpu.backward_dq import STREAMED
from kernels.tpu.diagonal import first_ends

CAUSAL = DocumentMask()

SAMPLED_STEPS = 8

SUB_TILE = 256
"""Rows and keys of the sub-tiles that areas are counted in."""


class Bounds(NamedTuple):
    """Visible slots [k_start, k_end) at the edges of pieces of rows, int (1, 2 n)."""

    k_start: np.ndarray
    k_end: np.ndarray


@dataclass(frozen=True)
class Blocks:
    """Pieces of a kernel's tile, as in `TpuBlocks`.

    heads: query heads whose rows are stacked in a tile of heads * block_q rows.
    diagonal: `kernels.tpu.diagonal.granule`, if the kernel has code for such tiles.
    """

    heads: int
    block_q: int
    block_k: int
    exact_rows: int
    live_columns: int
    diagonal: int | None = None

    @property
    def piece(self) -> int:
        """Rows of a head that every sub-block has all or none of."""
        return math.gcd(self.block_q, self.exact_rows)


@dataclass(frozen=True)
class Work:
    """What a kernel does for one key/value head, or several kernels together.

    programs: of the grid. live, partial: those with live, and with partial, tiles.
    cold: live ones whose first copies no other one starts. broken: other ones whose
      first copies wait for a streamed dq of the one before.
    full_tiles, diagonal, partial_tiles: in all; a query tile has at most one diagonal.
    first: sub-blocks of full tiles that are a row's first tile.
    diagonal_granules: live ones of sub-blocks of diagonal tiles, in all.
    granules: sub-blocks of partial tiles by number of live granules.
    """

    programs: int
    live: int
    partial: int
    cold: int
    broken: int
    full_tiles: int
    diagonal: int
    partial_tiles: int
    first: int
    diagonal_granules: int
    granules: tuple[int, ...]

    @property
    def tiles(self) -> int:
        return self.full_tiles + self.diagonal + self.partial_tiles

    def __add__(self, other: "Work") -> "Work":
        granules = map(sum, zip(self.granules, other.granules, strict=True))
        counts = (
            getattr(self, name) + getattr(other, name)
            for name in self.__dataclass_fields__
            if name != "granules"
        )
        return Work(*counts, granules=tuple(granules))


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

    def bounds(self, device: int, source: int, piece: int) -> Bounds:
        """Returns the bounds of a device's rows on the keys of another, by pieces."""
        shape = self.ring_size, self.length
        visible = self.visible(_edges(self, device, piece))
        slots = (self.layout.count(source, bound, *shape) for bound in visible)
        begin, end = self.slots
        return Bounds(*(slot.clip(begin, end) - begin for slot in slots))

    def visible(self, token: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens [k_start, k_end) that some tokens see."""
        total = self.ring_size * self.length
        return self.mask.bounds(token, *document_spans(self.documents, token, total))

    @property
    def area(self) -> float:
        """Query-key pairs of the slowest device, the mean over ring steps."""
        return sum(weight * pairs for weight, pairs in self.areas)

    @functools.cached_property
    def areas(self) -> list[tuple[float, float]]:
        """(weight, query-key pairs of the slowest device) of ring steps, one way round.

        Of the first, the middle and the last device; of all steps where windows see few
        of them. The weights sum to 1.
        """
        size = self.ring_size
        alone = range(size) if self.mask.window else (0,)
        return [
            (
                steps / size,
                max(pairs(self, at, (at - step) % size) for at in self.devices),
            )
            for step, steps in sampled(size, alone)
        ]

    @property
    def devices(self) -> list[int]:
        """The first, the middle and the last device."""
        return sorted({0, self.ring_size // 2, self.ring_size - 1})


def sampled(steps: int, alone: Iterable[int] = (0,)) -> list[tuple[int, float]]:
    """Returns some of so many ring steps, and how many each stands for.

    alone: steps that stand for themselves; of the others SAMPLED_STEPS, evenly.
    """
    apart = {step: 1.0 for step in alone}
    others = np.array([step for step in range(steps) if step not in apart], int)
    if not others.size:
        return list(apart.items())
    few = np.unique(others[np.linspace(0, others.size - 1, SAMPLED_STEPS).astype(int)])
    return [*apart.items(), *((int(one), others.size / few.size) for one in few)]


@functools.cache
def pairs(sequence: Sequence, device: int, source: int) -> float:
    """Counts the query-key pairs of a device on the keys of another.

    Those of live sub-tiles of SUB_TILE rows and keys.
    """
    queries, keys = len(sequence.queries), sequence.keys
    sub = min(SUB_TILE, queries, keys)
    bounds = sequence.bounds(device, source, sub)
    return float(min(key_ranges(*bounds, 2, sub).work().sum() * sub**2, queries * keys))


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


@functools.cache
def work_on(
    sequence: Sequence,
    blocks: Blocks,
    direction: str,
    ends: tuple[int, int],
    half: int | None = None,
) -> Work:
    """Counts the work of a device on a shard's keys.

    ends: numbers of both. half: of the queries that it attends with, if not with all.
    """
    bounds = sequence.bounds(*ends, blocks.piece)
    if half is not None:
        bounds = halves(bounds, sequence.keys)[half]
    return work(direction, bounds, blocks, sequence.keys)


def halves(bounds: Bounds, keys: int) -> list[Bounds]:
    """Returns bounds of both halves of the queries: `kernels.ring_steps.halves`."""
    rows = bounds.k_start.shape[1]
    early = np.arange(rows) < rows // 2
    return [
        Bounds(*(np.where(early, bound, keys) for bound in bounds)),
        Bounds(*(np.where(early, 0, bound) for bound in bounds)),
    ]


def work(direction: str, bounds: Bounds, blocks: Blocks, keys: int) -> Work:
    """Counts a kernel's work. Programs are query tiles forward, key tiles backward."""
    edges = 2 * blocks.block_q // blocks.piece
    # Like the launch, up to whole query tiles.
    more = -bounds.k_start.shape[1] % edges
    bounds = Bounds(*(np.pad(b, ((0, 0), (0, more)), mode="edge") for b in bounds))
    by_query = key_ranges(*bounds, edges, blocks.block_k)
    is_diagonal = _first_ends(bounds, blocks, by_query)[0] >= 0
    if direction == "forward":
        ranges = by_query
        query, key = _partial_tiles(ranges)
    else:
        ranges = query_ranges(*bounds, edges, blocks.block_k, keys)
        key, query = _partial_tiles(ranges)
    diagonal = np.flatnonzero(is_diagonal), by_query.full_end[0][is_diagonal]
    other = ~(is_diagonal[query] & (key == by_query.full_end[0][query]))
    query, key = query[other], key[other]
    live, full = (x[0] for x in (ranges.work(), ranges.full_end - ranges.full_begin))
    is_first = (full > 0) & (ranges.full_end == ranges.live_end)[0]
    on_diagonal = _granules(bounds, blocks, *diagonal)
    chained = (live[:-1] > 0) & (live[1:] > 0)  # as in `kernels.tpu.neighbours`
    begin, end = ranges.live_begin[0, 1:], ranges.live_end[0, :-1]
    is_unwritten = (begin < end) & (end < begin + STREAMED)
    return Work(
        programs=live.size,
        live=int((live > 0).sum()),
        partial=np.unique(query if direction == "forward" else key).size,
        cold=int((live > 0).sum()) - int(chained.sum()),
        broken=int((chained & is_unwritten).sum()),
        full_tiles=int(full.sum()),
        diagonal=int(is_diagonal.sum()),
        partial_tiles=query.size,
        first=int(is_first.sum()) * blocks.heads * blocks.block_q // blocks.exact_rows,
        diagonal_granules=sum(n * count for n, count in enumerate(on_diagonal)),
        granules=_granules(bounds, blocks, query, key),
    )


def _first_ends(bounds: Bounds, blocks: Blocks, ranges: TileRanges) -> np.ndarray:
    """Returns `diagonal.first_ends` by the edges of pieces, (1, query tiles)."""
    first = np.arange(0, blocks.block_q, blocks.piece)
    rows = np.stack((first, first + blocks.piece - 1), 1).ravel()
    start, end = (bound.reshape(1, -1, rows.size) for bound in bounds)
    return np.asarray(
        first_ends(blocks.diagonal, blocks.block_k, ranges, (start, end), rows)
    )


def _partial_tiles(ranges: TileRanges) -> tuple[np.ndarray, np.ndarray]:
    """Returns (line, tile along it) of all partial tiles."""
    lines, tiles = [], []
    for begin, end in (
        (ranges.live_begin[0], ranges.full_begin[0]),
        (ranges.full_end[0], ranges.live_end[0]),
    ):
        count = end - begin
        line = np.repeat(np.arange(count.size), count)
        number = np.arange(line.size) - np.repeat(np.cumsum(count) - count, count)
        lines.append(line)
        tiles.append(begin[line] + number)
    return np.concatenate(lines), np.concatenate(tiles)


def _granules(
    bounds: Bounds, blocks: Blocks, query: np.ndarray, key: np.ndarray
) -> tuple[int, ...]:
    """Counts the sub-blocks of tiles by their live granules: see `SubBlockBounds`."""
    pieces = blocks.block_q // blocks.piece  # of a tile's rows of one head
    in_one = blocks.exact_rows // blocks.piece

    def stacked(bound: np.ndarray) -> np.ndarray:
        """(1, 2 n), or its edges -> [tiles, sub-blocks, pieces]."""
        tiles = bound.reshape(-1, pieces)
        return np.tile(tiles, (1, blocks.heads)).reshape(tiles.shape[0], -1, in_one)

    k_start = stacked(bounds.k_start[0, ::2]).min(axis=2)[query]
    k_end = stacked(bounds.k_end[0, 1::2]).max(axis=2)[query]
    first_key = key[:, None] * blocks.block_k
    granule = blocks.live_columns
    begin = (k_start - first_key).clip(0, blocks.block_k) // granule
    end = -(-(k_end - first_key).clip(0, blocks.block_k) // granule)
    count = np.bincount(
        (end - begin).clip(0).ravel(), minlength=blocks.block_k // granule + 1
    )
    return tuple(map(int, count))
