"""Chooses the documents held out for validation, by their text alone.

So copies of one text never come to lie on both sides, whatever else is in a corpus.
"""

import hashlib

END = 1 << 64


class Holdout:
    """Splits texts, after `add` was called with all of them."""

    def __init__(self, fraction: float):
        """Holds out about this share of the texts.

        At least one is held out, and never all, where two texts differ.

        Raises:
          ValueError: the fraction is not between 0 and 1.
        """
        if not 0 < fraction < 1:
            raise ValueError(f"validation_fraction={fraction} must be between 0 and 1")
        self._wanted = int(fraction * END)
        self._least, self._most = END, 0

    def add(self, text: str) -> None:
        """Adds one text."""
        mark = _mark(text)
        self._least, self._most = min(self._least, mark), max(self._most, mark)

    def split(self, text: str) -> str:
        """Returns "train" or "validation"."""
        return "validation" if _mark(text) < self._cut else "train"

    @property
    def _cut(self) -> int:
        """Texts whose mark is below this are held out."""
        if self._least >= self._most:
            return 0
        return min(max(self._wanted, self._least + 1), self._most)


def _mark(text: str) -> int:
    """Returns a number below `END` that depends on the text alone, evenly spread."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
