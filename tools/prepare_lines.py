"""Makes a corpus that teaches line retrieval: records, questions and their answers.

    python -m tools.prepare_lines --form compact --context-tokens 512 --output CORPUS

Prints the command that trains on the corpus. Forms: "LRT-NL" and "LRT", LongEval's
own, and "compact", the same task in 5 bytes a line. See data/line_forms.py and
data/line_corpus.py.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from configs import line_retrieval
from data.line_corpus import (
    SUPERVISED,
    LineDocuments,
    prepare_lines,
    shortest_document,
)
from data.line_forms import FORMS
from data.tokenizer import ByteTokenizer, open_tokenizer
from tasks.command_line import Parser, as_program, at_least
from tools.lib.train_command import train_command


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--output", required=True, type=Path, help="directory to write, a new one")
    add("--form", choices=FORMS, default="LRT-NL", help="default: %(default)s")
    add(
        "--context-tokens",
        required=True,
        type=at_least(1),
        help="of the longest document",
    )
    add(
        "--least-tokens",
        type=at_least(1),
        help="of the shortest (default: what three lines and a question take)",
    )
    add(
        "--supervised",
        choices=SUPERVISED,
        default="answers",
        help="tokens with a loss (default: %(default)s)",
    )
    add(
        "--train-tokens",
        type=at_least(1),
        default=10_000_000,
        help="default: %(default)s",
    )
    add(
        "--validation-tokens",
        type=at_least(1),
        default=100_000,
        help="default: %(default)s",
    )
    add("--seed", type=at_least(0), default=0)
    add(
        "--tokenizer",
        default=ByteTokenizer.name,
        help='"bytes" (the default), or a path: tokenizer.json or SentencePiece .model',
    )
    return parser.parse_args(arguments)


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    chosen = _arguments(arguments)
    form, tokenizer = FORMS[chosen.form](), open_tokenizer(chosen.tokenizer)
    least = chosen.least_tokens
    if least is None:
        least = min(shortest_document(form, tokenizer), chosen.context_tokens)
    documents = LineDocuments(
        form, tokenizer, chosen.context_tokens, least, chosen.supervised
    )
    summary = prepare_lines(
        documents,
        chosen.output,
        train_tokens=chosen.train_tokens,
        validation_tokens=chosen.validation_tokens,
        seed=chosen.seed,
    )
    print(summary)
    rows = line_retrieval.get_config().data.context_tokens
    context = max(rows, chosen.context_tokens)
    print(train_command(chosen.output, line_retrieval, context_tokens=context))


if __name__ == "__main__":
    sys.exit(main())
