"""Turns conversations into a corpus to train on, with loss on what assistants say.

    python -m tools.prepare_chat sharegpt.json --output CORPUS --context-tokens 32768 \\
        --tokenizer tokenizer.model

Prints the command that trains on the corpus. Rows are as in ShareGPT: see
data/conversation.py.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from configs import tiny
from data.chat import TOO_LONG, ChatEncoder, prepare_chats, stop_at
from data.chat_format import FORMATS
from data.chat_template import ChatTemplate
from data.conversation import BadRow
from data.tokenizer import ByteTokenizer, open_tokenizer
from tasks.command_line import Parser, as_program, at_least, share
from tools.lib.train_command import train_command


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("inputs", nargs="+", type=Path, metavar="INPUT", help=".json or .jsonl file")
    add("--output", required=True, type=Path, help="directory to write, a new one")
    add(
        "--context-tokens",
        required=True,
        type=at_least(1),
        help="length of the rows that the conversations have to fit in",
    )
    add(
        "--tokenizer",
        default=ByteTokenizer.name,
        help='"bytes" (the default), or a path: tokenizer.json, SentencePiece .model, '
        "or their directory",
    )
    add(
        "--template",
        choices=FORMATS,
        default="vicuna",
        help="how turns are written (default: %(default)s)",
    )
    add(
        "--too-long",
        choices=TOO_LONG,
        default="truncate",
        help="conversations beyond the context (default: %(default)s)",
    )
    add(
        "--bad-rows",
        choices=("stop", "skip"),
        default="stop",
        help="rows that are not conversations; skipped ones are reported (stop)",
    )
    add(
        "--validation-fraction",
        default=0.02,
        type=share,
        help="share of the conversations to hold out (default: %(default)s)",
    )
    return parser.parse_args(arguments)


def _tell(row: BadRow) -> None:
    print(f"skipped {row}", file=sys.stderr)


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    chosen = _arguments(arguments)
    tokenizer = open_tokenizer(chosen.tokenizer)
    encoder = ChatEncoder(
        ChatTemplate(FORMATS[chosen.template], tokenizer),
        context_tokens=chosen.context_tokens,
        too_long=chosen.too_long,
    )
    summary = prepare_chats(
        chosen.inputs,
        chosen.output,
        encoder,
        on_bad_row=_tell if chosen.bad_rows == "skip" else stop_at,
        validation_fraction=chosen.validation_fraction,
    )
    print(summary)
    context = chosen.context_tokens
    print(train_command(chosen.output, tiny, rows="whole", context_tokens=context))


if __name__ == "__main__":
    sys.exit(main())
