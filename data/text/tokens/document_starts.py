"""Where documents begin in a stream: on disk, and read a block at a time."""

from bisect import bisect_right
from functools import lru_cache
from typing import NoReturn

import numpy as np

from data.packed import StoredArray

BLOCK = 1 << 12
"""Documents that are read together."""
_KEPT_BLOCKS = 1 << 3
_KEPT_STARTS = 1 << 16


class DocumentStarts:
    """Where each document begins, and where the last one ends.

    A corpus of any size opens at once, and little of it is in memory. What is read is
    checked: documents follow each other, and none is empty.

    count: documents. end: of the last one, in tokens.
    """

    def __init__(self, stored: StoredArray, end: int, remedy: str):
        """Checks the first block.

        stored: int64 (documents,), at least one. remedy: what to do about damage.

        Raises:
          ValueError: it is damaged.
        """
        self.count = stored.size
        self.end = end
        self._stored = stored
        self._remedy = remedy
        self.block = lru_cache(_KEPT_BLOCKS)(self._read_block)
        self._first = lru_cache(_KEPT_STARTS)(lambda b: self.offset(b * BLOCK))
        self.block(0)

    @property
    def blocks(self) -> int:
        return -(-self.count // BLOCK)

    def search(self, offset: int) -> int:
        """Returns how many documents begin at an offset of the stream or before it."""
        number = bisect_right(range(self.blocks), offset, key=self._first) - 1
        number = max(number, 0)
        starts = self.block(number)[:-1]
        return number * BLOCK + int(starts.searchsorted(offset, side="right"))

    def between(self, begin: int, stop: int) -> np.ndarray:
        """Returns the starts behind `begin` and before `stop`, int64 (documents,)."""
        first = self.search(begin)
        starts = self._stored[first : self.search(stop - 1)]
        self._check(np.r_[begin, starts, stop], first - 1)
        return starts

    def offset(self, document: int) -> int:
        """Returns where a document starts; of `count`: where the last one ends."""
        if document == self.count:
            return self.end
        return int(self._stored[document : document + 1][0])

    def _read_block(self, number: int) -> np.ndarray:
        """Returns the starts of a block and where it ends, int64 (documents + 1,)."""
        first = number * BLOCK
        offsets = self._stored[first : first + BLOCK + 1]
        if first + BLOCK >= self.count:
            offsets = np.append(offsets, self.end)
        if offsets[0] != 0 and number == 0:
            self._refuse(f"the first document begins at {offsets[0]}, not at 0")
        self._check(offsets, first)
        return offsets

    def _check(self, offsets: np.ndarray, first: int) -> None:
        """Checks offsets of the document `first` and those behind it."""
        is_filled = offsets[1:] > offsets[:-1]
        if not is_filled.all():
            empty = int(np.argmin(is_filled))
            begin, end = offsets[empty : empty + 2]
            self._refuse(
                f"document {first + empty} begins at {begin} and ends at {end}"
            )

    def _refuse(self, damaged: str) -> NoReturn:
        raise ValueError(
            f"{self._stored.path} is damaged: {damaged}; copy it again or "
            f"{self._remedy}"
        )
