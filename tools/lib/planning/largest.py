"""Finds the largest step that fits, with few compilations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

TOLERANCE = 1 / 64
"""Relative precision of the largest size that is found."""

LARGEST_GROWTH = 8
"""Largest factor from one try to the next while nothing has failed."""

TRUSTED_TRIES = 5
"""Tries after which memory is not taken for linear: bisection follows."""

MOST_TOKENS = 2**31 - 1
"""Longest context, as indices are int32."""


@dataclass(frozen=True)
class Try:
    """A size that was tried, and the peak of its memory in bytes.

    size: tokens of a context, or of whatever else a step may have more or less.
    peak: None if the compiler found no program that fits.
    """

    size: int
    peak: int | None

    def fits(self, limit: float) -> bool:
        """Returns whether it takes no more than `limit` bytes."""
        return self.peak is not None and self.peak <= limit


@dataclass(frozen=True)
class Search:
    """What sizes there are, and how much memory.

    unit: sizes are multiples of it. limit: bytes that a device may take.
    most: the largest size that there is.
    """

    unit: int
    limit: float
    most: int = MOST_TOKENS
    most_tries: int = 12

    def largest(
        self,
        peak_of: Callable[[int], int | None],
        first: int,
        known: Sequence[Try] = (),
    ) -> list[Try]:
        """Tries sizes until the largest that fits is known to within TOLERANCE.

        peak_of: compiles a size and returns the bytes that it takes, None if it does
          not compile. Memory is taken to be close to a line in the size: tries go to
          where the line through two of them meets the limit, and each is confirmed by
          compiling.
        first: size to begin with. known: tries that were made before.

        Returns:
          Every try in its order; the largest that fits is the answer, if any does.

        Raises:
          ValueError: unit or first are below 1.
        """
        if self.unit < 1 or first < 1:
            raise ValueError(f"{first=} and unit={self.unit} must be at least 1")
        tries = [*known]
        size: int | None = max(self.unit, first // self.unit * self.unit)
        while size is not None and len(tries) < self.most_tries:
            tries.append(Try(size, peak_of(size)))
            size = self._next(tries)
        return tries

    def best(self, tries: Sequence[Try]) -> Try | None:
        """Returns the largest of the tries that fit."""
        fitting = (one for one in tries if one.fits(self.limit))
        return max(fitting, key=lambda one: one.size, default=None)

    def step(self, low: int) -> int:
        """Returns how precisely a largest size of about `low` is found."""
        return max(self.unit, int(TOLERANCE * low))

    def _next(self, tries: list[Try]) -> int | None:
        """Returns the size to try next, or None if the answer is precise enough."""
        best = self.best(tries)
        low = best.size if best else 0
        failed = [one.size for one in tries if one.size > low]
        high = min(failed, default=None)
        step = self.step(low)
        if high is not None and high - low <= step:
            return None
        guess = self._guess(tries)
        if high is None:
            # At least a step: what the line excludes must be shown to fail.
            guess = max(min(guess, LARGEST_GROWTH * low, self.most), low + step)
        elif len(tries) > TRUSTED_TRIES or not low < guess < high:
            guess = (low + high) / 2
        else:
            # Not next to what is known already: lines are wrong by a little.
            margin = (high - low) / 16
            guess = min(max(guess, low + margin), high - margin)
        size = max(int(guess) // self.unit * self.unit, low + self.unit)
        return None if size in (high, low) or size > self.most else size

    def _guess(self, tries: list[Try]) -> float:
        """Estimates the size whose memory meets the limit."""
        measured = [one for one in tries if one.peak is not None]
        measured.sort(key=lambda one: (abs(one.peak - self.limit), -one.size))
        if not measured:
            return tries[-1].size / 2
        near = measured[0]
        # In proportion: what does not grow with the size then makes the guess small.
        guess = near.size * self.limit / near.peak
        if len(measured) > 1:
            far = measured[1]
            slope = (near.peak - far.peak) / (near.size - far.size)
            if slope > 0:
                guess = near.size + (self.limit - near.peak) / slope
        return guess
