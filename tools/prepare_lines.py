"""Makes a corpus that teaches line retrieval: records, questions and their answers.

    python -m tools.prepare_lines --form compact --context-tokens 512 --output CORPUS

Prints the command that trains on the corpus. Forms: "LRT-NL" and "LRT", LongEval's
own, and "compact" and "letters", the same task in 5 and 4 bytes a line.

Documents have all lengths up to the context's, short ones as often as long ones on a
logarithmic scale: what is short is trained on first. Which tokens are answers is known
as they are encoded and not found again in the text.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from configs import line_retrieval
from data import remote
from data.progress import progress
from data.retrieval.lines import (
    FORMS,
    LineForm,
    Record,
    draw_record,
    record_of_length,
)
from data.text.corpus import Summary
from data.text.tokens.published import open_tokenizer
from data.text.tokens.token_file import TokenFileWriter
from data.text.tokens.tokenizer import ByteTokenizer, Tokenizer, begun
from tasks.command_line import Parser, as_program, at_least
from tools.lib.prepare import train_command

MOST_ASKED = 3
"""Questions for each line of a record, at most."""


class Document(NamedTuple):
    """Tokens, int32 (n,), and which are answers', bool (n,)."""

    tokens: np.ndarray
    is_answer: np.ndarray


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
        record = draw_record(self.form, 3, np.random.default_rng(0))
        longest = replace(record, numbers=np.full(3, self.form.numbers[1] - 1))
        text = begun(self.tokenizer, self.tokenizer.encode(longest.text))
        return len(text) + sum(map(len, self._question(longest, 0))) + 1

    def draw(self, rng: np.random.Generator) -> Document:
        """Draws the next document.

        Raises:
          ValueError: the smallest one does not fit, or there are too few names.
        """
        least = min(self.least_tokens, self.context_tokens)
        exponent = rng.uniform(math.log(least), math.log(self.context_tokens))
        # One token ends the document, and another may begin it.
        begin = begun(self.tokenizer, np.array([], np.int32))
        tokens = round(math.exp(exponent)) - begin.size - 1
        asked_share = rng.uniform(0, MOST_ASKED)

        def asked(record: Record) -> int:
            return max(round(asked_share * (len(record.names) - 1)), 1)

        def length(record: Record) -> int:
            last = sum(map(len, self._question(record, -1)))
            return len(self.tokenizer.encode(record.text)) + asked(record) * last

        record = record_of_length(self.form, tokens, rng, length)
        text = self.tokenizer.encode(record.text)
        parts = [(begin, False), (text, False)]
        for question in self._questions(record, asked(record), tokens - text.size, rng):
            parts += zip(question, (False, True), strict=True)
        parts.append((np.array([self.tokenizer.end_of_document], np.int32), False))
        texts, is_answer = zip(*parts, strict=True)
        sizes = [*map(len, texts)]
        return Document(np.concatenate(texts), np.repeat(is_answer, sizes))

    def _questions(
        self, record: Record, asked: int, room: int, rng: np.random.Generator
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Draws `asked` questions, fewer where they do not fit; lines in rounds."""
        lines = len(record.names)
        order = []
        while len(order) < asked:
            order += rng.permutation(lines).tolist()
        questions = []
        for line in order[:asked]:
            question = self._question(record, line)
            size = sum(map(len, question))
            if size <= room:
                questions.append(question)
                room -= size
        # Names are of unlike lengths; there is room for that of the last line.
        return questions or [self._question(record, -1)]

    def _question(self, record: Record, line: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of a question, and of its answer."""
        form = self.form
        asked = (form.question + form.cue).format(name=record.names[line])
        answer = form.answer.format(number=record.numbers[line])
        return self.tokenizer.encode(asked), self.tokenizer.encode(answer)


def write_corpus(
    documents: LineDocuments,
    output: Path,
    tokens: Mapping[str, int],
    seed: int,
) -> Summary:
    """Writes the corpus `output`, documents until the tokens of each split are reached.

    The splits are drawn from seeds of their own, so that their records differ.

    Raises:
      FileExistsError: `output` exists and is not empty.
      ValueError: as `documents.draw`.
    """
    with TokenFileWriter(output, documents.tokenizer, has_loss_mask=True) as writer:
        summary = Summary(writer=writer)
        for number, (split, wanted) in enumerate(tokens.items()):
            rng = np.random.default_rng([seed, number])
            with progress(wanted, " tokens", split) as shown:
                while writer.counts[split].tokens < wanted:
                    document = documents.draw(rng)
                    writer.write(split, *document)
                    shown.update(document.tokens.size)
    return summary


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    default = "default: %(default)s"
    tokens = at_least(1)
    most = "of the longest document"
    path = '"bytes" (the default), or a path: tokenizer.json or SentencePiece .model'
    add("--form", choices=FORMS, default="LRT-NL", help=default)
    add(
        "--output",
        required=True,
        type=remote.as_path,
        help="directory to write, a new one",
    )
    add("--context-tokens", required=True, type=tokens, help=most)
    add("--train-tokens", type=tokens, default=10_000_000, help=default)
    add("--validation-tokens", type=tokens, default=100_000, help=default)
    add("--seed", type=at_least(0), default=0)
    add("--tokenizer", default=ByteTokenizer.name, help=path)
    return parser.parse_args(arguments)


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    chosen = _arguments(arguments)
    tokenizer = open_tokenizer(chosen.tokenizer)
    context_tokens = chosen.context_tokens
    documents = LineDocuments(FORMS[chosen.form], tokenizer, context_tokens)
    tokens = {"train": chosen.train_tokens, "validation": chosen.validation_tokens}
    print(write_corpus(documents, chosen.output, tokens, chosen.seed))
    rows = line_retrieval.get_config().data.context_tokens
    context = max(rows, context_tokens)
    print(train_command(chosen.output, line_retrieval, context_tokens=context))


if __name__ == "__main__":
    sys.exit(main())
