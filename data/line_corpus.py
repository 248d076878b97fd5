"""A corpus that teaches line retrieval: records with questions, answered in between.

A document is a record and questions about its lines, from a single one to three for
each line: a row then teaches many answers, without which small models take many times
as long to begin to find lines at all. Which tokens are answers is known
as they are encoded and not found again in the text. Documents have all lengths up to
the context's, short ones as often as long ones on a logarithmic scale: what is short is
trained on first.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from tqdm import tqdm

from data.line_forms import LineForm
from data.line_retrieval import Record, case_tokens, draw_record, record_of_length
from data.summary import Summary
from data.token_file import TokenFileWriter
from data.tokenizer import Tokenizer, begun

SUPERVISED = ("answers", "all")


MOST_ASKED = 3
"""Questions for each line of a record, at most."""


class Document(NamedTuple):
    """Tokens, int32 (n,), and their loss mask, bool (n,)."""

    tokens: np.ndarray
    is_supervised: np.ndarray


class Documents(Protocol):
    """Interface of what draws documents."""

    tokenizer: Tokenizer

    def draw(self, rng: np.random.Generator) -> Document:
        """Draws the next document."""


@dataclass(frozen=True)
class LineDocuments:
    """Draws documents.

    form: how records are written.
    context_tokens: that a document has at most.
    least_tokens: that it has at least, roughly.
    supervised: "answers", which are the numbers and the ends of their lines, or "all".

    Raises:
      ValueError: lengths or `supervised` out of range.
    """

    form: LineForm
    tokenizer: Tokenizer
    context_tokens: int
    least_tokens: int
    supervised: str = "answers"

    def __post_init__(self):
        if not 1 <= self.least_tokens <= self.context_tokens:
            raise ValueError(
                f"least_tokens={self.least_tokens} must be from 1 to "
                f"context_tokens={self.context_tokens}"
            )
        if self.supervised not in SUPERVISED:
            raise ValueError(
                f"supervised={self.supervised!r} must be one of {SUPERVISED}"
            )

    def draw(self, rng: np.random.Generator) -> Document:
        """Draws the next document.

        Raises:
          ValueError: a record and a question do not fit, or there are too few names.
        """
        low, high = math.log(self.least_tokens), math.log(self.context_tokens)
        # One token ends the document, and another may begin it.
        begin = begun(self.tokenizer, np.array([], np.int32))
        tokens = round(math.exp(rng.uniform(low, high))) - begin.size - 1
        asked_share = rng.uniform(0, MOST_ASKED)

        def asked(record: Record) -> int:
            return max(round(asked_share * (record.names.size - 1)), 1)

        def length(record: Record) -> int:
            size = len(self.tokenizer.encode(record.text))
            last = self._question(record, record.names.size - 1)
            return size + asked(record) * last[0].size

        record = record_of_length(self.form, tokens, rng, length)
        text = self.tokenizer.encode(record.text)
        parts = [(piece, np.zeros(piece.size, bool)) for piece in (begin, text)]
        parts += self._questions(record, asked(record), tokens - text.size, rng)
        end = np.array([self.tokenizer.end_of_document], np.int32)
        parts.append((end, np.zeros(1, bool)))
        document = Document(*map(np.concatenate, zip(*parts, strict=True)))
        if self.supervised == "all":
            document = document._replace(
                is_supervised=np.ones(document.tokens.size, bool)
            )
        return document

    def _questions(
        self, record: Record, asked: int, room: int, rng: np.random.Generator
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Draws `asked` questions, fewer where they do not fit; lines in rounds."""
        last = record.names.size - 1
        rounds = range(-(-asked // (last + 1)))
        places = [place for _ in rounds for place in rng.permutation(last + 1).tolist()]
        questions = []
        for place in places[:asked]:
            question = self._question(record, place)
            if question[0].size <= room:
                questions.append(question)
                room -= question[0].size
        # Names are of unlike lengths; there is room for that of the last line.
        return questions or [self._question(record, last)]

    def _question(self, record: Record, place: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of a question and its answer, and their loss mask."""
        form = self.form
        name = form.name(int(record.names[place]))
        asked = self.tokenizer.encode(form.question(name) + form.cue(name))
        answer = self.tokenizer.encode(form.answer(int(record.numbers[place])))
        is_supervised = np.repeat([False, True], [asked.size, answer.size])
        return np.concatenate([asked, answer]), is_supervised


def shortest_document(form: LineForm, tokenizer: Tokenizer) -> int:
    """Counts tokens of a record of three lines, a question and the document's end."""
    record = draw_record(form, 3, np.random.default_rng(0))
    longest = replace(record, numbers=np.full(3, form.numbers[1] - 1))
    return case_tokens(form, tokenizer, longest.case(0)) + 1


def prepare_lines(
    documents: Documents,
    output: Path,
    *,
    train_tokens: int,
    validation_tokens: int,
    seed: int,
) -> Summary:
    """Writes the corpus `output`, documents until the tokens are reached.

    The two splits are drawn from seeds of their own, so that their records differ.

    Raises:
      FileExistsError: `output` exists and is not empty.
      ValueError: no tokens, a negative seed, or as `documents.draw`.
    """
    wanted = {"train": train_tokens, "validation": validation_tokens}
    if min(wanted.values()) < 1 or seed < 0:
        raise ValueError(
            f"{train_tokens=} and {validation_tokens=} must be at least 1, and {seed=} "
            "at least 0"
        )
    with TokenFileWriter(output, documents.tokenizer, has_loss_mask=True) as writer:
        summary = Summary(writer)
        for number, (split, tokens) in enumerate(wanted.items()):
            rng = np.random.default_rng([seed, number])
            shown = tqdm(desc=split, total=tokens, unit=" tokens", disable=None)
            supervised = 0
            with shown:
                while writer.counts[split].tokens < tokens:
                    document = documents.draw(rng)
                    writer.write(split, *document)
                    supervised += int(document.is_supervised.sum())
                    shown.update(document.tokens.size)
            summary.supervised[split] = supervised
    return summary
