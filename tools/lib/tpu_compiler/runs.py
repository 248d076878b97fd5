"""Adds up a compiled kernel: how often each of its regions runs for given bounds.

Slow and simple, for checking the planner: every row of every tile is looked at.
"""

import itertools
from collections import Counter
from dataclasses import dataclass

import numpy as np

from tools.lib.tpu_compiler.bundles import BRANCH, Kernel, Nest, Schedule, tile_body


@dataclass(frozen=True)
class Tiles:
    """Tiles of a head, by direct inspection of its bounds.

    lines: for each program, the kinds of its live tiles, "full", "diagonal" or
      "partial", in the order of the loop.
    granules: of sub-blocks of partial tiles, by number of live granules.
    """

    lines: tuple[tuple[str, ...], ...]
    granules: Counter[int]

    @classmethod
    def of(
        cls, k_start: np.ndarray, k_end: np.ndarray, tile: int, piece: int, by_key: bool
    ) -> "Tiles":
        """Inspects bounds (L,) on L keys, in square tiles of square pieces.

        by_key: whether a program is a key tile.
        """
        number = -(-k_start.size // tile)
        kinds: dict[tuple[int, int], str] = {}
        granules: Counter[int] = Counter()
        for i in range(number):
            lo, hi = (bound[i * tile :][:tile] for bound in (k_start, k_end))
            for j in range(number):
                first = j * tile
                begin = lo.clip(first, first + tile) - first
                end = hi.clip(first, first + tile) - first
                if not (begin < end).any():
                    continue
                kinds[i, j] = "full" if (end - begin == tile).all() else "partial"
                is_line = hi - hi[0] == np.arange(tile)
                if is_line.all() and not begin.any() and end[0] <= 1:
                    kinds[i, j] = "diagonal"
                if kinds[i, j] == "partial":
                    for rows in range(0, tile, piece):
                        low = begin[rows : rows + piece].min() // piece
                        granules[-(-end[rows : rows + piece].max() // piece) - low] += 1
        numbers = range(number)
        lines = (
            tuple(kinds[key] for i in numbers if (key := (i, line)) in kinds)
            if by_key
            else tuple(kinds[key] for j in numbers[::-1] if (key := (line, j)) in kinds)
            for line in numbers
        )
        return cls(tuple(lines), granules)


def run_bundles(schedule: Schedule, tiles: Tiles) -> int:
    """Returns the bundles that a kernel of ours runs for a head, before any stalls."""
    kernel = Kernel.of(schedule)
    way = kernel.way
    live = [line for line in tiles.lines if line]
    cold = sum(  # programs whose first copy the one before has not started
        bool(line) and not before
        for before, line in itertools.pairwise(((), *tiles.lines))
    )
    begins = (  # what only some programs begin with, and how many
        (kernel.begins[0], sum("diagonal" not in line for line in tiles.lines)),
        (kernel.begins[1], sum("partial" in line for line in tiles.lines)),
    )
    depth = min(r.depth for r in schedule.regions if r.inside == way[-1].span)
    total = 0
    for outer in way[1 if depth > 1 else 0 : -1]:  # of one program, there is no loop
        total += outer.own * len(tiles.lines)
        for nest in outer.inner:
            runs = [count for begin, count in begins if begin == nest]
            if runs:
                total += nest.own * runs[0]
            elif not nest.used["MXU"]:
                is_copy = nest.span.end <= way[-1].span.begin
                total += nest.span.bundles * (cold if is_copy else len(live))
    return total + _tile_bundles(schedule, kernel, tiles, cold)


def _tile_bundles(schedule: Schedule, kernel: Kernel, tiles: Tiles, cold: int) -> int:
    every = Counter(kind for line in tiles.lines for kind in line)
    firsts = sum(line[0] == "full" for line in tiles.lines if line)
    body, loop = tile_body(schedule).place, kernel.way[-1]
    total = (loop.own + BRANCH) * every.total()
    total += kernel.full.own * every["full"]
    total += sum(nest.own for nest in kernel.diagonals) * every["diagonal"]
    total += kernel.partial.own * every["partial"]
    for nest in loop.inner:
        if not nest.used["MXU"]:  # starts the next copy
            total += nest.span.bundles * (every.total() - cold)
    looks = (look for look in kernel.full.working if look.span.end <= body.begin)
    total += sum(look.own + _turns(look, SUB_BLOCKS) for look in looks) * firsts
    turn = list(kernel.partial.descend())[-1]
    total += (turn.own + BRANCH) * tiles.granules.total()
    return total + sum(
        branch.own * tiles.granules[number]
        for number, branch in enumerate(turn.working, 1)
    )


SUB_BLOCKS = 4
"""Of a tile."""


def _turns(nest: Nest, turns: int) -> int:
    """Returns the bundles of a nest's inner loops."""
    return sum(loop.span.bundles + BRANCH for loop in nest.inner) * turns
