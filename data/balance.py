"""Steps of rows with alike work, so that rings beside each other wait less."""

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

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
        drawn = self.order.sequence(rows)
        window = self.steps * self.batch_rows
        # Of two windows: threads read ahead into the next one.
        kept = functools.lru_cache(maxsize=2)
        assigned = kept(functools.partial(self._assigned, drawn))

        def row(number: int) -> int:
            return int(assigned(number // window)[number % window])

        return grain.MapDataset.range(len(drawn)).map(row)

    def _assigned(self, drawn: grain.MapDataset[int], number: int) -> np.ndarray:
        """Returns a window's rows, int64 (rows,), by steps; those left over come last.

        It depends on these rows alone, so a run that begins in a window reads its steps
        as one that read all those before.
        """
        window = self.steps * self.batch_rows
        end = min((number + 1) * window, len(drawn))
        rows = np.array([drawn[n] for n in range(number * window, end)])
        whole = len(rows) // self.batch_rows * self.batch_rows
        times = Counter[int]()
        keys = []
        for row in rows[:whole].tolist():
            keys.append((times[row], -self.work(row)))
            times[row] += 1
        steps = np.array(sorted(range(whole), key=keys.__getitem__), int)
        steps = steps.reshape(-1, self.batch_rows)
        # Steps come as the first of their rows were drawn: by chance, not by work.
        steps = steps[np.argsort(steps[:, 0])][:, folded(self.batch_rows)]
        return np.append(rows[steps.reshape(-1)], rows[whole:])


def folded(count: int) -> list[int]:
    """Returns 0 … count - 1 with the first beside the last, and these pairs so again.

    Of numbers that decrease, halves, quarters and so on then have alike sums.
    """
    groups = [[number] for number in range(count)]
    while len(groups) > 1:
        half = -(-len(groups) // 2)
        joined = groups[:half]
        for group, last in zip(joined, reversed(groups[half:]), strict=False):
            group += last
        groups = joined
    return groups[0]
