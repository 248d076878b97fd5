"""Words: those of the package wonderwords 3.0.1, which RULER takes its words from."""

import bisect
import hashlib
import random
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from itertools import accumulate
from pathlib import Path

from data.json_text import read_json_object

ENGLISH_WORDS = "affcd6d45fdf3cc843d585c99c97ad615094e760e6c4756b654bab6c73bc2eca"
"""SHA-256 of RULER's english_words.json, 8,564,991 bytes."""


@cache
def wonderwords(kind: str) -> tuple[str, ...]:
    """Returns the words of a kind: "noun", "adjective" or "verb"."""
    text = files("wonderwords").joinpath("assets", f"{kind}list.txt").read_text("utf-8")
    return tuple(line.rstrip() for line in text.splitlines())


class Pairs(Sequence[str]):
    """All "adjective-noun", sorted, each once; made when asked for.

    There are 6 million, and all of them at once would take 600 MB.
    """

    def __init__(self, adjectives: Sequence[str], nouns: Sequence[str]):
        # "teeny-" and "teeny-tiny-" mix in the order; other adjectives stay apart.
        self._nouns, groups = sorted(set(nouns)), {}
        for adjective in sorted(set(adjectives)):
            first = f"{adjective.partition('-')[0]}-"
            groups.setdefault(first, []).append(f"{adjective}-")
        self._blocks: list[str | list[str]] = []
        for _, group in sorted(groups.items()):
            mixed = (prefix + noun for prefix in group for noun in self._nouns)
            self._blocks.append(sorted(set(mixed)) if group[1:] else group[0])
        sizes = (
            len(self._nouns if isinstance(block, str) else block)
            for block in self._blocks
        )
        self._ends = list(accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index):  # as of Sequence
        number = bisect.bisect_right(self._ends, index)
        place = index - (self._ends[number - 1] if number else 0)
        block = self._blocks[number]
        if isinstance(block, str):
            return block + self._nouns[place]
        return block[place]


@cache
def pairs() -> Pairs:
    """Returns the pairs of all adjectives and nouns."""
    return Pairs(wonderwords("adjective"), wonderwords("noun"))


def single_words(seed: int) -> list[str]:
    """Returns all words once, shuffled by the seed."""
    kinds = "noun", "adjective", "verb"
    words = sorted({word for kind in kinds for word in wonderwords(kind)})
    random.Random(seed).shuffle(words)
    return words


def read_english_words(path: Path) -> tuple[list[str], str]:
    """Reads the words of a JSON object, which are its values; and says what they are.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not an object of words.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path} of words")
    words = [*read_json_object(path).values()]
    if not all(isinstance(word, str) for word in words):
        raise ValueError(f"{path} must be a JSON object whose values are words")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    name = "RULER's words" if digest == ENGLISH_WORDS else "not RULER's words"
    return words, f"{name}: {path.name} (sha256 {digest[:12]})"
