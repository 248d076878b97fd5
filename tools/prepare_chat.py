"""Turns conversations into a corpus to train on, with loss on what assistants say.

    python -m tools.prepare_chat sharegpt.json --output CORPUS --context-tokens 32768 \\
        --tokenizer tokenizer.model

Prints a conversation as the model will see it, with what is learned between ⟦ and ⟧;
what was read and left out; and the command that trains on the corpus, which keeps the
template for `generate --chat`. Forms of rows are in data/chat/row_forms.py.
"""

import argparse
import difflib
import sys
from collections.abc import Sequence

from configs import tiny
from data.chat.chat_template import FORMATS, OWN, open_template
from data.chat.corpus import TOO_LONG, ChatEncoder, prepare_chats
from data.chat.row_forms import FIELDS
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
    names = "fields of rows with other names, as prompt=question; NAME=: not read"
    add("--fields", type=_names, metavar="OURS=THEIRS,…", help=names)
    shown = "conversations to print (default: %(default)s)"
    add("--show", type=at_least(0), default=1, metavar="N", help=shown)
    return parser.parse_args(arguments)


def _names(text: str) -> dict[str, str]:
    """Returns names of fields by ours."""
    names = {}
    for pair in text.split(","):
        ours, is_pair, theirs = pair.partition("=")
        if not is_pair or ours not in FIELDS:
            near = difflib.get_close_matches(ours, FIELDS, n=1)
            meant = near[0] if near else ", ".join(FIELDS)
            reason = f"{pair} must be OURS=THEIRS, with a name that is read: {meant}"
            raise argparse.ArgumentTypeError(reason)
        names[ours] = theirs
    return names


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
        fields=chosen.fields,
    )
    options = input_options(chosen)
    summary = prepare_chats(chosen.inputs, chosen.output, encoder, **options)
    for shown in encoder.show(summary.inputs.files, chosen.show):
        print(f"{shown}\n")
    print(f"{summary}\nchat template: {encoder.template.name}")
    fields = {"rows": "whole", "context_tokens": chosen.context_tokens}
    holdout = summary.holdout
    print(train_command(chosen.output, tiny, chosen.weights, holdout, **fields))


if __name__ == "__main__":
    sys.exit(main())
