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
from itertools import accumulate, chain, groupby
from pathlib import Path
from typing import Any, Self

from data.json_text import parse_json

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
        path = self.english_words
        return read_english_words(path) if path else ([], None)

    @property
    def labels(self) -> dict[str, str | None]:
        """What is in the files of which there may be another."""
        essays = self.essays.label if self.haystack else None
        return {"haystack": essays, "english_words": self.words[1]}


def _read[T](
    path: Path, what: str, parse: Callable[[bytes], T], digest: str = ""
) -> tuple[T, str]:
    """Returns what `parse` makes of a file, and a label of it for reports.

    digest: SHA-256 of RULER's own; "": it is known by its name.

    Raises:
      FileNotFoundError, ValueError: the file is missing, or is another.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path} of {what}")
    content = path.read_bytes()
    try:
        parsed = parse(content)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} must be the published file of {what}, or one like it "
            f"({type(error).__name__}: {error})"
        ) from error
    own = hashlib.sha256(content).hexdigest()
    is_rulers = own == digest if digest else path.name == ESSAYS
    label = f"RULER's {what}: {path.name} (sha256 {own[:12]})"
    return parsed, label if is_rulers else f"not {label}"


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
        """Reads RULER's file, or any text; raises as `_read`."""

        def parse(content: bytes) -> list[str]:
            is_rulers = path.name == ESSAYS
            text = parse_json(content)["text"] if is_rulers else content.decode()
            if not text.strip():
                raise ValueError("it has no words")
            return re.sub(r"\s+", " ", text).split(" ")

        words, label = _read(path, "essays", parse)
        split, sentences = find_splitter()
        return cls(words, split, f"{label}, sentences by {sentences}")

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
        self._nouns = sorted(set(nouns))
        self._blocks: list[str | list[str]] = []
        prefixes = sorted({f"{adjective}-" for adjective in adjectives})
        sizes = []
        for _, same in groupby(prefixes, lambda prefix: prefix.partition("-")[0]):
            group = list(same)
            if len(group) == 1:
                self._blocks.append(group[0])
                sizes.append(len(self._nouns))
            else:
                mixed = {prefix + noun for prefix in group for noun in self._nouns}
                self._blocks.append(sorted(mixed))
                sizes.append(len(mixed))
        self._ends = list(accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index):  # as of Sequence
        number = bisect.bisect_right(self._ends, index)
        index -= self._ends[number - 1] if number else 0
        block = self._blocks[number]
        return block + self._nouns[index] if isinstance(block, str) else block[index]


@cache
def pairs() -> Pairs:
    """Returns the pairs of all adjectives and nouns."""
    return Pairs(wonderwords("adjective"), wonderwords("noun"))


def single_words(seed: int) -> list[str]:
    """Returns all words once, shuffled by the seed."""
    kinds = "noun", "adjective", "verb"
    words = sorted(set(chain.from_iterable(map(wonderwords, kinds))))
    random.Random(seed).shuffle(words)
    return words


def read_english_words(path: Path) -> tuple[list[str], str]:
    """Reads the words of a JSON object, which are its values; raises as `_read`."""

    def parse(content: bytes) -> list[str]:
        words = [*parse_json(content).values()]
        if not all(isinstance(word, str) for word in words):
            raise ValueError("its values must be words")
        return words

    return _read(path, "words", parse, ENGLISH_WORDS)


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


def squad(content: Any) -> Asked:
    """Returns the questions of a SQuAD file; without impossible ones."""
    articles = [article["paragraphs"] for article in content["data"]]
    texts = sorted({text["context"] for article in articles for text in article})
    number_of = {text: number for number, text in enumerate(texts)}
    questions = []
    for article in articles:
        numbers = [number_of[text["context"]] for text in article]
        for text, own in zip(article, numbers, strict=True):
            related = tuple(other for other in numbers if other != own)
            for asked in text["qas"]:
                if not asked.get("is_impossible", False):
                    answers = tuple(answer["text"] for answer in asked["answers"])
                    question = Question(asked["question"], answers, (own,), related)
                    questions.append(question)
    return questions, texts


def hotpotqa(content: Any) -> Asked:
    """Returns the questions of a HotpotQA file."""
    shown = []
    for asked in content:
        shown.append(
            [f"{title}\n{''.join(lines)}" for title, lines in asked["context"]]
        )
    texts = sorted(set(chain.from_iterable(shown)))
    number_of = {text: number for number, text in enumerate(texts)}
    questions = []
    for asked, of_question in zip(content, shown, strict=True):
        needed = tuple(map(number_of.__getitem__, of_question))
        questions.append(Question(asked["question"], (asked["answer"],), needed))
    return questions, texts


def read_questions(path: Path, form: Callable[[Any], Asked]) -> Asked:
    """Reads a file of the form `squad` or `hotpotqa`; raises as `_read`."""

    def parse(content: bytes) -> Asked:
        questions, documents = form(parse_json(content))
        if not questions:
            raise ValueError("it has no questions")
        return questions, documents

    return _read(path, f"{form.__name__} questions", parse)[0]
