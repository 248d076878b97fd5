"""Chooses the documents held out for validation, by their text alone.

So copies of one text never come to lie on both sides, whatever else is in a corpus.
"""

import hashlib

import numpy as np

END = 1 << 64
BINS = 1 << 16
"""Number of ranges in which marks of texts are counted; in a small corpus, most texts
have a range of their own."""
FRACTION = 0.02
"""Share that is held out by default."""
LARGEST_SHARE = 0.1
"""Share of texts, and of characters, that is held out for a size's sake, at most."""


class Holdout:
    """Finds which texts are held out, after `add` was called with all of them."""

    def __init__(self, fraction: float | None = None, least: int = 0):
        """Holds out about this share of the characters of all texts.

        At least one text is held out, and never all, where two differ.

        Args:
          fraction: the share; None: `FRACTION`, and of small corpora more.
          least: characters to hold out where no share is asked for, within
            `LARGEST_SHARE`.

        Raises:
          ValueError: the fraction is not between 0 and 1.
        """
        if fraction is not None and not 0 < fraction < 1:
            raise ValueError(f"validation_fraction={fraction} must be between 0 and 1")
        self._share = fraction or FRACTION
        self._wanted = least if fraction is None else 0
        # Characters, texts and, where they are added, tokens of each range.
        self._sums = np.zeros((3, BINS), np.int64)
        self._least = END
        self._most = 0

    def add(self, marks: np.ndarray, characters: np.ndarray) -> None:
        """Adds texts, by their marks, uint64 (n,), and sizes, int64 (n,)."""
        if marks.size:
            self._least = min(self._least, int(marks.min()))
            self._most = max(self._most, int(marks.max()))
        ranges = _ranges(marks)
        np.add.at(self._sums[0], ranges, characters)
        np.add.at(self._sums[1], ranges, 1)

    def add_tokens(self, marks: np.ndarray, tokens: np.ndarray) -> None:
        """Adds the sizes of texts in tokens, int64 (n,), for `fraction_of`."""
        np.add.at(self._sums[2], _ranges(marks), tokens)

    @property
    def is_alone(self) -> bool:
        """Whether there is one text, which can only be split by position."""
        return self._sums[1].sum() == 1

    def cut(self) -> int:
        """Returns the mark below which texts are held out."""
        return self._cut(self._share, self._wanted)

    def _cut(self, share: float, wanted: int) -> int:
        if self._least >= self._most:
            return 0
        size, texts, _ = self._below()
        nearest = np.abs(size - share * size[-1]).argmin()
        least = np.searchsorted(size, min(wanted, LARGEST_SHARE * size[-1]))
        most = np.searchsorted(texts, LARGEST_SHARE * texts[-1], side="right") - 1
        cut = int(max(nearest, min(least, most))) * END // BINS
        return min(max(cut, self._least + 1), self._most)

    def _below(self) -> np.ndarray:
        """Returns characters, texts and tokens below each range, and all of them."""
        return np.pad(np.cumsum(self._sums, axis=1), ((0, 0), (1, 0)))

    def share_by_position(self) -> float:
        """Returns the share of one text that is held out, at its end."""
        size = max(self._sums[0].sum(), 1)
        return max(self._share, min(self._wanted / size, LARGEST_SHARE))

    def fraction_of(self, held_out: int, trained_on: int) -> float | None:
        """Returns the least percentage that holds out so many tokens, as a fraction.

        trained_on: tokens that it has to leave. None: no percentage does both.
        """
        below = self._below()[2]
        for percent in range(1, 100):
            fraction = percent / 100
            held = int(fraction * below[-1])
            if not self.is_alone:
                held = below[self._cut(fraction, 0) // (END // BINS)]
            if held >= held_out and below[-1] - held >= trained_on:
                return fraction
        return None


def _ranges(marks: np.ndarray) -> np.ndarray:
    return (marks // np.uint64(END // BINS)).astype(np.int64)


def mark(text: str) -> int:
    """Returns a number below `END` that depends on the text alone, evenly spread."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
