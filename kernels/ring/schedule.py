"""Schedules: which piece of a shard's keys and values is where, in each step of a ring.

A *piece* is some heads, or some slots, of every shard. It visits devices along a
*walk*: a permutation of the ring's devices, each of which hands it to the next one. A
ring is its pieces: all that it sends and computes follows from them, and `ring_steps`
runs them without knowing why they are as they are:

    one way       all of a shard visits every device
    both ways     half of the heads, or of the slots, goes the other way round
    cycles        as many pieces as there are disjoint cycles through the devices, twice
    neighbours    slots that others read visit those devices only, and fly home

Everything here is NumPy and Python, known when a program is traced.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from ..layouts import Contiguous, Layout, Striped, order
from ..masks import Visible
from .reads import TILE, Read, Span, are_few, reads_of, runs


@dataclass(frozen=True)
class Walk:
    """Cyclic order of the devices of a ring: each hands its piece to the next in it."""

    devices: tuple[int, ...]

    @classmethod
    def around(cls, ring_size: int) -> "Walk":
        """Returns the walk in the order of the devices' numbers."""
        return cls(tuple(range(ring_size)))

    @property
    def length(self) -> int:
        return len(self.devices)

    def back(self) -> "Walk":
        """Returns the same walk the other way round."""
        return Walk((self.devices[0], *reversed(self.devices[1:])))

    def pairs(self, hops: int) -> list[tuple[int, int]]:
        """Returns (from, to) of every device, a number of hops further."""
        return [
            (device, self.devices[(place + hops) % self.length])
            for place, device in enumerate(self.devices)
        ]

    def sources(self, hops: int) -> np.ndarray:
        """Returns whose piece each device has after a number of hops, int32 (N,)."""
        return np.array(self.devices, np.int32)[(self.places - hops) % self.length]

    @functools.cached_property
    def stride(self) -> int:
        """How far each number is from the last, if alike: 1, or -1; else 0."""
        around = Walk.around(self.length)
        if self == around:
            return 1
        return -1 if self == around.back() else 0

    @functools.cached_property
    def places(self) -> np.ndarray:
        """Place of each device in the walk, int32 (N,)."""
        return np.argsort(self.devices).astype(np.int32)


@dataclass(frozen=True)
class Piece:
    """A part of every shard's keys and values, and the devices that it visits.

    heads: of the key/value heads. slots: of a shard's.
    visits: hops along the walk, from its own device, after which it is attended to;
      one a ring step. From 0 on if its own device attends to it as a piece too.
    """

    heads: Span
    slots: Span
    walk: Walk
    visits: range

    @property
    def last(self) -> int:
        """Ring step of its last visit."""
        return len(self.visits) - 1 + self.first

    @property
    def first(self) -> int:
        """Ring step of its first visit: 0, or 1 if it only visits others."""
        return min(self.visits.start, 1)

    def place(self, step: jax.Array | int) -> jax.Array | int:
        """Returns the hops from its own device to that of a step."""
        if isinstance(step, int) and step < self.first:
            return 0
        return self.visits.start + step - self.first

    def hops(self, step: int) -> int:
        """Returns the hops to the device of the next step."""
        return int(self.place(step + 1) - self.place(step))


@dataclass(frozen=True)
class Schedule:
    """The pieces of a ring, and in which order a device computes them in a step.

    turns: numbers of the pieces computed one after another; while those of one turn
      are, the gradients of the turn before travel.
    """

    pieces: tuple[Piece, ...]
    turns: tuple[tuple[int, ...], ...]

    @property
    def heads(self) -> tuple[Span, ...]:
        """The head groups of the pieces, in order."""
        return tuple(sorted({piece.heads for piece in self.pieces}))

    @property
    def last(self) -> int:
        """The last ring step."""
        return max(piece.last for piece in self.pieces)

    @property
    def alone(self) -> list[int]:
        """Steps that are like no other: those between two of them are alike."""
        begins = {piece.first for piece in self.pieces}
        return sorted({0, *begins, *(piece.last for piece in self.pieces)})

    def steps(self) -> Iterator["Step"]:
        """Yields what is sent and what is attended to in each step, forward."""
        for step in range(self.last + 1):
            sends, attends = {}, {}
            for number, piece in enumerate(self.pieces):
                if piece.first <= step <= piece.last:
                    place = piece.visits.start + step - piece.first
                    attends[number] = piece.walk.sources(place)
                if step < piece.last:
                    sends[number] = piece.walk.pairs(piece.hops(step))
            yield Step(sends, attends)


class Step(NamedTuple):
    """What happens in a step of a schedule, by the pieces' numbers.

    sends: (from, to) of every device. attends: whose piece each attends to, (N,).
    """

    sends: dict[int, list[tuple[int, int]]]
    attends: dict[int, np.ndarray]


@dataclass(frozen=True)
class Route:
    """Ways that keys and values take around a ring, and how far.

    walks: that parts of a shard take; none for one way, in the order of the devices.
    reads: what devices read of other shards, where it is known; None for all.
    is_counted: whether a ring ends where its bounds show no device anything further,
      which its program counts. counts_both_ways: pieces go both ways, to meet at most;
      else one way round.
    cores: of a device, which share out the heads of a piece.
    beside: mesh axes of other rings, which count the same: rings that run side by side
      must not send different numbers of times.
    """

    walks: tuple[Walk, ...] = ()
    reads: tuple[Read, ...] | None = None
    is_counted: bool = False
    counts_both_ways: bool = False
    cores: int = 1
    beside: tuple[str, ...] = ()

    @classmethod
    def within(
        cls, outline: Visible, layout: Layout, ring_size: int, is_counted: bool
    ) -> "Route | None":
        """Returns the route of a mask that shows no more than `outline`; None for all.

        outline: bounds (B or 1, T) of the queries in layout order.
        is_counted: whether the program counts what is left of that.
        """
        reads = reads_of(outline, layout, ring_size)
        slots = outline.k_start.shape[1] // ring_size
        if are_few(reads, ring_size, slots):
            return cls(reads=reads)
        if not is_counted or isinstance(layout, Striped):  # documents are everywhere
            return None
        index = order(layout, ring_size, ring_size * slots)
        is_causal = bool((outline.k_end <= index + 1).all())
        is_one_way = isinstance(layout, Contiguous) and is_causal
        return cls(is_counted=True, counts_both_ways=not is_one_way)

    def schedule(
        self, ring_size: int, heads: int, slots: int, turns: int = 1
    ) -> Schedule:
        """Returns the pieces of a ring of shards (B, slots, heads, D), and their ways.

        turns: in which a device computes each step.
        """
        if ring_size == 1:
            return whole((Walk.around(1),), heads, slots, turns=1)
        if self.is_counted:
            walk = Walk.around(ring_size)
            ways = (walk, walk.back()) if self.counts_both_ways else (walk,)
            return counted(ways, heads, slots, turns, self.cores)
        if self.reads is not None:
            return neighbours(self.reads, ring_size, heads, slots)
        walks = self.walks or (Walk.around(ring_size),)
        return whole(walks, heads, slots, turns, self.cores)


ONE_WAY = Route()
"""All of each shard from each device to the next."""


def whole(
    walks: Sequence[Walk], heads: int, slots: int, turns: int, cores: int = 1
) -> Schedule:
    """Returns the ring in which all of every shard visits every device.

    walks: that pieces take, each of which has as much of a shard as the others, or
      nearly; fewer of them where that sends no less over each.
    heads: key/value heads of a device, cut if they suffice for two walks and the turns,
      else the slots of a shard.
    turns: in which a device computes, if heads or slots suffice.
    cores: that share out the heads of a piece, which are not cut apart.
    """
    together = math.gcd(heads, cores)
    by_heads = heads // together >= max(min(len(walks), 2), turns)
    unit = together if by_heads else math.gcd(slots, TILE)
    cut = (heads if by_heads else slots) // unit
    least = -(-cut // len(walks)) or 1
    walks = walks[: max(1, -(-cut // least))]
    parts = len(walks) * (turns if by_heads and cut >= len(walks) * turns else 1)
    parts = min(max(parts, turns), max(cut, 1))
    pieces = tuple(
        Piece(
            heads=(begin * unit, end * unit) if by_heads else (0, heads),
            slots=(0, slots) if by_heads else (begin * unit, end * unit),
            walk=walks[number % len(walks)],
            visits=range(walks[0].length),
        )
        for number, (begin, end) in enumerate(spans_of(cut, parts))
    )
    spans = spans_of(len(pieces), min(turns, len(pieces)))
    return Schedule(pieces, tuple(tuple(range(*span)) for span in spans))


def neighbours(
    reads: Sequence[Read], ring_size: int, heads: int, slots: int
) -> Schedule:
    """Returns the ring in which shards visit the devices that read them, and no others.

    Successive ones are visited by one piece, which goes the shorter way.
    """
    walk, whole_shard = Walk.around(ring_size), (0, slots)
    pieces = [Piece((0, heads), whole_shard, walk, range(1))]
    for visits, read in runs(reads):
        back = range(ring_size - visits[-1], ring_size - visits[0] + 1)
        is_back = back.start < visits.start
        way = walk.back() if is_back else walk
        pieces.append(Piece((0, heads), read, way, back if is_back else visits))
    return Schedule(tuple(pieces), (tuple(range(len(pieces))),))


def counted(
    walks: Sequence[Walk], heads: int, slots: int, turns: int, cores: int = 1
) -> Schedule:
    """Returns the ring whose pieces visit as many devices as a program counts.

    walks: one, or one each way. Steps of the result stand for the first, all between,
    and the last.
    """
    unit = math.gcd(heads, cores)
    parts = min(heads // unit, turns)
    pieces = tuple(
        Piece((begin * unit, end * unit), (0, slots), walk, range(min(number, 1), 3))
        for begin, end in spans_of(heads // unit, parts)
        for number, walk in enumerate(walks)
    )
    return Schedule(pieces, _turns(len(pieces), parts))


def spans_of(size: int, parts: int) -> list[Span]:
    """Cuts a range into parts of nearly one size, the longer ones first."""
    ends = [-(-size * i // parts) for i in range(parts + 1)]
    return list(zip(ends[:-1], ends[1:], strict=True))


def _turns(pieces: int, parts: int) -> tuple[tuple[int, ...], ...]:
    """Groups the numbers of pieces in one turn a part; of one part, one each."""
    spans = spans_of(pieces, parts if parts > 1 else pieces)
    return tuple(tuple(range(*span)) for span in spans)


def default_walks(ring_size: int) -> tuple[Walk, ...]:
    """Returns both ways round the ring in the order of its devices' numbers."""
    walk = Walk.around(ring_size)
    return walk, walk.back()


def checked_walks(
    walks: Sequence[Sequence[int]] | None, ring_size: int
) -> tuple[Walk, ...] | None:
    """Returns an argument of `make_ring_attention`.

    Raises:
      ValueError: the list is empty, or a walk lacks a device.
    """
    if walks is None:
        return None
    for walk in walks:
        if sorted(walk) != list(range(ring_size)):
            raise ValueError(
                f"each of walks must have the devices 0 … {ring_size - 1} of the ring "
                f"once, in any order, got {list(walk)[:8]} … ({len(walk)} in all)"
            )
    if not walks:
        raise ValueError("walks must be None or have one walk or more, got none")
    return tuple(Walk(tuple(map(int, walk))) for walk in walks)
