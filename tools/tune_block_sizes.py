"""Tunes the tables of `kernels/backends/tpu/block_sizes.py` by compiling: needs no TPU.

    python -m tools.tune_block_sizes --chips v3 v4 v5e v5p v6e
    python -m tools.tune_block_sizes --direction backward --chips v3 v4 v5e v5p v6e
    python -m tools.tune_block_sizes --soft-cap 50 --chips v4 v5e v5p v6e
    python -m tools.tune_block_sizes --chips v5p --rows 512 1024 --columns 128 256 \\
        --ahead 0 1 2 3 --behind 0 1 2 --jobs 2 --output tuned.json

Compiles our kernel for AOT topologies with every candidate: all combinations of the
numbers given, and the table's present entry. Counts the bundles of one full tile, which
are its cycles unless something stalls, for 1024 x 1024 scores, a head size of 128 and
bfloat16, as in `tpu_schedule.py`. Prints the candidates of each chip, the best first,
and the best as the line for the table.

Options left out default to the table's tile, and for the pieces to the grid that the
table was chosen from. Pieces that do not divide the tile are skipped. A candidate
takes about 5 seconds of one core, and the grid, forward, 6 minutes a chip.

The output is a JSON list of rows, rewritten after every candidate, so that a stopped
run leaves its results. Keys: those of the rows of `tpu_schedule.py`, and
blocks_stacked_rows, blocks_rows ..., the fields of `TpuBlocks`, and is_in_table.
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from kernels.backends.tpu.block_sizes import (
    TPU_BACKWARD,
    TPU_BACKWARD_CAPPED,
    TPU_FORWARD,
    TPU_FORWARD_CAPPED,
    TpuBlocks,
)
from tasks.command_line import Parser, as_program, at_least
from tools.lib.benchmarks.rows import Environment, check_output, make_row
from tools.lib.compiled.pods import PODS
from tools.lib.compiled.tile_program import Tile
from tools.lib.files import write_json
from tools.tpu_schedule import Measurement, measure

TABLES = {"forward": TPU_FORWARD, "backward": TPU_BACKWARD}
CAPPED_TABLES = {"forward": TPU_FORWARD_CAPPED, "backward": TPU_BACKWARD_CAPPED}

GRIDS: dict[str, dict[str, tuple[int, ...]]] = {
    "forward": {
        "rows": (128, 256, 512, 1024),
        "columns": (128, 256),
        "ahead": (0, 1, 2),
        "behind": (0, 1, 2),
    },
    "backward": {"rows": (128, 256, 512, 1024)},
}
"""Fields of `TpuBlocks` that a kernel of the direction depends on, beside the tile."""

TILE_FIELDS = "stacked_rows", "block_k"


@dataclass(frozen=True)
class Candidate:
    """Blocks for a chip, and whether the table has them."""

    chip: str
    blocks: TpuBlocks
    is_in_table: bool


@dataclass(frozen=True)
class Outcome:
    """A candidate and its row, or why it has none."""

    candidate: Candidate
    row: dict[str, Any] | None
    failure: str | None = None

    @property
    def spills(self) -> float:
        return self.row["used_vload_fill"] + self.row["used_vstore_spill"]


def list_candidates(
    chip: str, table: dict[str, TpuBlocks], grid: dict[str, Sequence[int]]
) -> list[Candidate]:
    """Returns the table's blocks for a chip, and all combinations of the grid that fit.

    grid: numbers to try by field of `TpuBlocks`; other fields are as in the table.
    """
    current = table[chip]
    combinations = [
        dataclasses.replace(current, **dict(zip(grid, numbers, strict=True)))
        for numbers in itertools.product(*grid.values())
    ]
    fitting = [
        blocks
        for blocks in combinations
        if blocks.stacked_rows % blocks.rows == 0
        and ("columns" not in grid or blocks.block_k % blocks.columns == 0)
    ]
    return [
        Candidate(chip, blocks, blocks == current)
        for blocks in dict.fromkeys([current, *fitting])  # each once
    ]


def run(
    candidates: Sequence[Candidate],
    direction: str,
    soft_cap: float | None,
    environment: Environment,
    jobs: int,
    measure: Callable[[Tile, TpuBlocks], Measurement],
) -> Iterator[Outcome]:
    """Measures candidates, `jobs` at once, and yields each when it is done."""

    def attempt(candidate: Candidate) -> Outcome:
        sizes = 1024, 1024, 128, "bfloat16", 1, 4096
        tile = Tile(candidate.chip, direction, *sizes, soft_cap=soft_cap)
        try:
            measured = measure(tile, candidate.blocks)
        except ValueError as error:
            return Outcome(candidate, None, str(error))
        blocks = dataclasses.asdict(candidate.blocks)
        device = measured.compiled.device_kind
        row = make_row(
            dataclasses.replace(environment, device_kind=device, device_count=1),
            measured.row(),
            {f"blocks_{name}": number for name, number in blocks.items()},
            {"is_in_table": candidate.is_in_table},
        )
        return Outcome(candidate, row)

    pool = ThreadPoolExecutor(jobs)
    try:
        for done in as_completed([pool.submit(attempt, each) for each in candidates]):
            yield done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def rank(outcomes: Sequence[Outcome], chips: Sequence[str]) -> list[Outcome]:
    """Sorts the outcomes with a row: chip by chip, the fewest bundles first.

    Of equals, the one in the table comes first, then the one that spills less.
    """
    return sorted(
        (outcome for outcome in outcomes if outcome.row),
        key=lambda outcome: (
            chips.index(outcome.candidate.chip),
            outcome.row["bundles"],
            not outcome.candidate.is_in_table,
            outcome.spills,
        ),
    )


def table(ranked: Sequence[Outcome], fields: Sequence[str]) -> str:
    """Formats outcomes as text. fields: those of `TpuBlocks` to show."""
    titles = *fields, "bundles", "MXU bound", "MXU", "spills", "VMEM MiB"
    lines = ["chip " + "".join(f"{title:>13}" for title in titles)]
    for outcome in ranked:
        blocks, row = outcome.candidate.blocks, outcome.row
        lines.append(
            f"{row['chip']:5}"
            + "".join(f"{getattr(blocks, name):13}" for name in fields)
            + f"{row['bundles']:13.0f}{row['mxu_bound']:13.0f}"
            f"{row['mxu_share']:13.1%}{outcome.spills:13.0f}"
            f"{row['vmem_bytes'] / 2**20:13.1f}"
            + ("  in the table" if outcome.candidate.is_in_table else "")
        )
    return "\n".join(lines)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--chips", nargs="+", default=["v5e"], choices=tuple(PODS))
    parser.add_argument("--direction", default="forward", choices=tuple(TABLES))
    parser.add_argument(
        "--soft-cap", type=at_least(2**-10, float), help="of scores (default: none)"
    )
    fields = {
        "stacked_rows": "rows of a query tile",
        "block_k": "keys of a tile",
        "rows": "query rows of a sub-block",
        "columns": "keys of a sub-tile of its scores; forward",
        "ahead": "sub-tiles by which QK is issued early; forward",
        "behind": "sub-tiles by which PV is issued late; forward",
    }
    for name, text in fields.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            nargs="+",
            type=at_least(0 if name in ("ahead", "behind") else 1),
            help=text,
        )
    parser.add_argument(
        "--jobs", type=at_least(1), default=1, help="compilers at once (default: 1)"
    )
    parser.add_argument("--output", type=Path, help="file of rows to write, a new one")
    return parser.parse_args(arguments)


def _grid(chosen: argparse.Namespace) -> dict[str, Sequence[int]]:
    """Returns the numbers to try. Raises ValueError for fields of the other kernel."""
    grid: dict[str, Sequence[int]] = dict(GRIDS[chosen.direction])
    for name in {*TILE_FIELDS, *GRIDS["forward"]}:
        numbers = getattr(chosen, name)
        if numbers and name not in (*TILE_FIELDS, *grid):
            raise ValueError(
                f"the {chosen.direction} kernel has no {name}: leave it out"
            )
        if numbers:
            grid[name] = numbers
    return grid


@as_program
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status, 1 if a chip has no result, else 0."""
    chosen = _arguments(arguments)
    chips = list(dict.fromkeys(chosen.chips))
    grid = _grid(chosen)
    if chosen.output:
        check_output(chosen.output)
    jax.config.update("jax_platforms", "cpu")  # look for no TPU
    tables = CAPPED_TABLES if chosen.soft_cap else TABLES
    candidates = [
        candidate
        for chip in chips
        for candidate in list_candidates(chip, tables[chosen.direction], grid)
    ]
    environment = Environment.of(jax.devices())
    outcomes: list[Outcome] = []
    kernel = chosen.direction, chosen.soft_cap
    found = run(candidates, *kernel, environment, chosen.jobs, measure)
    for outcome in found:
        outcomes.append(outcome)
        result = f"{outcome.row['bundles']:.0f} bundles" if outcome.row else "failed"
        print(
            f"{len(outcomes)} of {len(candidates)}: {outcome.candidate.chip} "
            f"{outcome.candidate.blocks}: {result}",
            file=sys.stderr,
        )
        if chosen.output:
            rows = [ranked.row for ranked in rank(outcomes, chips)]
            write_json(chosen.output, rows)
    ranked = rank(outcomes, chips)
    print(table(ranked, (*TILE_FIELDS, *GRIDS[chosen.direction])))
    best = {outcome.candidate.chip: outcome for outcome in reversed(ranked)}
    for chip in chips:
        print(f"{chip}: {best[chip].candidate.blocks if chip in best else 'no result'}")
    for outcome in outcomes:
        if outcome.failure:
            print(f"{outcome.candidate.chip}: {outcome.failure}")
    return 0 if len(best) == len(chips) else 1


if __name__ == "__main__":
    sys.exit(main())
