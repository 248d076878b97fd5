"""Makes a corpus that teaches line retrieval: records, questions and their answers.

    python -m tools.prepare_lines --form compact --context-tokens 512 --output CORPUS

Prints the command that trains on the corpus. Forms: "LRT-NL" and "LRT", LongEval's
own, and "compact" and "letters", the same task in 5 and 4 bytes a line.
"""

import argparse
import sys
from collections.abc import Sequence

from configs import line_retrieval
from data.remote import place
from data.retrieval.lines import FORMS
from data.text.tokenizer import ByteTokenizer, open_tokenizer
from tasks.command_line import Parser, as_program, at_least
from tools.lib.retrieval.corpus import LineDocuments, write_corpus
from tools.lib.train_command import train_command


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add, default = parser.add_argument, "default: %(default)s"
    tokens, most = at_least(1), "of the longest document"
    path = '"bytes" (the default), or a path: tokenizer.json or SentencePiece .model'
    add("--form", choices=FORMS, default="LRT-NL", help=default)
    add("--output", required=True, type=place, help="directory to write, a new one")
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
    tokenizer, context_tokens = open_tokenizer(chosen.tokenizer), chosen.context_tokens
    documents = LineDocuments(FORMS[chosen.form], tokenizer, context_tokens)
    tokens = {"train": chosen.train_tokens, "validation": chosen.validation_tokens}
    print(write_corpus(documents, chosen.output, tokens, chosen.seed))
    rows = line_retrieval.get_config().data.context_tokens
    context = max(rows, context_tokens)
    print(train_command(chosen.output, line_retrieval, context_tokens=context))


if __name__ == "__main__":
    sys.exit(main())
