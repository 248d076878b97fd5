"""Turns text into a corpus of token files to train on.

    python -m tools.prepare_text book.txt notes/ texts.jsonl.zst --output CORPUS
    python -m tools.prepare_text DATASET/ --text-field content --output CORPUS
    python -m tools.prepare_text src/ --pattern '*.py' --output CORPUS

A file of rows (Parquet, Arrow, JSON, CSV) has one document in each, any other file is
one document, and a directory is all files in it and below, but of a data set of Hugging
Face the tables alone. Prints what was read and left out, and the command that trains on
the corpus.
"""

import argparse
import sys
from collections.abc import Sequence

from configs import tiny
from data.text.corpus import prepare
from tasks.command_line import as_program
from tools.lib.prepare import (
    chosen_tokenizer,
    input_options,
    input_parser,
    train_command,
)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = input_parser(__doc__, "documents")
    column = "field or column of a row that is the document (default: %(default)s)"
    parser.add_argument("--text-field", default="text", help=column)
    return parser.parse_args(arguments)


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    chosen = _arguments(arguments)
    summary = prepare(
        chosen.inputs,
        chosen.output,
        chosen_tokenizer(chosen),
        text_field=chosen.text_field,
        **input_options(chosen),
    )
    print(summary)
    command = train_command(
        chosen.output, tiny, chosen.weights, summary.holdout, rows="packed"
    )
    print(command)


if __name__ == "__main__":
    sys.exit(main())
