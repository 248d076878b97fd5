"""How much haystack goes into a length: found by bisection once, then used again.

The numbers of draws, and what each of them consumes of the random stream, are RULER's
(NVIDIA/RULER, scripts/data/synthetic), so that prompts come out equal, word by word.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

DRAWS = 100
"""Of a prompt with the smallest haystack, before it is said not to fit."""


class Draft(NamedTuple):
    """What is said to a model, how its answer begins, and what it should say then."""

    input: str
    answer_prefix: str
    outputs: tuple[str, ...]


class Prompt(NamedTuple):
    """The same, with its tokens and those to generate together (length)."""

    input: str
    answer_prefix: str
    outputs: tuple[str, ...]
    length: int

    @property
    def draft(self) -> Draft:
        return Draft(self.input, self.answer_prefix, self.outputs)


@dataclass(frozen=True)
class Room:
    """What prompts have to fit into.

    length: most tokens of a prompt and what is generated after it.
    generated: those that are generated.
    count: tokens of a draft, or of a text alone.
    """

    length: int
    generated: int
    count: Callable[[Draft | str], int]

    @property
    def is_short(self) -> bool:
        """Whether haystacks grow in smaller steps, and lists of words are thinner."""
        return self.length < 4096

    def largest(
        self, draw: Callable[[int], Draft], least: int, most: int, taken: int = 0
    ) -> int:
        """Returns the largest size whose draft fits, by bisection; or else `least`.

        taken: tokens of what comes before the draft.
        """
        low, high, found = least, max(most, 2 * least), least
        while low <= high:
            middle = (low + high) // 2
            if self.count(draw(middle)) + taken + self.generated <= self.length:
                found, low = middle, middle + 1
            else:
                high = middle - 1
        return found

    def fitted(self, draw: Callable[[int], Draft], size: int, least: int) -> Prompt:
        """Draws until a draft fits, with `least` less of haystack each time.

        Raises:
          ValueError: even the smallest haystack does not fit.
        """
        fewest = None
        for _ in range(DRAWS + size // least):
            draft = draw(size)
            length = self.count(draft) + self.generated
            if length <= self.length:
                return Prompt(*draft, length)
            fewest = min(length, fewest or length)
            if size > least:
                size -= least
        raise ValueError(
            f"{self.length} tokens are too few: a prompt with the smallest haystack "
            f"and {self.generated} tokens to generate take {fewest}; ask for at least "
            "as many, or take a tokenizer with longer tokens"
        )
