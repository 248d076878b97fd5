"""Finds the longest context whose step fits, with few compilations."""

from collections.abc import Callable
from dataclasses import dataclass

TOLERANCE = 1 / 64
"""Relative precision of the longest context that is found."""

LARGEST_GROWTH = 8
"""Largest factor from one try to the next while nothing has failed."""

TRUSTED_TRIES = 5
"""Tries after which memory is not taken for linear: bisection follows."""

MOST_TOKENS = 2**31 - 1
"""Longest context, as indices are int32."""


@dataclass(frozen=True)
class Try:
    """A context that was tried, and the peak of its memory in bytes.

    peak: None if the compiler found no program that fits.
    """

    context: int
    peak: int | None

    def fits(self, limit: float) -> bool:
        """Returns whether it takes no more than `limit` bytes."""
        return self.peak is not None and self.peak <= limit


def longest_context(
    peak_of: Callable[[int], int | None],
    *,
    first: int,
    unit: int,
    limit: float,
    most_tries: int = 12,
) -> list[Try]:
    """Tries contexts until the longest that fits is known to within TOLERANCE.

    peak_of: compiles a context and returns the bytes that it takes, None if it does not
      compile. Memory is taken to be close to a line in the context: tries go to where
      the line through two of them meets the limit, and each is confirmed by compiling.
    first: context to begin with. unit: contexts are multiples of it.
    limit: bytes that a device may take.

    Returns:
      Every try in its order; the longest that fits is the answer, if any does.

    Raises:
      ValueError: unit or first are below 1.
    """
    if unit < 1 or first < 1:
        raise ValueError(f"{first=} and {unit=} must be at least 1 token")
    tries: list[Try] = []
    context: int | None = max(unit, first // unit * unit)
    while context is not None and len(tries) < most_tries:
        tries.append(Try(context, peak_of(context)))
        context = _next(tries, unit, limit)
    return tries


def longest_that_fits(tries: list[Try], limit: float) -> Try | None:
    """Returns the longest of the tries that fit."""
    fitting = (one for one in tries if one.fits(limit))
    return max(fitting, key=lambda one: one.context, default=None)


def _next(tries: list[Try], unit: int, limit: float) -> int | None:
    """Returns the context to try next, or None if the answer is precise enough."""
    best = longest_that_fits(tries, limit)
    low = best.context if best else 0
    failed = [one.context for one in tries if one.context > low]
    high = min(failed, default=None)
    step = max(unit, int(TOLERANCE * low))
    if high is not None and high - low <= step:
        return None
    guess = _guess(tries, limit)
    if high is None:
        # At least a step: what the line excludes must be shown to fail.
        guess = max(min(guess, LARGEST_GROWTH * low, MOST_TOKENS), low + step)
    elif len(tries) > TRUSTED_TRIES or not low < guess < high:
        guess = (low + high) / 2
    else:
        # Not next to what is known already: lines are wrong by a little.
        margin = (high - low) / 16
        guess = min(max(guess, low + margin), high - margin)
    context = max(int(guess) // unit * unit, low + unit)
    return None if context in (high, low) or context > MOST_TOKENS else context


def _guess(tries: list[Try], limit: float) -> float:
    """Estimates the context whose memory meets the limit."""
    measured = [one for one in tries if one.peak is not None]
    measured.sort(key=lambda one: (abs(one.peak - limit), -one.context))
    if not measured:
        return tries[-1].context / 2
    near = measured[0]
    # In proportion: what does not grow with the context then makes the guess small.
    guess = near.context * limit / near.peak
    if len(measured) > 1:
        far = measured[1]
        slope = (near.peak - far.peak) / (near.context - far.context)
        if slope > 0:
            guess = near.context + (limit - near.peak) / slope
    return guess
