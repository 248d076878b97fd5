"""Disjoint cycles: ways for a ring around its chips that share no link.

On a torus a ring that visits its chips in one order leaves most links idle. The links
of a torus with two closed axes make up two Hamiltonian cycles, those of one with three
make up three. A ring that sends a piece of what it has along each of them sends two or
three times as much at a time; with each cycle both ways, four or six times.
"""

import itertools
import math

import numpy as np

MOST_ROUNDS = 32
"""Rounds of the search for cycles. A few do, up to a torus of 16 x 16 x 16."""


def disjoint_cycles(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Returns as many disjoint Hamiltonian cycles of a torus as it has axes.

    For `walks` of `make_ring_attention`, where the ring's devices are in the order of
    their places on the torus, the last axis first: `sorted(key=lambda d: d.coords)`.

    At first a way is all links along an axis: as many cycles as there are lines. Of a
    square whose opposite sides belong to one way, and the others to another, both are
    exchanged if that joins two cycles of one way: it may at most cut one of the other.

    shape: chips along each axis, at least 3, all of them closed.

    Returns:
      Numbers of the chips in an array of that shape, in the order of each cycle; () if
      no cycles are found.
    """
    chips, axes = np.arange(math.prod(shape)).reshape(shape), range(len(shape))
    after = [np.roll(chips, -1, axis).ravel().tolist() for axis in axes]
    before = [np.roll(chips, 1, axis).ravel().tolist() for axis in axes]
    # By axis and chip, the way that has the link from there to the next.
    ways = [[axis] * chips.size for axis in axes]

    def cycles(way: int) -> dict[int, int]:
        """Returns the first chip of the cycle that each chip is in, along each."""
        found: dict[int, int] = {}
        for first in range(chips.size):
            ahead = [first]
            while ahead:
                chip = ahead.pop()
                if chip in found:
                    continue
                found[chip] = first
                ahead += [after[a][chip] for a in axes if ways[a][chip] == way]
                last = ((a, before[a][chip]) for a in axes)
                ahead += [other for a, other in last if ways[a][other] == way]
        return found

    for least in (2, *[1] * MOST_ROUNDS):  # at first what joins two of either way
        cycle = [cycles(way) for way in axes]
        if not any(any(firsts.values()) for firsts in cycle):
            return tuple(map(tuple, cycle))
        pairs = itertools.combinations(axes, 2)
        for chip, (a, b) in itertools.product(range(chips.size), pairs):
            over, up = after[a][chip], after[b][chip]
            one, other = ways[a][chip], ways[b][chip]
            if one == other or (one, other) != (ways[a][up], ways[b][over]):
                continue
            joined = cycle[one][chip] != cycle[one][up]
            joined += cycle[other][chip] != cycle[other][over]
            if joined < least:
                continue
            ways[a][chip] = ways[a][up] = other
            ways[b][chip] = ways[b][over] = one
            for way in one, other:
                cycle[way] = cycles(way)
    return ()
