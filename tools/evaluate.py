"""Evaluates the newest checkpoint of a run: python tools/evaluate.py WHAT --config=...

WHAT is line-retrieval: how often the model finds a line of a long record. Each has
options of its own: python tools/evaluate.py WHAT --help
"""

import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script, which puts tools/ on the path, not the root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from command_line import as_program
from tools import evaluate_lines

EVALUATIONS = {"line-retrieval": evaluate_lines.main}


@as_program
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the evaluation that is named; returns its exit status."""
    what, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if what in ("-h", "--help"):
        print(__doc__.strip())
        return 0
    if what not in EVALUATIONS:
        known = ", ".join(EVALUATIONS)
        raise ValueError(f"{what!r} is not one of {known}: name one, or --help")
    return EVALUATIONS[what](rest)


if __name__ == "__main__":
    sys.exit(main())
