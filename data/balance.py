"""Steps of rows with alike work, so that rings beside each other wait less."""

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest

import grain
import numpy as np

from data.rows import RowOrder


@dataclass(frozen=True)
class Balanced:
    """An order that deals the rows of a window of steps to its steps by their work.

    A window has the rows that `order` has there, and each of its steps takes neighbours
    by work; rows that come again, in another epoch, stay behind those that come first.
    Within a step, heavy rows have light ones beside them, so that rings of several rows
    have alike sums, however many rings there are: what a step reads depends on no mesh.
    (WLB-LLM, arXiv 2503.17924, moves documents between batches for the same end.)

    order: of the rows as drawn. batch_rows: rows of a step. steps: of a window.
    work: of a row, such as the pairs of query and key that its mask shows.
    """

    order: RowOrder
    work: Callable[[int], int]
    batch_rows: int
    steps: int

    def sequence(self, rows: int) -> grain.MapDataset[int]:
        drawn, window = self.order.sequence(rows), self.steps * self.batch_rows

        @functools.lru_cache(maxsize=2)  # threads read ahead into the next window
        def assigned(number: int) -> np.ndarray:
            places = range(number * window, min((number + 1) * window, len(drawn)))
            found = np.array([drawn[place] for place in places])
            whole = len(found) // self.batch_rows * self.batch_rows
            times, keys = Counter[int](), []
            for row in found[:whole].tolist():
                keys.append((times[row], -self.work(row)))
                times[row] += 1
            steps = np.array(sorted(range(whole), key=keys.__getitem__), int)
            steps = steps.reshape(-1, self.batch_rows)
            # Steps come as the first of their rows were drawn: by chance, not by work.
            steps = steps[np.argsort(steps[:, 0])][:, folded(self.batch_rows)]
            return np.append(found[steps.reshape(-1)], found[whole:])

        def row(place: int) -> int:
            number, inside = divmod(place, window)
            return int(assigned(number)[inside])

        return grain.MapDataset.range(len(drawn)).map(row)


def folded(count: int) -> list[int]:
    """Returns 0 … count - 1 with the first beside the last, and these pairs so again.

    Of numbers that decrease, halves, quarters and so on then have alike sums.
    """
    groups = [[number] for number in range(count)]
    while len(groups) > 1:
        first = -(-len(groups) // 2)
        halves = groups[:first], groups[: first - 1 : -1]
        groups = [a + b for a, b in zip_longest(*halves, fillvalue=[])]
    return groups[0]
