"""Judges the newest checkpoint of a run; each subcommand answers --help.

    python -m tools.evaluate loss --workdir=runs/tiny ...

loss   loss and perplexity on a corpus, by the position of the tokens
ruler  RULER's thirteen tasks at any length, with their published prompts, and lines of
       LongEval: whether a model uses its context
exorl  returns of an agent that learns in its context
"""

import importlib
import sys
from collections.abc import Sequence

from tasks.command_line import Parser, as_program

MODULES = {
    "loss": "tools.lib.evaluation.loss",
    "ruler": "tools.lib.evaluation.ruler",
    "exorl": "tools.lib.evaluation.exorl",
}
"""Subcommands, by name: modules with a `main(arguments)`, imported when called."""


@as_program
def main(arguments: Sequence[str] | None = None) -> int | None:
    """Runs the program; returns the subcommand's exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in MODULES:
        return importlib.import_module(MODULES[given[0]]).main(given[1:])
    parser = Parser(__doc__, prog="python -m tools.evaluate")
    parser.add_argument("subcommand", choices=MODULES, help="as above, then its own")
    parser.parse_args(given[:1])
    return None


if __name__ == "__main__":
    sys.exit(main())
