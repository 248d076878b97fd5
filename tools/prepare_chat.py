"""Turns conversations into a corpus to train on, with loss on what assistants say.

    python -m tools.prepare_chat sharegpt.json --output CORPUS --context-tokens 32768 \\
        --tokenizer tokenizer.model

Prints what was read and left out, and the command that trains on the corpus, which
keeps the template for `generate --chat`. Rows are as in ShareGPT, or have a list of
`messages`: see data/chat/conversation.py.
"""

import argparse
import sys
from collections.abc import Sequence

from configs import tiny
from data.chat.chat_template import FORMATS, OWN, open_template
from data.chat.corpus import TOO_LONG, ChatEncoder, prepare_chats
from data.text.tokens.tokenizer_files import read_chat_template
from tasks.command_line import as_program, at_least
from tools.lib.prepare import (
    chosen_tokenizer,
    input_options,
    input_parser,
    train_command,
)

WITHOUT = "vicuna"
"""Template of a tokenizer that has none."""


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = input_parser(__doc__, "conversations")
    add = parser.add_argument
    rows = "length of the rows that the conversations have to fit in"
    turns = f"how turns are written; {OWN}: as the tokenizer's own template has it "
    turns += f"(default: {OWN}, or {WITHOUT} where it has none)"
    beyond = "conversations beyond the context (default: %(default)s)"
    add("--context-tokens", required=True, type=at_least(2), help=rows)
    add("--template", choices=(OWN, *FORMATS), help=turns)
    add("--too-long", choices=TOO_LONG, default="truncate", help=beyond)
    apart = "documents in place of trees, as models with sliding windows need"
    add("--apart", action="store_true", help=apart)
    return parser.parse_args(arguments)


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    chosen = _arguments(arguments)
    tokenizer = chosen_tokenizer(chosen)
    has_own = tokenizer.path and read_chat_template(tokenizer.path.parent) is not None
    name = chosen.template or (OWN if has_own else WITHOUT)
    encoder = ChatEncoder(
        open_template(name, tokenizer),
        context_tokens=chosen.context_tokens,
        too_long=chosen.too_long,
        apart=chosen.apart,
    )
    summary = prepare_chats(
        chosen.inputs, chosen.output, encoder, **input_options(chosen)
    )
    print(f"{summary}\nchat template: {encoder.template.name}")
    fields = {"rows": "whole", "context_tokens": chosen.context_tokens}
    print(train_command(chosen.output, tiny, chosen.weights, **fields))


if __name__ == "__main__":
    sys.exit(main())
