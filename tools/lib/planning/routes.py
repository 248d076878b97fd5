"""Passes of a ring: its kernels, and what each link carries beside them.

A `Pass` lists what `kernels.ring_steps` runs for a schedule: parts of its steps, one
after another, with the kernels of each and the arrays that travel meanwhile. Both take
pieces, turns and visits from the schedule; a test counts what a traced ring sends.
Nothing here knows chips: a link is one direction between two neighbours on a walk.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from data.document_mask import DocumentMask
from kernels.layouts import Layout, order
from kernels.masks import Visible
from kernels.reads import reads_of
from kernels.schedule import Piece, Route, Schedule, Walk


class Attended(NamedTuple):
    """A kernel of a part.

    piece: its number. hops: from the piece's own device. half: of the queries, 0 or 1,
      where only one half is attended with; else None.
    """

    piece: int
    hops: int
    half: int | None = None


class Sent(NamedTuple):
    """Both arrays of a piece on their way.

    piece: its number. hops: along its walk, negative for back. is_gradient: whether
      they are dk and dv; else k and v.
    """

    piece: int
    hops: int
    is_gradient: bool


class Part(NamedTuple):
    """What a device does between two barriers: kernels, and transfers beside them."""

    attended: tuple[Attended, ...]
    sent: tuple[Sent, ...]


class Load(NamedTuple):
    """Share of a shard's keys and values, and of their gradients, over a link."""

    keys: float
    gradients: float

    def __add__(self, other: "Load") -> "Load":
        return Load(self.keys + other.keys, self.gradients + other.gradients)


@dataclass(frozen=True)
class Pass:
    """A ring, once forward or backward.

    schedule: its pieces; of a ring that counts its steps, those of all of them.
    is_counted: whether gradients come home after the last step, from device to device.
    is_alone: whether nothing is sent, as in a ring of one.
    """

    schedule: Schedule
    direction: str
    is_counted: bool = False
    is_alone: bool = False

    @classmethod
    def of(
        cls,
        route: Route,
        ring_size: int,
        shape: tuple[int, int],
        direction: str,
        turns: int = 1,
        count: int | None = None,
    ) -> "Pass":
        """Makes the pass of a route.

        shape: key/value heads of a device, and slots of a shard. turns: backward.
        count: steps after the first, of a ring that counts them.
        """
        schedule = route.schedule(
            ring_size, *shape, turns if direction == "backward" else 1
        )
        if not route.is_counted or ring_size == 1:
            return cls(schedule, direction, is_alone=ring_size == 1)
        if not count:
            own = [piece for piece in schedule.pieces if piece.first == 0]
            numbers = (tuple(range(len(own))),)
            pieces = tuple(replace(piece, visits=range(1)) for piece in own)
            return cls(Schedule(pieces, numbers), direction, True, is_alone=True)
        pieces = tuple(
            replace(piece, visits=range(piece.visits.start, count + 1))
            for piece in schedule.pieces
        )
        return cls(Schedule(pieces, schedule.turns), direction, True)

    @property
    def steps(self) -> int:
        """Ring steps; backward the second half of the local block is one more."""
        late = self.direction == "backward" and not self.is_alone
        return self.schedule.last + 1 + late

    @functools.cached_property
    def ways(self) -> tuple[Walk, ...]:
        """The different ways that pieces take: each has links of its own."""
        pieces = self.schedule.pieces
        return tuple({piece.walk: None for piece in pieces if piece.last})

    def parts(self, step: int) -> Iterator[Part]:
        """Yields what a device does in a ring step, in order."""
        numbers = range(len(self.schedule.pieces))
        if self.is_alone:
            yield Part(tuple(Attended(number, 0) for number in numbers), ())
        elif self.direction == "forward":
            yield Part(self._attended(numbers, step), self._keys(numbers, step))
        else:
            yield from self._backward(step)

    def _backward(self, step: int) -> Iterator[Part]:
        turns = self.schedule.turns
        for turn, mine in enumerate(turns):
            role = step - (turn == 0)
            moved = self._gradients(turns[turn - 1], role)
            alone = [one for one in moved if self._comes_home(one.piece, role)]
            if self.is_counted and alone:
                yield Part((), tuple(alone))  # a loop, which nothing overlaps
                moved = [one for one in moved if one not in alone]
            yield Part(self._attended(mine, step), (*self._keys(mine, step), *moved))

    def _visits(self, number: int, step: int) -> bool:
        piece = self.schedule.pieces[number]
        is_late = step > self.schedule.last
        return piece.first <= step <= piece.last or (is_late and piece.first == 0)

    def _attended(self, numbers: Sequence[int], step: int) -> tuple[Attended, ...]:
        late = step > self.schedule.last
        is_local = self.direction == "backward" and (step == 0 or late)
        half = int(late) if is_local else None
        pieces = self.schedule.pieces
        return tuple(
            Attended(i, 0 if late else int(pieces[i].place(step)), half)
            for i in numbers
            if self._visits(i, step)
        )

    def _keys(self, numbers: Sequence[int], step: int) -> tuple[Sent, ...]:
        pieces = self.schedule.pieces
        return tuple(
            Sent(i, pieces[i].hops(step), False)
            for i in numbers
            if step < pieces[i].last
        )

    def _gradients(self, numbers: Sequence[int], role: int) -> list[Sent]:
        pieces, found = self.schedule.pieces, []
        for i in numbers:
            first = 0 if self.is_counted else pieces[i].first
            if pieces[i].last and first <= role <= pieces[i].last:
                is_home = self._comes_home(i, role)
                hops = -pieces[i].visits[-1] if is_home else pieces[i].hops(role)
                found.append(Sent(i, hops, True))
        return found

    def _comes_home(self, number: int, role: int) -> bool:
        return role == self.schedule.pieces[number].last

    def share(self, piece: Piece) -> float:
        """Returns the share of a shard that a piece is."""
        parts = [(p.heads, p.slots) for p in self.schedule.pieces]
        heads = max(heads[1] for heads, _ in parts)
        slots = max(slots[1] for _, slots in parts)
        size = (piece.heads[1] - piece.heads[0]) * (piece.slots[1] - piece.slots[0])
        return size / (heads * slots)

    def loads(self, part: Part) -> dict[Walk, Load]:
        """Returns what each link of a way carries during a part.

        A transfer of several hops takes as many links, the shorter way round.
        """
        found: dict[Walk, Load] = {}
        for one in part.sent:
            piece = self.schedule.pieces[one.piece]
            hops, walk = one.hops % piece.walk.length, piece.walk
            if 2 * hops > walk.length:
                hops, walk = walk.length - hops, walk.back()
            share = hops * self.share(piece)
            load = Load(0.0, share) if one.is_gradient else Load(share, 0.0)
            found[walk] = found.get(walk, Load(0.0, 0.0)) + load
        return found

    def total(self, part: Part) -> Load:
        """Returns what a device sends during a part, however far."""
        found = Counter()
        for one in part.sent:
            found[one.is_gradient] += self.share(self.schedule.pieces[one.piece])
        return Load(float(found[False]), float(found[True]))


@functools.cache
def route_of(
    layout: Layout,
    ring_size: int,
    length: int,
    mask: DocumentMask,
    walks: tuple[Walk, ...],
    is_counted: bool = False,
) -> Route:
    """Returns the route of a layer's ring, as `make_ring_attention` chooses it.

    length: of a shard. mask: of the layer; its documents are not known when traced.
    """
    if ring_size == 1 or not (mask.window or is_counted):
        return Route(walks)  # all is read, whatever the layout
    outline = mask.within()(
        order(layout, ring_size, ring_size * length), ring_size * length
    )
    return Route.within(outline, layout, ring_size, is_counted) or Route(walks)


def counted_steps(
    route: Route, visible: Visible, layout: Layout, ring_size: int
) -> int:
    """Counts the steps after the first of a ring, as `Ring.count` does.

    visible: bounds (1, T) in layout order, of packed documents.
    """
    offsets = [read.offset for read in reads_of(visible, layout, ring_size)]
    if route.counts_both_ways:
        offsets = [min(offset, ring_size - offset) for offset in offsets]
    return max(offsets, default=0)


def describe(route: Route, ring_size: int, done: Pass, count: int | None) -> str:
    """Names the route of a ring in a few words."""
    if ring_size == 1:
        return "no ring"
    if route.is_counted:
        ways = "both ways" if route.counts_both_ways else "one way"
        return f"{count} of {ring_size - 1} steps, {ways}"
    if any(len(piece.visits) < ring_size for piece in done.schedule.pieces):
        return "neighbours"
    ways = len(done.ways)
    if ways < 3:
        return ("one way", "both ways")[ways - 1]
    return f"{math.ceil(ways / 2)} cycles"
