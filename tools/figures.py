"""Draws the pictures of results/, each from the rows that another program wrote.

    python -m tools.figures work --output results
    python -m tools.figures rates results/cpu/ringattention.json --output rings.png
    python -m tools.figures lines results/cpu/line_retrieval.json --output lines.png \\
        --names "trained to 160 tokens" "trained to 32 tokens"
    cd results/cpu && python -m tools.figures returns exorl_*_{at,bc,dt}.json \\
        "Agentic Transformer, unsorted chains=exorl_cartpole_at_drawn.json" \\
        --output ../exorl_tiny.png

work     counts the tiles that each device of a causal ring computes in each ring step,
         for every layout: `work_per_step.png`, and the numbers in `.json`
rates    rows of bench_kernels, bench_attention and bench_original as TFLOP/s of the
         visible pairs, those of bench_train as tokens per second; several files if
         they were measured on the same kind of device
losses   losses by position, of `evaluate loss`; several files, a curve for each
lines    heat maps of `evaluate line-retrieval`, without --names by the runs' folders
returns  returns by episode of `evaluate exorl`
worlds   the same where it was in many worlds, by episode and by what was read before;
         a file for each agent and seed. Its numbers are printed, in Markdown

The pictures of the papers' tables are drawn by tools.paper_tables.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernels.masks import causal
from tasks.command_line import Parser, as_program, at_least
from tools.lib.benchmarks.rows import read_rows
from tools.lib.benchmarks.work import critical_path
from tools.lib.figures import lines, losses, rates, returns, work, world_table, worlds
from tools.lib.figures.style import write_picture
from tools.lib.files import write_json


def _work(chosen: argparse.Namespace) -> None:
    """Writes both files, and prints the counts."""
    ring, tiles = chosen.ring, chosen.tiles
    counts = {
        name: work.work_per_step(layout, ring, tiles, causal())
        for name, (layout, _) in work.LAYOUTS.items()
    }
    ideal = work.ideal_tiles(ring, tiles)
    layouts = {
        name: {"critical_path": critical_path(count), "tiles": count.tolist()}
        for name, count in counts.items()
    }
    numbers: dict[str, Any] = {"mask": "causal", "ring_size": ring}
    numbers |= {"tiles_per_shard": tiles, "bound": ideal, "layouts": layouts}
    chosen.output.mkdir(parents=True, exist_ok=True)
    write_picture(chosen.output / "work_per_step.png", work.grids(counts, ideal, tiles))
    write_json(chosen.output / "work_per_step.json", numbers)
    print(work.table(counts, ideal))


def _rates(chosen: argparse.Namespace) -> None:
    rows = [row for path in chosen.rows for row in read_rows(path, *rates.FIELDS)]
    write_picture(chosen.output, rates.bars(rows))


def _losses(chosen: argparse.Namespace) -> None:
    rows = [row for path in chosen.rows for row in read_rows(path, *losses.FIELDS)]
    write_picture(chosen.output, losses.curves(rows))


def _lines(chosen: argparse.Namespace) -> None:
    rows = [row for path in chosen.rows for row in read_rows(path, *lines.FIELDS)]
    write_picture(chosen.output, lines.heat_maps(rows, chosen.names))


def _returns(chosen: argparse.Namespace) -> None:
    write_picture(chosen.output, returns.curves(returns.read(chosen.results)))


def _worlds(chosen: argparse.Namespace) -> None:
    tasks = worlds.read(chosen.results)
    print(world_table.table(tasks))
    write_picture(chosen.output, worlds.curves(tasks))


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    pictures = parser.add_subparsers(required=True, metavar="PICTURE")

    def add(draw: Any, output: str) -> Parser:
        picture = pictures.add_parser(draw.__name__.strip("_"))
        picture.set_defaults(draw=draw)
        picture.add_argument("--output", required=True, type=Path, help=output)
        return picture

    picture = add(_work, "directory to write into")
    for name, default, what in (
        ("--ring", 4, "devices in the ring"),
        ("--tiles", 8, "tiles along a device's shard of the sequence"),
    ):
        what += f" (default: {default})"
        picture.add_argument(name, default=default, type=at_least(1), help=what)
    for draw in (_rates, _losses, _lines):
        picture = add(draw, "PNG to write")
        picture.add_argument("rows", nargs="+", type=Path, help="files of rows")
    picture.add_argument("--names", nargs="+", default=[], help="of the runs, in order")
    picture = add(_returns, "PNG to write")
    picture.add_argument(
        "results", nargs="+", metavar="[NAME=]FILE", help="one for each agent"
    )
    picture = add(_worlds, "PNG to write")
    picture.add_argument(
        "results", nargs="+", type=Path, help="for each agent and seed"
    )
    return parser.parse_args(arguments)


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    chosen = _arguments(arguments)
    chosen.draw(chosen)
    print(f"written to {chosen.output}")


if __name__ == "__main__":
    sys.exit(main())
