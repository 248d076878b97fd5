"""Corpora that teach retrieval: line retrieval, or tasks of RULER, with the answers.

Documents have all lengths up to the context's, short ones as often as long ones on a
logarithmic scale: what is short is trained on first. Which tokens are answers is known
as they are encoded and not found again in the text.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from data.retrieval import lines
from data.retrieval.lines import LineForm, Record
from data.text.summary import Summary
from data.text.token_file import TokenFileWriter
from data.text.tokenizer import Tokenizer, begun
from tools.lib.retrieval.prompts import DRAWS, Prompt
from tools.lib.ruler.needles import NOISE, Needles
from tools.lib.ruler.sources import Sources
from tools.lib.ruler.tasks import SEED, TASKS, Recipe
from tools.lib.ruler.variables import HOPS, Variables, answered

MOST_ASKED = 3
"""Questions for each line of a record, at most."""
SENTENCES = re.findall(r"[A-Z][^.]+\.", NOISE)
TEACHABLE = "niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt"


class Document(NamedTuple):
    """Tokens, int32 (n,), and which are answers', bool (n,)."""

    tokens: np.ndarray
    is_answer: np.ndarray

    @classmethod
    def of(cls, parts: Iterable[tuple[np.ndarray, bool]]) -> "Document":
        """Joins parts: tokens, and whether they are an answer's."""
        tokens, is_answer = zip(*parts, strict=True)
        sizes = [*map(len, tokens)]
        return cls(np.concatenate(tokens), np.repeat(is_answer, sizes))


@dataclass(frozen=True)
class LineDocuments:
    """Draws records with questions about their lines, up to three for each line.

    A row then teaches many answers, without which small models take many times as long
    to begin to find lines at all. Answers are the numbers and the ends of their lines.

    form: how records are written.
    context_tokens: that a document has at most.
    """

    form: LineForm
    tokenizer: Tokenizer
    context_tokens: int

    @cached_property
    def least_tokens(self) -> int:
        """Tokens of a record of three lines, a question and the document's end."""
        record = lines.draw_record(self.form, 3, np.random.default_rng(0))
        longest = replace(record, numbers=np.full(3, self.form.numbers[1] - 1))
        return lines.case_tokens(self.form, self.tokenizer, longest.case(0)) + 1

    def draw(self, rng: np.random.Generator) -> Document:
        """Draws the next document.

        Raises:
          ValueError: the smallest one does not fit, or there are too few names.
        """
        least = min(self.least_tokens, self.context_tokens)
        low, high = math.log(least), math.log(self.context_tokens)
        # One token ends the document, and another may begin it.
        begin = begun(self.tokenizer, np.array([], np.int32))
        tokens = round(math.exp(rng.uniform(low, high))) - begin.size - 1
        asked_share = rng.uniform(0, MOST_ASKED)

        def asked(record: Record) -> int:
            return max(round(asked_share * (len(record.names) - 1)), 1)

        def length(record: Record) -> int:
            last = sum(map(len, self._question(record, -1)))
            return len(self.tokenizer.encode(record.text)) + asked(record) * last

        record = lines.record_of_length(self.form, tokens, rng, length)
        text = self.tokenizer.encode(record.text)
        parts = [(begin, False), (text, False)]
        for question in self._questions(record, asked(record), tokens - text.size, rng):
            parts += zip(question, (False, True), strict=True)
        parts.append((np.array([self.tokenizer.end_of_document], np.int32), False))
        return Document.of(parts)

    def _questions(
        self, record: Record, asked: int, room: int, rng: np.random.Generator
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Draws `asked` questions, fewer where they do not fit; lines in rounds."""
        lines = len(record.names)
        rounds = range(-(-asked // lines))
        places = [place for _ in rounds for place in rng.permutation(lines).tolist()]
        questions = []
        for place in places[:asked]:
            question = self._question(record, place)
            size = sum(map(len, question))
            if size <= room:
                questions.append(question)
                room -= size
        # Names are of unlike lengths; there is room for that of the last line.
        return questions or [self._question(record, -1)]

    def _question(self, record: Record, place: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of a question, and of its answer."""
        form, name = self.form, record.names[place]
        asked = (form.question + form.cue).format(name=name)
        answer = form.answer.format(number=record.numbers[place])
        return self.tokenizer.encode(asked), self.tokenizer.encode(answer)


@dataclass
class TaskDocuments:
    """Draws documents: a prompt of a task drawn from `tasks`, with its answer.

    Half of the chains of variables come after an example, and half of the documents
    with noise have fewer sentences of it in a line, down to none. Chains have from two
    variables to eight links more. Answers begin with their prefixes.

    tasks: needles without files, or "vt". seed: of the prompts, other than RULER's.

    Raises:
      ValueError: other tasks, or RULER's seed.
    """

    tokenizer: Tokenizer
    tasks: Sequence[str]
    context_tokens: int
    seed: int

    def __post_init__(self):
        for name in self.tasks:
            if name not in TEACHABLE:
                raise ValueError(f"task {name} must be one of {', '.join(TEACHABLE)}")
        if self.seed == SEED:
            raise ValueError(f"seed {SEED} is that of RULER's prompts: take another")
        self._recipes = [TASKS[name].make(self.seed, Sources()) for name in self.tasks]

    def draw(self, rng: np.random.Generator) -> Document:
        """Draws the next document.

        Raises:
          ValueError: the smallest one does not fit.
        """
        recipe = self._recipes[rng.integers(len(self._recipes))]
        largest = max(self.context_tokens / 8, 1)  # a sentence has more tokens
        for _ in range(DRAWS):
            size = round(math.exp(rng.uniform(0, math.log(largest))))
            prompt = self._prompt(recipe, size, rng)
            texts = [prompt.input, prompt.answer_prefix, f" {' '.join(prompt.outputs)}"]
            tokens = self.tokenizer.encode_all(texts)
            if sum(map(len, tokens)) < self.context_tokens:
                tokens.append(np.array([self.tokenizer.end_of_document], np.int32))
                is_answer = False, True, True, True
                return Document.of(zip(tokens, is_answer, strict=True))
            largest = max(largest * 0.8, 1)
        raise ValueError(
            f"{self.context_tokens} tokens are too few for documents of "
            f"{', '.join(self.tasks)}: ask for more"
        )

    def _prompt(self, recipe: Recipe, size: int, rng: np.random.Generator) -> Prompt:
        if isinstance(recipe, Needles):
            prompt = recipe.draw(size)
        else:
            assert isinstance(recipe, Variables)  # as all others of TEACHABLE are
            recipe.hops = int(rng.integers(1, min(size, 2 * HOPS) + 1))
            size, example = max(size, recipe.hops + 1), ""
            if rng.random() < 0.5:
                noise = int(rng.integers(recipe.hops + 1, size + 1))
                example = answered(recipe.draw_example(noise))
            prompt = recipe.draw(size, example)
        kept = SENTENCES[: rng.integers(2 * len(SENTENCES))]
        return prompt._replace(input=prompt.input.replace(NOISE, " ".join(kept)))


def write_corpus(
    documents: LineDocuments | TaskDocuments,
    output: Path,
    tokens: Mapping[str, int],
    seed: int,
    supervises_all: bool = False,
) -> Summary:
    """Writes the corpus `output`, documents until the tokens of each split are reached.

    The splits are drawn from seeds of their own, so that their records differ.

    Raises:
      FileExistsError: `output` exists and is not empty.
      ValueError: as `documents.draw`.
    """
    with TokenFileWriter(output, documents.tokenizer, has_loss_mask=True) as writer:
        summary = Summary(writer)
        for number, (split, wanted) in enumerate(tokens.items()):
            rng = np.random.default_rng([seed, number])
            shown = tqdm(desc=split, total=wanted, unit=" tokens", disable=None)
            with shown:
                while writer.counts[split].tokens < wanted:
                    document = documents.draw(rng)
                    is_supervised = document.is_answer | supervises_all
                    writer.write(split, document.tokens, is_supervised)
                    summary.supervised[split] += int(is_supervised.sum())
                    shown.update(document.tokens.size)
    return summary
