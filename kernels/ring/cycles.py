"""Disjoint cycles: ways for a ring around its chips that share no link.

On a torus a ring that visits its chips in one order leaves most links idle. The links
of a torus with two closed axes make up two Hamiltonian cycles, those of one with three
make up three. A ring that sends a piece of what it has along each of them, both ways,
sends two or three times as much at a time.

The order in which chips stand in a mesh is none of these cycles where a reduce-scatter
needs pairs that lie alike (`torus.pairs_along`): they take every link between two
layers of chips, which another cycle would have to cross.
"""

import functools
import itertools
import math
from collections.abc import Sequence

import jax
import numpy as np

from .slices import by_slice
from .torus import Shape, place, places_of, wraps

Walk = tuple[int, ...]
"""Numbers of devices; each is a neighbour of the one before, the first of the last."""

MOST_ROUNDS = 32
"""Rounds of the search for cycles. A few do, up to a torus of 16 x 16 x 16."""


def disjoint_cycles(devices: np.ndarray, axis: int) -> tuple[Walk, ...]:
    """Returns cyclic orders of the devices along an axis; no two share a link.

    devices: of a mesh, all of their slices. All lines along `axis` must lie alike in
      them, as those of `mesh.make_mesh` do.

    Returns:
      Walks over the numbers of devices in a line, from 0: two or three, where a line is
      a box whose sides are as many closed axes of the slice. Else the order as it is.
    """
    alone = (tuple(range(devices.shape[axis])),)
    lines = np.moveaxis(devices, axis, -1).reshape(-1, devices.shape[axis])
    if None in map(place, lines.flat):
        return alone
    places = np.array([[place(device) for device in line] for line in lines])
    first, *others = places - places.min(axis=1, keepdims=True)
    shape = tuple(int(side) for side in first.max(axis=0) + 1)
    is_alike = all((other == first).all() for other in others)
    is_box = len({tuple(at) for at in first}) == len(first) == math.prod(shape)
    closed = _closed_sides(list(devices.flat), lines[0])
    sides = [side for side, length in enumerate(shape) if length > 1]
    is_torus = all(shape[side] == closed[side] > 2 for side in sides)
    if not (is_alike and is_box and is_torus and len(sides) > 1):
        return alone
    numbers = np.empty(len(first), int)
    numbers[np.ravel_multi_index(first.T, shape)] = range(len(first))
    cycles = cycles_of_torus(tuple(shape[side] for side in sides))
    return tuple(_from_0(numbers[list(cycle)].tolist()) for cycle in cycles) or alone


def _closed_sides(devices: Sequence[jax.Device], line: Sequence[jax.Device]) -> Shape:
    """Returns the lengths of the axes of a line's slice that wrap around, else 0.

    They are those of its places: x, y, z, and the cores of a chip.
    """
    nowhere = (0, 0, 0, 0)
    whole = next(part for part in by_slice(devices) if line[0] in part)
    if not set(line) <= set(whole):
        return nowhere
    lengths = np.ptp(places_of(whole) or [nowhere], axis=0) + 1
    lengths = [int(length) for length in lengths[:3]]
    closed = wraps(line[0].device_kind, tuple(lengths))
    return *(n * is_closed for n, is_closed in zip(lengths, closed, strict=True)), 0


def _from_0(walk: list[int]) -> Walk:
    start = walk.index(0)
    return *walk[start:], *walk[:start]


@functools.cache
def cycles_of_torus(shape: Shape) -> tuple[Walk, ...]:
    """Returns as many disjoint Hamiltonian cycles of a torus as it has axes.

    shape: chips along each axis, at least 3. Chips are numbered as in an array of that
      shape; () if no cycles are found.
    """
    ways = _Ways(shape)
    for number in range(MOST_ROUNDS):
        cycles = [ways.cycles(way) for way in ways.axes]
        if all(len(found) == 1 for found in cycles):
            return tuple(tuple(found[0]) for found in cycles)
        ways.join(only_both=number == 0)
    return ()


class _Ways:
    """Links of a torus, shared out over ways that pass through each chip once.

    At first, those along each axis are one way: as many cycles as there are lines. Of a
    square whose opposite sides belong to one way, and the others to another, both are
    exchanged if that joins two cycles of one way: it may at most cut one of the other.
    """

    def __init__(self, shape: Shape) -> None:
        numbers = np.arange(math.prod(shape)).reshape(shape)
        self.axes = range(len(shape))
        self._chips = range(numbers.size)
        self._next = [np.roll(numbers, -1, axis).ravel().tolist() for axis in self.axes]
        self._last = [np.roll(numbers, 1, axis).ravel().tolist() for axis in self.axes]
        # By axis and chip, the way that has the link from there to the next.
        self._way = [[axis] * numbers.size for axis in self.axes]

    def cycles(self, way: int) -> list[list[int]]:
        """Returns the chips of each cycle of a way, in their order."""
        found, is_seen = [], [False] * len(self._chips)
        for start in self._chips:
            chip, cycle = start, []
            while chip is not None and not is_seen[chip]:
                is_seen[chip] = True
                cycle.append(chip)
                beside = self._beside(way, chip)
                chip = next((other for other in beside if not is_seen[other]), None)
            found += [cycle] if cycle else []
        return found

    def join(self, *, only_both: bool) -> None:
        """Exchanges the sides of each square of links where that joins cycles.

        only_both: only where it joins two of either way, which cuts none.
        """
        number = [self._cycle_numbers(way) for way in self.axes]
        for chip, (a, b) in itertools.product(
            self._chips, itertools.combinations(self.axes, 2)
        ):
            over, up = self._next[a][chip], self._next[b][chip]
            one, other = self._way[a][chip], self._way[b][chip]
            if one == other or (one, other) != (self._way[a][up], self._way[b][over]):
                continue
            pairs = [(number[one][chip], number[one][up])]
            pairs += [(number[other][chip], number[other][over])]
            joined = sum(first != second for first, second in pairs)
            if not joined or (only_both and joined < 2):
                continue
            self._way[a][chip] = self._way[a][up] = other
            self._way[b][chip] = self._way[b][over] = one
            for way, (first, second) in zip((one, other), pairs, strict=True):
                if first == second:
                    number[way] = self._cycle_numbers(way)
                else:
                    number[way] = [first if n == second else n for n in number[way]]

    def _beside(self, way: int, chip: int) -> list[int]:
        """Returns the two neighbours of a chip on a way."""
        after = [self._next[a][chip] for a in self.axes if self._way[a][chip] == way]
        before = (self._last[axis][chip] for axis in self.axes)
        return after + [p for a, p in enumerate(before) if self._way[a][p] == way]

    def _cycle_numbers(self, way: int) -> list[int]:
        """Returns the number of the cycle of a way that each chip is in."""
        numbers = [0] * len(self._chips)
        for number, cycle in enumerate(self.cycles(way)):
            for chip in cycle:
                numbers[chip] = number
        return numbers
