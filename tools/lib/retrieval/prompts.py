"""Prompts, their tokens, and how much haystack goes into a length.

The size of a haystack is found by bisection once, then used again.

The numbers of draws, and what each of them consumes of the random stream, are RULER's
(NVIDIA/RULER, scripts/data/synthetic), so that prompts come out equal, word by word.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from data.chat.chat_template import ChatTemplate
from data.text.tokens.tokenizer import Tokenizer, begun

DRAWS = 100
"""Of a prompt with the smallest haystack, before it is said not to fit."""


class Prompt(NamedTuple):
    """What is said to a model, how its answer begins, and what it should say then.

    length: tokens of it and of what is generated after it; 0: it was not fitted yet.
    depth: where the answer stands, from 0 to 1; None: where the text has it.
    """

    input: str
    answer_prefix: str
    outputs: tuple[str, ...]
    length: int = 0
    depth: float | None = None


@dataclass(frozen=True)
class Encoder:
    """From drafts to tokens: texts to go on from, or what the user of a chat says.

    template: of a chat; None: of a model that goes on with a text.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None = None

    def __call__(self, draft: Prompt) -> np.ndarray:
        """Returns the tokens of a prompt and of its answer's prefix, int32 (n,)."""
        if self.template is None:
            return begun(self.tokenizer, self._text(draft.input + draft.answer_prefix))
        asked = [{"role": "user", "content": draft.input}]
        return self.template.prompt(asked, draft.answer_prefix)

    def count(self, draft: Prompt | str) -> int:
        """Counts tokens as RULER does, without those that begin every document."""
        if isinstance(draft, str):
            return len(self._text(draft))
        return len(self(draft)) - (0 if self.template else self.begins)

    @property
    def begins(self) -> int:
        return len(self.tokenizer.begin_of_document)

    def _text(self, text: str) -> np.ndarray:
        return self.tokenizer.encode_all([text])[0]  # faster than `encode`


@dataclass(frozen=True)
class Room:
    """What prompts have to fit into.

    length: most tokens of a prompt and what is generated after it.
    generated: those that are generated.
    count: tokens of a draft, or of a text alone.
    """

    length: int
    generated: int
    count: Callable[[Prompt | str], int]

    @property
    def is_short(self) -> bool:
        """Whether haystacks grow in smaller steps, and lists of words are thinner."""
        return self.length < 4096

    def largest(
        self, draw: Callable[[int], Prompt], least: int, most: int = 0, taken: int = 0
    ) -> int:
        """Returns the largest size whose draft fits, by bisection; or else `least`.

        most: largest size to try; 0: three times what the smallest draft says.
        taken: tokens of what comes before the draft.
        """
        most = most or int(self.length / (self.count(draw(least)) / least) * 3)
        largest = low = least
        high = max(most, 2 * least)
        while low <= high:
            middle = (low + high) // 2
            if self.count(draw(middle)) + taken + self.generated <= self.length:
                largest = middle
                low = middle + 1
            else:
                high = middle - 1
        return largest

    def prompts(
        self, draw: Callable[[int], Prompt], least: int, count: int, **most: int
    ) -> Iterator[Prompt]:
        """Yields drafts that fit, of the largest size (see `largest`) and less."""
        size = self.largest(draw, least, **most)
        return (self.fitted(draw, size, least) for _ in range(count))

    def fitted(self, draw: Callable[[int], Prompt], size: int, least: int) -> Prompt:
        """Draws until a draft fits, with `least` less of haystack each time.

        Raises:
          ValueError: even the smallest haystack does not fit.
        """
        fewest = None
        for _ in range(DRAWS + size // least):
            draft = draw(size)
            length = self.count(draft) + self.generated
            if length <= self.length:
                return draft._replace(length=length)
            fewest = min(length, fewest or length)
            if size > least:
                size -= least
        raise ValueError(
            f"{self.length} tokens are too few: a prompt with the smallest haystack "
            f"and {self.generated} tokens to generate take {fewest}; ask for at least "
            "as many, or take a tokenizer with longer tokens"
        )
