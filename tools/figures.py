"""Draws returns of agents by episode, from the rows that `evaluate exorl` wrote.

    python -m tools.figures returns results/cpu/exorl_*_{at,bc,dt}.json --output x.png

Takes a file for each agent and seed. A second panel has the returns by the drawn
episodes that were read before, if any were. Prints the numbers.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from tasks.command_line import Parser, as_program
from tools.lib.figures import curves
from tools.lib.files import replacing


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    parser = Parser(__doc__)
    parser.add_argument("picture", choices=("returns",))
    parser.add_argument("rows", nargs="+", type=Path, help="files of rows")
    parser.add_argument("--output", required=True, type=Path, help="PNG to write")
    chosen = parser.parse_args(arguments)

    tasks = curves.read_returns(chosen.rows)
    print(curves.table(tasks))
    with replacing(chosen.output) as part:
        curves.returns(tasks).savefig(part, format="png", dpi=160)
    print(f"written to {chosen.output}")


if __name__ == "__main__":
    sys.exit(main())
