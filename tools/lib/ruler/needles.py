"""Needles in a haystack: RULER's eight tasks "niah".

A needle says what the special magic number (or uuid) of a key is. The haystack is a
sentence over and over, nothing but other needles, or a text of words.
"""

import random
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tools.lib.retrieval.prompts import Prompt, Room
from tools.lib.ruler.sources import Essays, pairs

NOISE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. "
    "There and back again."
)
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
DEPTHS = np.round(np.linspace(0, 100, 40)).astype(int).tolist()
"""Percent of an essay's sentences that come before a needle."""

# For several answers, and for one.
QUESTION = (
    "Some special magic {kind} are hidden within the following text. Make sure to "
    "memorize it. I will quiz you about the {kind} afterwards.\n{context}\n"
    "What are all the special magic {kind} for {query} mentioned in the provided text?"
)
ANSWER = " The special magic {kind} for {query} mentioned in the provided text are"
ONE_QUESTION = (
    "A special magic {kind} is hidden within the following text. Make sure to "
    "memorize it. I will quiz you about the {kind} afterwards.\n{context}\n"
    "What is the special magic {kind} for {query} mentioned in the provided text?"
)
ONE_ANSWER = " The special magic {kind} for {query} mentioned in the provided text is"


@dataclass(eq=False)
class Needles:
    """Draws prompts.

    haystack: `NOISE`, `NEEDLE`, or essays.
    key_kind, kind: of keys and of values: "words", "numbers" or "uuids".
    keys, values, asked: how many keys, values of each, and keys that are asked for.
    """

    seed: int
    haystack: str | Essays
    key_kind: str = "words"
    kind: str = "numbers"
    keys: int = 1
    values: int = 1
    asked: int = 1
    rng: random.Random = field(init=False)

    def __post_init__(self):
        self.rng = random.Random(self.seed)

    def prompts(self, room: Room, count: int) -> Iterator[Prompt]:
        least = 5 if room.is_short else 25
        least = 500 if isinstance(self.haystack, Essays) else least
        return room.prompts(self.draw, least, count)

    def draw(self, size: int) -> Prompt:
        """Draws a prompt with `size` sentences, needles or words of haystack."""
        drawn: list[tuple[str, list[str]]] = []
        needles = []
        for _ in range(self.keys):
            key = self._draw(self.key_kind)
            values = [self._draw(self.kind) for _ in range(self.values)]
            drawn.append((key, values))
            needles += [self._needle(key, value) for value in values]
        random.Random(self.seed).shuffle(needles)
        context = self._context(size, needles)
        names = []
        outputs = []
        for key, values in self.rng.sample(drawn, self.asked):
            names.append(key)
            outputs += values
        query = ", ".join(names[:-1]) + ", and " + names[-1] if names[1:] else names[0]
        is_one = self.asked * self.values == 1
        parts = {
            "kind": self.kind[:-1] if is_one else self.kind,
            "query": query,
            "context": context,
        }
        question, answer = (ONE_QUESTION, ONE_ANSWER) if is_one else (QUESTION, ANSWER)
        return Prompt(question.format(**parts), answer.format(**parts), tuple(outputs))

    def _draw(self, kind: str) -> str:
        match kind:
            case "numbers":
                return str(self.rng.randint(10**6, 10**7 - 1))
            case "words":
                return self.rng.choice(pairs())
            case "uuids":
                return str(uuid.UUID(int=self.rng.getrandbits(128), version=4))
        raise ValueError(f"{kind=} must be numbers, words or uuids")

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.kind, key=key, value=value)

    def _context(self, size: int, needles: Sequence[str]) -> str:
        if isinstance(self.haystack, Essays):
            sentences = self.haystack.sentences(size)
            depths = self.rng.sample(DEPTHS, len(needles))
            ends = sorted(int(len(sentences) * (depth / 100)) for depth in depths)
            parts = []
            start = 0
            for end, needle in zip(ends, needles, strict=True):
                parts += [" ".join(sentences[start:end]), needle]
                start = end
            return " ".join([*parts, " ".join(sentences[start:])])
        lines = [self.haystack] * size
        if self.haystack == NEEDLE:
            for number in range(size):
                key = self._draw(self.key_kind)
                lines[number] = self._needle(key, self._draw(self.kind))
        numbers = sorted(self.rng.sample(range(size), len(needles)), reverse=True)
        for number, needle in zip(numbers, needles, strict=True):
            lines.insert(number, needle)
        return "\n".join(lines)
