"""Adds up a compiled kernel: how often each of its regions runs for given bounds.

Slow and simple, for checking the planner: every row of every tile is looked at.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from tools.lib.tpu_compiler.bundles import BRANCH, Nest, Schedule, tile_body


@dataclass(frozen=True)
class Tiles:
    """Tiles of a head, by direct inspection of its bounds.

    lines: for each program, whether each of its live tiles is full, in the order of
      the loop. granules: of sub-blocks of partial tiles, by number of live granules.
    query_tiles: of the head.
    """

    lines: tuple[tuple[bool, ...], ...]
    granules: Counter[int]
    query_tiles: int

    @classmethod
    def of(
        cls, k_start: np.ndarray, k_end: np.ndarray, tile: int, piece: int, by_key: bool
    ) -> "Tiles":
        """Inspects bounds (L,) on L keys, in square tiles of square pieces.

        by_key: whether a program is a key tile.
        """
        number = -(-k_start.size // tile)
        kinds: dict[tuple[int, int], bool] = {}
        granules: Counter[int] = Counter()
        for i in range(number):
            lo, hi = (bound[i * tile :][:tile] for bound in (k_start, k_end))
            for j in range(number):
                first = j * tile
                begin = lo.clip(first, first + tile) - first
                end = hi.clip(first, first + tile) - first
                if not (begin < end).any():
                    continue
                kinds[i, j] = bool((end - begin == tile).all())
                if not kinds[i, j]:
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
        return cls(tuple(lines), granules, number)


def run_bundles(schedule: Schedule, tiles: Tiles) -> int:
    """Returns the bundles that a kernel of ours runs for a head, before any stalls."""
    way = list(Nest.of(schedule).descend())
    live = [line for line in tiles.lines if line]
    depth = min(r.depth for r in schedule.regions if r.inside == way[-1].span)
    total = 0
    for outer in way[1 if depth > 1 else 0 : -1]:  # of one program, there is no loop
        total += outer.own * len(tiles.lines)
        aside = [nest for nest in outer.inner if not nest.used["MXU"]]
        for nest in aside:
            is_whole = len(nest.inner) > 1 and nest in (aside[0], aside[-1])
            if nest.used["VALU"]:  # loads the bounds of rows
                total += nest.own * sum(not all(line) for line in tiles.lines)
            elif is_whole and live and len(aside) > 2:  # moves a whole dq
                total += nest.own + _turns(nest, tiles.query_tiles)
            else:  # a first copy
                total += nest.span.bundles * len(live)
    return total + _tile_bundles(schedule, way[-1], tiles)


def _tile_bundles(schedule: Schedule, loop: Nest, tiles: Tiles) -> int:
    every = [is_full for line in tiles.lines for is_full in line]
    firsts = sum(line[0] for line in tiles.lines if line)
    body = tile_body(schedule).place
    total = (loop.own + BRANCH) * len(every)
    for nest in loop.inner:
        if not nest.used["MXU"]:  # starts the next copy
            programs = sum(bool(line) for line in tiles.lines)
            total += nest.span.bundles * (len(every) - programs)
        elif nest.span.holds(body):
            total += nest.own * sum(every)
            looks = (look for look in nest.working if look.span.end <= body.begin)
            total += sum(look.own + _turns(look, SUB_BLOCKS) for look in looks) * firsts
        else:
            total += nest.own * (len(every) - sum(every))
            turn = list(nest.descend())[-1]
            total += (turn.own + BRANCH) * tiles.granules.total()
            for number, branch in enumerate(turn.working, 1):
                total += branch.own * tiles.granules[number]
    return total


SUB_BLOCKS = 4
"""Of a tile."""


def _turns(nest: Nest, turns: int) -> int:
    """Returns the bundles of a nest's inner loops."""
    return sum(loop.span.bundles + BRANCH for loop in nest.inner) * turns
