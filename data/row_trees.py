"""Trees in a row: segments of tokens, of which each may continue an earlier one."""

import re
from collections.abc import Sequence
from itertools import cycle
from typing import NamedTuple

import numpy as np

from kernels.trees import tree

GROUP = re.compile(r"([1-9]\d*)\+([1-9]\d*)x([1-9]\d*)")
"""A prompt of some tokens, and a number of answers of some: "32768+16x4096"."""


class RowTrees(NamedTuple):
    """Segments of a row in their order.

    bounds: int64 (s + 1,), where each begins, and where the last one ends.
    parents: int64 (s,), the number of the segment that each continues; -1 for none.
    """

    bounds: np.ndarray
    parents: np.ndarray

    @classmethod
    def of(cls, segments: np.ndarray, begin: int, stop: int) -> "RowTrees":
        """Finds the segments of a row, [begin, stop) of a stream of whole documents.

        segments: int64 (s, 2), as of `data.text.tokens.token_file.TokenFile`.
        """
        first, end = np.searchsorted(segments[:, 0], (begin, stop))
        begins, back = segments[first:end].T
        parents = np.where(back, np.arange(back.size) - back, -1)
        return cls(np.append(begins, stop) - begin, parents)

    @classmethod
    def repeated(cls, documents: Sequence[int | str], tokens: int) -> "RowTrees":
        """Returns documents, repeated until the row is full.

        documents: lengths, or groups (see `GROUP`).
        """
        ends = [0]
        parents: list[int] = []
        for document in cycle(documents):
            if ends[-1] >= tokens:
                break
            group = GROUP.fullmatch(str(document))
            sizes = map(int, group.groups() if group else (document, 0, 0))
            prompt, answers, size = sizes
            parents += [-1] + [len(parents)] * answers
            ends += (ends[-1] + prompt + size * np.arange(answers + 1)).tolist()
        bounds = np.minimum(ends, tokens)
        return cls(bounds, np.array(parents))

    @property
    def sizes(self) -> np.ndarray:
        """Tokens of each, int64 (s,)."""
        return np.diff(self.bounds)

    @property
    def depths(self) -> np.ndarray:
        """Tokens before each that it continues, int64 (s,)."""
        if (self.parents < 0).all():
            return np.zeros_like(self.parents)
        sizes = self.sizes.tolist()
        depths: list[int] = []
        for parent in self.parents.tolist():
            depths.append(depths[parent] + sizes[parent] if parent >= 0 else 0)
        return np.array(depths)

    @property
    def goes_on(self) -> np.ndarray:
        """Whether the next one continues each, bool (s,): its first token is next."""
        return np.append(self.parents[1:] == np.arange(self.parents.size - 1), False)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        sizes = self.sizes
        return int((sizes * self.depths + sizes * (sizes + 1) // 2).sum())

    def visible(
        self, index: np.ndarray, intervals: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns k_start and k_end of the tokens at `index`, int32 (L, intervals)."""
        ids = np.repeat(np.arange(self.parents.size), self.sizes)
        mask = tree(ids, self.parents, intervals)
        k_start, k_end = mask(np.arange(ids.size, dtype=np.int32), ids.size)
        token = np.minimum(index, ids.size - 1)
        # From (m, 1, T), as masks have bounds, to (L, m).
        return np.asarray(k_start)[:, 0, token].T, np.asarray(k_end)[:, 0, token].T
