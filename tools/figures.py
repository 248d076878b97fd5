"""Draws the pictures of results/, each from the rows that another program wrote.

    python -m tools.figures work --output results
    python -m tools.figures rates results/cpu/ringattention.json --output rings.png
    python -m tools.figures returns results/cpu/exorl_*_{at,bc,dt}.json --output x.png

work     counts the tiles that each device of a causal ring computes in each ring step,
         for every layout: `work_per_step.png`, and the numbers in `.json`
rates    rows of bench_kernels and bench_ring as TFLOP/s of the visible pairs; several
         files if they were measured on the same kind of device
returns  returns of `evaluate exorl` by episode, and by the drawn episodes that were
         read before; a file for each agent and seed. Prints the numbers
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from tasks.command_line import Parser, as_program
from tools.lib.benchmarks.rows import read_rows
from tools.lib.figures import charts, curves
from tools.lib.figures.style import write_picture
from tools.lib.files import write_json


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    pictures = parser.add_subparsers(required=True, dest="picture", metavar="PICTURE")
    for name in ("work", "rates", "returns"):
        picture = pictures.add_parser(name)
        output = "directory to write into" if name == "work" else "PNG to write"
        picture.add_argument("--output", required=True, type=Path, help=output)
        if name != "work":
            picture.add_argument("rows", nargs="+", type=Path, help="files of rows")
    return parser.parse_args(arguments)


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    chosen = _arguments(arguments)
    output = chosen.output

    match chosen.picture:
        case "work":
            output.mkdir(parents=True, exist_ok=True)
            counts = charts.work_per_step()
            write_json(output / "work_per_step.json", counts)
            for name, found in counts["layouts"].items():
                tiles = f"{found['critical_path']} tiles on the critical path"
                print(f"{name}: {tiles}, bound {counts['bound']:.1f}")
            write_picture(output / "work_per_step.png", charts.work_grids(counts))
        case "rates":
            rows = chain(*(read_rows(path, *charts.FIELDS) for path in chosen.rows))
            write_picture(output, charts.bars([*rows]))
        case "returns":
            tasks = curves.read_returns(chosen.rows)
            print(curves.table(tasks))
            write_picture(output, curves.returns(tasks))
    print(f"written to {output}")


if __name__ == "__main__":
    sys.exit(main())
