"""Turns text into a corpus of token files to train on.

    python -m tools.prepare_text book.txt notes/ chats.jsonl --output corpus
    python -m tools.prepare_text src/ --pattern '*.py' --output corpus
    python -m tools.prepare_text texts.jsonl --tokenizer tokenizer.json --output corpus

A file is one document, a directory is all files in it and below, and a `.jsonl` file
has one document a line. Prints the command that trains on the corpus.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from configs import tiny
from data.corpus import prepare
from data.tokenizer import ByteTokenizer, open_tokenizer
from tasks.command_line import Parser, as_program, share
from tools.lib.train_command import train_command


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("inputs", nargs="+", type=Path, metavar="INPUT", help="file or directory")
    add("--output", required=True, type=Path, help="directory to write, a new one")
    add(
        "--tokenizer",
        default=ByteTokenizer.name,
        help='"bytes" (the default), or a path: tokenizer.json or SentencePiece .model',
    )
    add(
        "--text-field",
        default="text",
        help="field of a .jsonl line that is the document (default: %(default)s)",
    )
    add(
        "--validation-fraction",
        default=0.02,
        type=share,
        help="share of the documents to hold out (default: %(default)s)",
    )
    add(
        "--pattern",
        default="*",
        help="files to read in a directory (default: all that are not hidden)",
    )
    return parser.parse_args(arguments)


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    chosen = _arguments(arguments)
    summary = prepare(
        chosen.inputs,
        chosen.output,
        open_tokenizer(chosen.tokenizer),
        validation_fraction=chosen.validation_fraction,
        pattern=chosen.pattern,
        text_field=chosen.text_field,
    )
    print(summary)
    print(train_command(chosen.output, tiny))


if __name__ == "__main__":
    sys.exit(main())
