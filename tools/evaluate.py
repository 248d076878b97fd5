"""Evaluates the newest checkpoint of a run: python tools/evaluate.py WHAT --config=...

WHAT is line-retrieval: how often the model finds a line of a long record. Each has
options of its own: python tools/evaluate.py WHAT --help
"""

import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script, which puts tools/ on the path, not the root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools import evaluate_lines

EVALUATIONS = {"line-retrieval": evaluate_lines.main}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the evaluation that is named; returns its exit status, 0, 1 or 2."""
    what, *rest = [*(sys.argv[1:] if arguments is None else arguments), "--help"]
    if what == "--help":
        print(__doc__.strip())
        return 0
    if what not in EVALUATIONS:
        known = ", ".join(EVALUATIONS)
        print(f"error: {what!r} is not one of {known}", file=sys.stderr)
        return 2
    return EVALUATIONS[what](rest[:-1])


if __name__ == "__main__":
    sys.exit(main())
