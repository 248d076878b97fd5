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
    walks = (numbers[list(cycle)] for cycle in cycles)
    return tuple(tuple(np.roll(x, -x.argmin()).tolist()) for x in walks) or alone


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


@functools.cache
def cycles_of_torus(shape: Shape) -> tuple[Walk, ...]:
    """Returns as many disjoint Hamiltonian cycles of a torus as it has axes.

    At first a way is all links along an axis: as many cycles as there are lines. Of a
    square whose opposite sides belong to one way, and the others to another, both are
    exchanged if that joins two cycles of one way: it may at most cut one of the other.

    shape: chips along each axis, at least 3. Chips are numbered as in an array of that
      shape; () if no cycles are found.
    """
    chips, axes = np.arange(math.prod(shape)).reshape(shape), range(len(shape))
    after = [np.roll(chips, -1, axis).ravel().tolist() for axis in axes]
    before = [np.roll(chips, 1, axis).ravel().tolist() for axis in axes]
    # By axis and chip, the way that has the link from there to the next.
    ways = [[axis] * chips.size for axis in axes]

    def cycles(way: int) -> list[list[int]]:
        """Returns the chips of each cycle of a way, in their order."""
        found, left = [], dict.fromkeys(range(chips.size))
        while left:
            chip, cycle = next(iter(left)), []
            while chip is not None:
                del left[chip]
                cycle.append(chip)
                beside = [after[a][chip] for a in axes if ways[a][chip] == way]
                last = [(a, before[a][chip]) for a in axes]
                beside += [other for a, other in last if ways[a][other] == way]
                chip = next((other for other in beside if other in left), None)
            found.append(cycle)
        return found

    def numbers(way: int) -> list[int]:
        """Returns the number of the cycle of a way that each chip is in."""
        found = {chip: n for n, cycle in enumerate(cycles(way)) for chip in cycle}
        return [found[chip] for chip in range(chips.size)]

    for least in (2, *[1] * MOST_ROUNDS):  # at first what joins two of either way
        number = [numbers(way) for way in axes]
        if not any(map(any, number)):
            return tuple(tuple(*cycles(way)) for way in axes)
        pairs = itertools.combinations(axes, 2)
        for chip, (a, b) in itertools.product(range(chips.size), pairs):
            over, up = after[a][chip], after[b][chip]
            one, other = ways[a][chip], ways[b][chip]
            if one == other or (one, other) != (ways[a][up], ways[b][over]):
                continue
            ends = {one: (number[one][chip], number[one][up])}
            ends[other] = number[other][chip], number[other][over]
            if sum(first != second for first, second in ends.values()) < least:
                continue
            ways[a][chip] = ways[a][up] = other
            ways[b][chip] = ways[b][over] = one
            for way, (first, second) in ends.items():
                joined = [first if n == second else n for n in number[way]]
                number[way] = numbers(way) if first == second else joined
    return ()
