"""Chooses the documents held out for validation, by their text alone.

So copies of one text never come to lie on both sides, whatever else is in a corpus.
"""

import hashlib
import heapq

END = 1 << 64
FRACTION = 0.02
"""Share that is held out where none is asked for."""
LARGEST_SHARE = 0.1
"""Share of texts, and of characters, that is held out for a size's sake, at most."""


class Holdout:
    """Splits texts, after `add` was called with all of them."""

    def __init__(self, fraction: float | None = None, least: int = 0):
        """Holds out about this share of the texts.

        At least one is held out, and never all, where two texts differ.

        Args:
          fraction: the share; None: `FRACTION`, and of small corpora more.
          least: characters to hold out where no share is asked for, within
            `LARGEST_SHARE`.

        Raises:
          ValueError: the fraction is not between 0 and 1.
        """
        if fraction is not None and not 0 < fraction < 1:
            raise ValueError(f"validation_fraction={fraction} must be between 0 and 1")
        self._wanted = int((fraction or FRACTION) * END)
        self._wanted_size = least if fraction is None else 0
        self._least, self._most = END, 0
        self._count = self._size = 0
        # The texts of the smallest marks: (-mark, size), just enough of them.
        self._first: list[tuple[int, int]] = []
        self._first_size = 0
        self._found: int | None = None

    def add(self, text: str) -> None:
        """Adds one text."""
        mark = _mark(text)
        self._least, self._most = min(self._least, mark), max(self._most, mark)
        self._count, self._size = self._count + 1, self._size + len(text)
        self._found = None
        heapq.heappush(self._first, (-mark, len(text)))
        self._first_size += len(text)
        while self._first_size - self._first[0][1] >= self._wanted_size:
            self._first_size -= heapq.heappop(self._first)[1]
            if not self._first:
                break

    def split(self, text: str) -> str:
        """Returns "train" or "validation"."""
        if self._found is None:
            self._found = self._cut()
        return "validation" if _mark(text) < self._found else "train"

    def _cut(self) -> int:
        """Returns the mark below which texts are held out."""
        if self._least >= self._most:
            return 0
        cut, size = max(self._wanted, self._least + 1), 0
        most = int(LARGEST_SHARE * self._count)
        for negative, length in sorted(self._first, reverse=True)[:most]:
            if size >= LARGEST_SHARE * self._size:
                break
            cut, size = max(cut, 1 - negative), size + length
        return min(cut, self._most)


def _mark(text: str) -> int:
    """Returns a number below `END` that depends on the text alone, evenly spread."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
