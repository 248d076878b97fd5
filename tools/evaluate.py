"""Judges the newest checkpoint of a run; each subcommand answers --help.

python -m tools.evaluate line-retrieval --workdir=runs/line_retrieval/160 ...
"""

import ast
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from tasks.command_line import Parser, as_program

MODULES = {
    "loss": "tools.lib.evaluation.loss",
    "line-retrieval": "tools.lib.evaluation.line_retrieval",
    "ruler": "tools.lib.evaluation.ruler",
    "exorl": "tools.lib.evaluation.exorl",
}
"""Subcommands, by name: modules with a `main(arguments)`, imported when called."""


def _first_line(module: str) -> str:
    """Returns the first line of a module's docstring; does not import it."""
    spec = importlib.util.find_spec(module)
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text("utf-8")))
    return text.splitlines()[0]


@as_program
def main(arguments: Sequence[str] | None = None) -> int | None:
    """Runs the program; returns the subcommand's exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in MODULES:
        return importlib.import_module(MODULES[given[0]]).main(given[1:])
    width = max(map(len, MODULES))
    lines = (f"    {name:{width}}  {_first_line(MODULES[name])}" for name in MODULES)
    parser = Parser("\n".join([__doc__, *lines]), prog="python -m tools.evaluate")
    parser.add_argument("subcommand", choices=MODULES, help="as above, then its own")
    parser.parse_args(given[:1])
    return None


if __name__ == "__main__":
    sys.exit(main())
