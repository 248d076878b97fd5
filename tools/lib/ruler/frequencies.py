"""Words that are there often: RULER's tasks "cwe" and "fwe"."""

import random
import string
from collections.abc import Iterator, Sequence

import numpy as np
from scipy.special import zeta

from tools.lib.retrieval.prompts import Prompt, Room
from tools.lib.ruler.sources import single_words

LIST = (
    "Below is a numbered list of words. In these words, some appear more often than "
    "others. Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list?"
)
LIST_ANSWER = " Answer: The top 10 words that appear most often in the list are:"
CODED = (
    "Read the following coded text and track the frequency of each coded word. Find "
    "the three most frequently appeared coded words. {context}\n"
    "Question: Do not provide any explanation. Please ignore the dots '....'. What are "
    "the three most frequently appeared words in the above coded text?"
)
CODED_ANSWER = (
    " Answer: According to the coded text above, the three most frequently appeared "
    "words are:"
)
COMMON = 10
"""Words that are asked for in a list."""
ALPHA = 2.0
CODED_LETTERS = 6


def numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


class CommonWords:
    """Draws numbered lists of words, ten of which are there more often.

    english: RULER's longer list of words, for lists of more words than wonderwords has.
    """

    def __init__(self, seed: int, english: Sequence[str] = ()):
        self.seed = seed
        self.rng = random.Random(seed)
        self.words = single_words(seed)
        self.english = english

    def prompts(self, room: Room, count: int) -> Iterator[Prompt]:
        words, often, seldom = (20, 3, 1) if room.is_short else (40, 10, 3)
        times = 2 if room.is_short else 3  # as often as in the example

        def draw(size: int) -> Prompt:
            shown, common = self._list(words, often, seldom)
            context, outputs = self._list(size, times * often, seldom)
            first = f"{LIST.format(context=shown)}{LIST_ANSWER} {numbered(common)}\n"
            text = first + LIST.format(context=context)
            return Prompt(text, LIST_ANSWER, tuple(outputs))

        tokens = room.count(draw(4096)) / 4096
        return room.prompts(draw, 10, count, most=int(room.length // tokens) * 2)

    def _list(self, words: int, often: int, seldom: int) -> tuple[str, list[str]]:
        """Draws a numbered list of `words` words, and which of them are common."""
        pool = self.words if words <= len(self.words) else self.english
        if words > len(pool):
            raise ValueError(
                f"a list of {words} words, and wonderwords has {len(self.words)}: give "
                "RULER's english_words.json (--english-words), or leave cwe out at "
                "this length"
            )
        drawn = self.rng.sample(pool, words)
        common = drawn[:COMMON]
        listed = common * often + drawn[COMMON:] * seldom
        random.Random(self.seed).shuffle(listed)
        return numbered(listed), common


class FrequentWords:
    """Draws texts of made-up words, whose counts fall with the square of their rank."""

    def __init__(self, seed: int):
        self.seed = seed
        self.rng = random.Random(seed)

    def prompts(self, room: Room, count: int) -> Iterator[Prompt]:
        most = room.length - room.generated
        kinds = most // 50
        step = most // 32
        if kinds < 4:  # dots, and three words that are asked for
            raise ValueError(
                f"{room.length} tokens are too few for four coded words: ask for at "
                f"least {200 + room.generated}"
            )
        words = most // CODED_LETTERS
        coded = self._words(kinds)
        while room.count(self._text(coded, words)) < most:
            words += step
        return (self._fitted(room, kinds, words - step, step) for _ in range(count))

    def _fitted(self, room: Room, kinds: int, words: int, step: int) -> Prompt:
        coded = self._words(kinds)
        draft = self._text(coded, words)
        while (tokens := room.count(draft)) > room.length - room.generated:
            words -= step
            if words <= 0:
                raise ValueError(
                    f"{room.length} tokens are too few: the question alone and "
                    f"{room.generated} tokens to generate take "
                    f"{tokens + room.generated}; ask for more"
                )
            draft = self._text(coded, words)
        return draft._replace(length=tokens + room.generated)

    def _words(self, kinds: int) -> list[str]:
        distinct: set[str] = set()
        while len(distinct) < kinds:
            letters = self.rng.choices(string.ascii_lowercase, k=CODED_LETTERS)
            distinct.add("".join(letters))
        words = sorted(distinct)
        random.Random(self.seed).shuffle(words)
        return ["...", *words[1:]]  # the first rank is noise

    def _text(self, words: Sequence[str], count: int) -> Prompt:
        ranks = np.arange(1, len(words) + 1)
        counts = (count * ranks**-ALPHA / zeta(ALPHA)).astype(int)
        listed = np.repeat(words, counts).tolist()
        random.Random(self.seed).shuffle(listed)
        text = CODED.format(context=" ".join(listed))
        return Prompt(text, CODED_ANSWER, tuple(words[1:4]))
