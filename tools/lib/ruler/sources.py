"""What RULER's prompts are made of: words, essays, questions and their documents.

RULER puts single spaces between the words of its essays, takes as many of the words as
it needs, from the first one on and over again, and splits them with nltk's Punkt. Where
nltk or its model is missing, sentences end where a mark and a space do. Its words are
those of the package wonderwords 3.0.1.
"""

import argparse
import bisect
import hashlib
import importlib
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property, lru_cache
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

from data.json_text import parse_json, read_json_object

ESSAYS = "PaulGrahamEssays.json"
"""Name of the file that RULER's downloader writes, with one field, "text"."""
ENGLISH_WORDS = "affcd6d45fdf3cc843d585c99c97ad615094e760e6c4756b654bab6c73bc2eca"
"""SHA-256 of RULER's english_words.json, 8,564,991 bytes."""
SENTENCE_ENDS = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["')\]]))\s+""")

Splitter = Callable[[str], list[str]]


@dataclass(frozen=True)
class Sources:
    """Files that some tasks need.

    haystack: text of essays. english_words: a longer list than wonderwords has.
    form: how records of lines are written, a name of `FORMS`.
    """

    haystack: Path | None = None
    english_words: Path | None = None
    squad: Path | None = None
    hotpotqa: Path | None = None
    form: str | None = None

    @classmethod
    def of(cls, options: argparse.Namespace) -> Self:
        """Takes the files of a program's options."""
        return cls(**{file.name: getattr(options, file.name) for file in fields(cls)})

    @cached_property
    def essays(self) -> "Essays":
        return Essays.read(self.haystack)

    @cached_property
    def words(self) -> tuple[list[str], str | None]:
        """RULER's longer list of words, none where it is not there; and its label."""
        if self.english_words is None:
            return [], None
        return read_english_words(self.english_words)

    @property
    def labels(self) -> dict[str, str | None]:
        """What is in the files of which there may be another."""
        essays = self.essays.label if self.haystack else None
        return {"haystack": essays, "english_words": self.words[1]}


@dataclass(frozen=True, eq=False)
class Essays:
    """A haystack.

    words: of the text. split: into sentences. label: what it is, for reports.
    """

    words: Sequence[str]
    split: Splitter
    label: str

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads RULER's file, or any text.

        Raises:
          FileNotFoundError: the file is missing.
          ValueError: it is not text, or empty.
        """
        _check_file(path, "of text for haystacks")
        is_rulers = path.name == ESSAYS
        try:
            text = path.read_text("utf-8")
            if is_rulers:
                text = read_json_object(path)["text"]
        except (KeyError, UnicodeDecodeError) as error:
            kind = 'a JSON object with a "text"' if is_rulers else "text in UTF-8"
            raise ValueError(f"{path} must be {kind}: {error}") from error
        if not text.strip():
            raise ValueError(f"{path} has no words: give a text for haystacks")
        split, sentences = find_splitter()
        label = f"{_label(path, 'essays', is_rulers)}, sentences by {sentences}"
        return cls(re.sub(r"\s+", " ", text).split(" "), split, label)

    def sentences(self, words: int) -> tuple[str, ...]:
        """Returns the sentences of `words` words; after the last comes the first."""
        return _sentences(self, words)


@lru_cache(maxsize=2)  # samples share a size
def _sentences(essays: Essays, words: int) -> tuple[str, ...]:
    times = -(-words // len(essays.words))
    text = " ".join(([*essays.words] * times)[:words])
    return tuple(essays.split(text.strip()))


def find_splitter() -> tuple[Splitter, str]:
    """Returns nltk's splitter where it is installed, or else ours; and its name."""
    try:
        nltk = importlib.import_module("nltk")
        nltk.data.find("tokenizers/punkt_tab/english")
    except (ImportError, LookupError):
        return SENTENCE_ENDS.split, "marks, not by nltk"
    return nltk.sent_tokenize, "nltk"


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
        return block + self._nouns[place] if isinstance(block, str) else block[place]


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
      FileNotFoundError: the file is missing.
      ValueError: it is not an object of words.
    """
    _check_file(path, "of words")
    words = [*read_json_object(path).values()]
    if not all(isinstance(word, str) for word in words):
        raise ValueError(f"{path} must be a JSON object whose values are words")
    is_rulers = hashlib.sha256(path.read_bytes()).hexdigest() == ENGLISH_WORDS
    return words, _label(path, "words", is_rulers)


def _label(path: Path, what: str, is_rulers: bool) -> str:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return f"{'' if is_rulers else 'not '}RULER's {what}: {path.name} (sha256 {digest})"


def _check_file(path: Path, what: str) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path} {what}")


@dataclass(frozen=True)
class Question:
    """A question of a file.

    answers: each of which is right. needed: documents that answer it, by number.
    related: others that are taken first.
    """

    query: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    related: tuple[int, ...] = ()


Asked = tuple[list[Question], list[str]]
"""Questions, and the documents that they are of."""


def read_squad(path: Path) -> Asked:
    """Reads a SQuAD file; without impossible questions.

    Raises:
      FileNotFoundError, ValueError: the file is missing, or is another.
    """

    def parse(content: Any) -> Asked:
        articles = [article["paragraphs"] for article in content["data"]]
        texts = sorted({text["context"] for article in articles for text in article})
        number = {text: place for place, text in enumerate(texts)}
        questions = []
        for article in articles:
            numbers = [number[text["context"]] for text in article]
            for text, mine in zip(article, numbers, strict=True):
                related = tuple(other for other in numbers if other != mine)
                for asked in text["qas"]:
                    if not asked.get("is_impossible", False):
                        answers = tuple(answer["text"] for answer in asked["answers"])
                        one = Question(asked["question"], answers, (mine,), related)
                        questions.append(one)
        return questions, texts

    return _read_questions(path, "SQuAD", parse)


def read_hotpotqa(path: Path) -> Asked:
    """Reads a HotpotQA file.

    Raises:
      FileNotFoundError, ValueError: the file is missing, or is another.
    """

    def parse(content: Any) -> Asked:
        shown = [
            [f"{title}\n{''.join(lines)}" for title, lines in asked["context"]]
            for asked in content
        ]
        texts = sorted({text for some in shown for text in some})
        number = {text: place for place, text in enumerate(texts)}
        questions = []
        for asked, some in zip(content, shown, strict=True):
            needed = tuple(number[text] for text in some)
            questions.append(Question(asked["question"], (asked["answer"],), needed))
        return questions, texts

    return _read_questions(path, "HotpotQA", parse)


def _read_questions(path: Path, name: str, parse: Callable[[Any], Asked]) -> Asked:
    if not path.is_file():
        raise FileNotFoundError(f"there is no {name} file {path}")
    try:
        found = parse(parse_json(path.read_bytes()))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{path} must be a {name} file ({reason}): give the published one"
        ) from error
    if not found[0]:
        raise ValueError(f"{path} has no questions: give the published {name} file")
    return found
