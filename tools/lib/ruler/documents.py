"""Questions whose answer is in one of many documents: RULER's tasks "qa"."""

import random
from collections.abc import Iterator, Sequence
from functools import partial

from tools.lib.retrieval.prompts import Prompt, Room
from tools.lib.ruler.sources import Question

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


class Documents:
    """Draws prompts: the questions of a file in its order, each among documents."""

    def __init__(
        self, seed: int, questions: Sequence[Question], documents: Sequence[str]
    ):
        self.seed = seed
        self.rng = random.Random(seed)
        self.questions = questions
        self.documents = documents

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
        needed = list(question.needed)
        related = list(question.related)
        others = size - len(needed)
        if size >= len(self.documents):
            times = -(-size // len(self.documents))
            shown = ([*self.documents] * times)[:size]
        else:
            if others > len(related):
                taken = {*needed, *related}
                pool = [i for i in range(len(self.documents)) if i not in taken]
                related += self.rng.sample(pool, others - len(related))
            else:
                related = self.rng.sample(related, others)
            shown = [self.documents[number] for number in needed + related]
        random.Random(self.seed).shuffle(shown)
        context = "\n\n".join(
            f"Document {number}:\n{text}" for number, text in enumerate(shown, 1)
        )
        text = QUESTION.format(context=context, query=question.query)
        return Prompt(text, ANSWER, question.answers)
