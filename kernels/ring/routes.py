"""Routes: the ways that keys and values take around a ring, and how far they go.

A *chunk* is a part of every shard, some heads and some slots or all, that travels by
itself: from device to device, or past those that do not read it, to where it is
attended to, its stops.

    AllShards     all of a shard stops at every device, one way or both ways round: a
                  chunk each way
    Neighbours    the slots that others read stop at the devices that read them alone
    Counted       whole shards go as far as the program counts from the bounds

A route gives the `Schedule` that the ring runs, which planner and tests read. All of
this is NumPy and Python, known when a program is traced.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..devices.device import kernel_cores, rings_both_ways
from ..layouts import Layout, Mirror, Striped, Zigzag, order
from ..masks import Visible

Span = tuple[int, int]
"""Half-open range [begin, end)."""

TILE = 128
"""Slots at whose multiples shards are cut, where they are longer than two."""

TURNS_FROM = 1 << 13
"""Rows of a key from which two chunks, one each way round, take turns.

By the clock 6 to 12 % of a backward are saved from here on; with half of the rows it
takes up to 24 % longer (results/2026-11-29-half-steps.md). From here on all transfers
are hidden, and one that nobody needs costs nothing."""

HOME_FROM = 8
"""Devices of a ring from which its keys come home: see `Schedule.comes_home`."""

EVERY_ROW = 1 << 22
"""Rows times shards up to which the bounds of each row are looked at."""


@dataclass(frozen=True)
class Chunk:
    """A part of every shard's keys and values, and where it is attended to.

    heads: of the key/value heads. slots: of a shard's.
    stops: how many devices after its own one it is attended to, one a ring step; below
      0 for devices before. Begins with 0 if its own device attends to it under this
      number too. Of a counted chunk, as far as it may go.
    """

    heads: Span
    slots: Span
    stops: range

    @property
    def first(self) -> int:
        """Ring step of its first stop: 0, or 1 if it only visits others."""
        return min(abs(self.stops.start), 1)

    @property
    def last(self) -> int:
        """Ring step of its last stop."""
        return len(self.stops) - 1 + self.first

    @property
    def way(self) -> int:
        """1 if it goes to the next devices, -1 if to those before."""
        return self.stops.step

    def shifts(self, step: int) -> int:
        """Returns how many devices after its own it is in a ring step."""
        return self.stops[step - self.first] if step >= self.first else 0

    def shifts_after(self, step: int) -> int:
        """Returns the shifts from a step's device to that of the next step."""
        return self.shifts(step + 1) - self.shifts(step)


@dataclass(frozen=True)
class Schedule:
    """The chunks of a ring, in the order in which a device computes them in a step.

    comes_home: whether keys and values go on in the last step too, and come home. Then
      all steps are alike, and one loop: the program calls fewer kernels, whose code XLA
      writes for each call.
    """

    chunks: tuple[Chunk, ...]
    comes_home: bool = False

    @property
    def heads(self) -> tuple[Span, ...]:
        """The head groups of the chunks, in order."""
        return tuple(sorted({chunk.heads for chunk in self.chunks}))

    @property
    def last(self) -> int:
        """The last ring step."""
        return max(chunk.last for chunk in self.chunks)

    @property
    def distinct(self) -> list[int]:
        """Ring steps whose transfers are those of no other step.

        Runs of steps between them send the same keys and gradients, and become loops.
        In the step after a chunk's last one its dk and dv go home: in a loop they would
        go on from there in each step.
        """
        if self.comes_home:
            return []
        steps = {0}
        for chunk in self.chunks:
            steps |= {chunk.first, chunk.last, chunk.last + 1}
        return sorted(step for step in steps if step <= self.last)


@dataclass(frozen=True)
class AllShards:
    """Every shard visits every device.

    both_ways: half of it each way round; else all of it goes to the next devices.
    cores: of a device, which share out the heads of a chunk.
    takes_turns: two chunks also one way: see `backward_route`.
    comes_home: whether keys of a long ring come home, if chunks take turns.
    """

    both_ways: bool = False
    cores: int = 1
    takes_turns: bool = False
    comes_home: bool = False

    def schedule(self, ring_size: int, heads: int, slots: int) -> Schedule:
        """Returns the chunks of shards (B, slots, heads, D).

        Two chunks are of heads if these suffice, else of slots; cores share out whole
        heads. Chunks that cannot be cut go one way.
        """
        around = range(ring_size)
        whole = Chunk((0, heads), (0, slots), around)
        if ring_size == 1 or not (self.both_ways or self.takes_turns):
            return Schedule((whole,))
        back = range(0, -ring_size, -1) if self.both_ways else around
        # Cores share out the heads of a chunk: in halves that they do not divide, one
        # core would wait for the other.
        unit = math.gcd(heads, self.cores)
        tile = math.gcd(slots, TILE)
        if heads > unit:
            first, second = halves_of(heads, unit)
            chunks = replace(whole, heads=first), Chunk(second, whole.slots, back)
        elif slots > tile:
            first, second = halves_of(slots, tile)
            chunks = replace(whole, slots=first), Chunk(whole.heads, second, back)
        else:
            return Schedule((whole,))
        comes_home = self.takes_turns and self.comes_home and ring_size >= HOME_FROM
        return Schedule(chunks, comes_home)


ONE_WAY = AllShards()
"""All of each shard from each device to the next."""


class Read(NamedTuple):
    """What devices read of a shard before their own.

    offset: how many places before, 1 … N - 1. slots: the least span that holds what any
      device reads.
    """

    offset: int
    slots: Span


@dataclass(frozen=True)
class Neighbours:
    """Slots that other devices read visit those devices, and no others.

    Successive devices are visited by one chunk, which goes the shorter way.

    reads: of intervals whose slots are apart, by themselves.
    """

    reads: tuple[tuple[Read, ...], ...]

    def schedule(self, ring_size: int, heads: int, slots: int) -> Schedule:
        """Returns the chunks of shards (B, slots, heads, D)."""
        chunks = [Chunk((0, heads), (0, slots), range(1))]
        for reads in self.reads:
            for stops, span in joined(reads):
                # The same devices, met the other way round: the last of them first.
                back = range(stops[-1] - ring_size, stops[0] - ring_size - 1, -1)
                is_nearer = -back.start < stops.start
                chunks.append(Chunk((0, heads), span, back if is_nearer else stops))
        return Schedule(tuple(chunks))


@dataclass(frozen=True)
class Counted:
    """Whole shards go as far as any device reads, which the program counts.

    both_ways: they go both ways, until they meet after N / 2 steps; else one way.
    other_axes: mesh axes whose rings must take the same number of steps.
    """

    both_ways: bool = False
    other_axes: tuple[str, ...] = ()

    def schedule(self, ring_size: int, heads: int, slots: int) -> Schedule:
        """Returns the chunks of whole shards, whose stops are as far as they may go.

        A pass ends them after as many steps as are counted.
        """
        on = Chunk((0, heads), (0, slots), range(ring_size))
        if not self.both_ways or ring_size == 1:
            return Schedule((on,))
        back = replace(on, stops=range(-1, -ring_size, -1))
        return Schedule((on, back))


Route = AllShards | Neighbours | Counted


def all_shards(one_way: bool = False, kind: str | None = None) -> AllShards:
    """Returns the route of all shards, between devices of a kind (see `device`)."""
    return AllShards(rings_both_ways(kind) and not one_way, kernel_cores(kind))


def backward_route(route: Route, rows_of_key: int, kind: str | None = None) -> Route:
    """Returns the route of the backward pass, between devices of a kind.

    Between TPUs two chunks of all shards take turns there (see `backward`), if what
    travels can be hidden: both ways each of two links idles for half of the time.

    rows_of_key: queries of a shard times the heads of a key/value head.
    """
    # Not on a v3: the kibibyte of semaphores, see `rings_both_ways`.
    if not isinstance(route, AllShards) or not rings_both_ways(kind):
        return route
    is_hidden = rows_of_key >= TURNS_FROM
    takes_turns = not route.both_ways or is_hidden
    return replace(route, takes_turns=takes_turns, comes_home=is_hidden)


def route_within(
    outline: Visible,
    layout: Layout,
    ring_size: int,
    counts: bool,
    one_way: bool = False,
) -> Route | None:
    """Returns the route of a mask that shows no more than `outline`; None for all.

    outline: bounds of the queries in layout order, (B or 1, T) or (m, B or 1, T).
    counts: whether the program may count what is left of that. one_way: whether counted
      shards go to the next devices alone.
    """
    reads = _reads_apart(outline.intervals(), layout, ring_size)
    slots = outline.k_start.shape[-1] // ring_size
    if are_few(reads, ring_size, slots):
        return Neighbours(reads)
    if not counts or layout == Striped():  # documents are everywhere
        return None
    index = order(layout, ring_size, ring_size * slots)
    is_causal = bool((outline.k_end <= index + 1).all())
    reads_both_sides = isinstance(layout, Mirror | Zigzag) or not is_causal
    return Counted(both_ways=reads_both_sides and not one_way)


def reads_of(visible: Visible, layout: Layout, ring_size: int) -> tuple[Read, ...]:
    """Returns what devices read of other shards, in the order of the offsets.

    visible: known bounds in layout order, (B or 1, T) or (m, B or 1, T).
    """
    length = visible.k_start.shape[-1] // ring_size
    if not length:
        return ()
    k_start = np.reshape(visible.k_start, (-1, ring_size, length))
    k_end = np.reshape(visible.k_end, (-1, ring_size, length))
    if k_start.size * ring_size > EVERY_ROW:
        # Of bounds that do not decrease, along either half of a shard (see `Zigzag`).
        tile = math.gcd(length, length // 2, TILE)
        k_start = k_start[..., ::tile]
        k_end = k_end[..., tile - 1 :: tile]
    reads = []
    for offset in range(1, ring_size):
        shard = (np.arange(ring_size) - offset)[:, None] % ring_size
        begin = layout.count(shard, k_start, ring_size, length)
        end = layout.count(shard, k_end, ring_size, length)
        is_read = begin < end
        if is_read.any():
            span = int(begin[is_read].min()), int(end[is_read].max())
            reads.append(Read(offset, _in_tiles(span, length)))
    return tuple(reads)


def _reads_apart(
    visible: Visible, layout: Layout, ring_size: int
) -> tuple[tuple[Read, ...], ...]:
    """Returns the reads of intervals (m, B or 1, T); together where these meet.

    So the first tokens of a sequence go around alone, and not in a span up to those
    that a window shows.
    """
    intervals: list[tuple[Span, Visible]] = []
    for k_start, k_end in zip(visible.k_start, visible.k_end, strict=True):
        reads = reads_of(Visible(k_start, k_end), layout, ring_size)
        if reads:
            begin = min(read.slots[0] for read in reads)
            end = max(read.slots[1] for read in reads)
            intervals.append(((begin, end), Visible(k_start[None], k_end[None])))
    # Spans that overlap become one. A chunk shows all intervals of its slots: in two
    # chunks the same keys would count twice.
    intervals.sort(key=lambda interval: interval[0])
    apart: list[tuple[Span, Visible]] = []
    for span, bounds in intervals:
        if apart and span[0] < apart[-1][0][1]:
            before, others = apart.pop()
            span = before[0], max(before[1], span[1])
            bounds = Visible(
                np.concatenate([others.k_start, bounds.k_start]),
                np.concatenate([others.k_end, bounds.k_end]),
            )
        apart.append((span, bounds))
    return tuple(reads_of(bounds, layout, ring_size) for _, bounds in apart)


def joined(reads: Sequence[Read]) -> list[tuple[range, Span]]:
    """Joins reads of successive offsets: (offsets, span of slots) of each run."""
    runs: list[tuple[range, Span]] = []
    for offset, (begin, end) in reads:
        first = offset
        if runs and runs[-1][0].stop == offset:
            offsets, span = runs.pop()
            first = offsets.start
            begin = min(span[0], begin)
            end = max(span[1], end)
        runs.append((range(first, offset + 1), (begin, end)))
    return runs


def are_few(reads: Sequence[Sequence[Read]], ring_size: int, length: int) -> bool:
    """Returns whether devices read less than half of what the others have."""
    sent = 0
    for reads_of_interval in reads:
        for offsets, (begin, end) in joined(reads_of_interval):
            sent += len(offsets) * (end - begin)
    return 2 * sent <= (ring_size - 1) * length


def halves_of(size: int, unit: int) -> tuple[Span, Span]:
    """Cuts a range into halves of whole units, the longer one first."""
    middle = -(-size // (2 * unit)) * unit
    return (0, middle), (middle, size)


def _in_tiles(span: Span, length: int) -> Span:
    if length < 2 * TILE:
        return span
    begin, end = span
    return begin // TILE * TILE, min(length, -(-end // TILE) * TILE)
