"""Questions whose answer is in one of many documents: RULER's tasks "qa"."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from data.json_text import parse_json
from tools.lib.retrieval.prompts import Prompt, Room

INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do "
    "not output any other words."
)
QUESTION = (
    f"{INSTRUCTION}\n\nThe following are given documents.\n\n{{context}}\n\n"
    f"{INSTRUCTION}\n\nQuestion: {{query}}"
)
ANSWER = " Answer:"
LEAST = 10
"""Documents of the shortest prompt."""


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


class Documents:
    """Draws prompts: the questions of a file in its order, each among documents."""

    def __init__(
        self, seed: int, questions: Sequence[Question], documents: Sequence[str]
    ):
        self.seed, self.rng = seed, random.Random(seed)
        self.questions, self.documents = questions, documents

    def prompts(self, room: Room, count: int) -> Iterator[Prompt]:
        if count > len(self.questions):
            raise ValueError(
                f"{count} samples of a file of {len(self.questions)} questions: ask "
                "for no more (--samples)"
            )
        size = room.largest(partial(self.draw, self.questions[0]), LEAST)
        for question in self.questions[:count]:
            yield room.fitted(partial(self.draw, question), size, LEAST)

    def draw(self, question: Question, size: int) -> Prompt:
        """Draws the prompt of a question among `size` documents."""
        needed, related = [*question.needed], [*question.related]
        others = size - len(needed)
        if size >= len(self.documents):
            times = -(-size // len(self.documents))
            shown = ([*self.documents] * times)[:size]
        else:
            if others > len(related):
                taken = {*needed, *related}
                pool = [i for i in range(len(self.documents)) if i not in taken]
                more = related + self.rng.sample(pool, others - len(related))
            else:
                more = self.rng.sample(related, others)
            shown = [self.documents[number] for number in needed + more]
        random.Random(self.seed).shuffle(shown)
        context = "\n\n".join(
            f"Document {number}:\n{text}" for number, text in enumerate(shown, 1)
        )
        text = QUESTION.format(context=context, query=question.query)
        return Prompt(text, ANSWER, question.answers)


def read_squad(path: Path) -> tuple[list[Question], list[str]]:
    """Reads questions and documents of a SQuAD file; without impossible questions.

    Raises:
      FileNotFoundError, ValueError: there is no such file, or it is another.
    """

    def parse(content: Any) -> tuple[list[Question], list[str]]:
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

    return _read(path, "SQuAD", parse)


def read_hotpotqa(path: Path) -> tuple[list[Question], list[str]]:
    """Reads questions and documents of a HotpotQA file.

    Raises:
      FileNotFoundError, ValueError: there is no such file, or it is another.
    """

    def parse(content: Any) -> tuple[list[Question], list[str]]:
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

    return _read(path, "HotpotQA", parse)


def _read(path: Path, name: str, parse: Any) -> tuple[list[Question], list[str]]:
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
