"""Reads the parts of our compiled TPU kernels, of which the planner's times are made.

    python -m tools.tpu_kernel_parts --output parts.json
    python -m tools.tpu_kernel_parts --chips v5e --check 1024 4096 --output check.json

Needs no TPU. Compiles each chip's kernels with tiles of 1024 x 1024 x 128 in bfloat16:
forward with and without a carry, backward with dq in VMEM and streamed through it.

With --check it compiles them at these shard lengths instead, adds up all regions as
often as they run in a ring step (striped, the last of 8 devices on the first one's
keys), and compares with what the parts in results/tpu/kernel_parts.json give. Stalls
and copies are in neither.

The output is a JSON list of rows. Keys: the fields of `Environment` in
`tools/lib/benchmarks/rows.py` and of `Tile` in `tools/lib/tpu_compiler/tile_program.py`
(length: of the shard), libtpu, goes_on (there is a carry, or dq stays in VMEM), and

- the fields of `Parts` in `tools/lib/tpu_compiler/bundles.py`; or with --check
- bundles, by the kernel compiled at this length, and estimated, by the parts;
- full_tiles, the bundles of its area of live sub-tiles of 256 x 256 in full tiles;
- seconds and waited, of the planner for this kernel and head: in all, and for copies.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kernels.layouts import Striped
from kernels.tile_ranges import key_ranges
from tasks.command_line import Parser, as_program, at_least
from tools.lib.benchmarks.rows import Environment, check_output, make_row
from tools.lib.files import write_json
from tools.lib.planning import ring_steps
from tools.lib.planning.kernels import Kernels, Launched, read_kernel_parts
from tools.lib.tpu_compiler.bundles import read_parts
from tools.lib.tpu_compiler.runs import Tiles, run_bundles
from tools.lib.tpu_compiler.tile_program import KV_HEADS, Tile
from tools.tpu_schedule import Measurement, measure
from training import chips

CHIPS = "v4", "v5e", "v5p", "v6e"
RING = 8
LONG, LONGEST = 2**15, 2**17
"""Lengths of the kernels whose parts are read: operands of shorter ones would lie in
VMEM, which in training they do not. At the longest, dq is streamed on every chip."""


def tile(chip: str, direction: str, length: int, has_carry: bool) -> Tile:
    """Returns the tile to compile."""
    sizes = 1024, 1024, 128
    return Tile(chip, direction, *sizes, "bfloat16", 1, length, has_carry)


def launched(tile: Tile) -> Launched:
    """Returns the kernel as the planner cuts it."""
    shape, keys = (1, tile.length, KV_HEADS, tile.head_dim), (tile.length, KV_HEADS)
    return Launched.of(
        tile.chip, tile.direction, tile.has_carry, shape, keys, tile.dtype
    )


def tiles_of_parts(chip: str) -> list[Tile]:
    """Returns the four kernels that a chip's ring steps are made of."""
    length = LONG
    while not launched(tile(chip, "backward", length, False)).goes_on:
        length //= 2
    return [
        tile(chip, "forward", LONG, False),
        tile(chip, "forward", LONG, True),
        tile(chip, "backward", length, False),
        tile(chip, "backward", LONGEST, False),
    ]


def compare(measured: Measurement) -> dict[str, Any]:
    """Compares a kernel compiled at some length with the sum of its parts."""
    tile, kernel = measured.tile, launched(measured.tile)
    sequence = ring_steps.Sequence(Striped(), RING, tile.length)
    bounds = sequence.bounds(RING - 1, 0, kernel.blocks.piece)
    work = ring_steps.work(tile.direction, bounds, kernel.blocks, tile.length)
    token = Striped().index(RING - 1, RING, tile.length)
    k_end = Striped().count(0, token + 1, RING, tile.length)
    tiles = Tiles.of(
        np.zeros_like(k_end), k_end, 1024, 256, by_key=tile.direction == "backward"
    )
    (schedule,) = measured.schedules.values()
    key = measured.compiled.device_kind, tile.direction, kernel.goes_on
    parts = read_kernel_parts()[key]
    area = key_ranges(np.zeros((1, tile.length)), k_end[None], 256, 256).work().sum()
    kernels = Kernels.of(chips.find(measured.compiled.device_kind))
    rate = kernels.chip.hbm_bytes_per_second
    return {
        "bundles": run_bundles(schedule, tiles),
        "estimated": kernel.bundles(work, parts),
        "full_tiles": float(area) / 16 * parts.full,
        "seconds": kernels.call_seconds(kernel, work),
        "waited": kernel.waited_bytes(work) / rate,
    }


def rows(chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row for each compiled kernel, and prints it."""
    environment = Environment.of(jax.devices())
    for chip in chosen.chips:
        tiles = tiles_of_parts(chip)
        if chosen.check:
            tiles = [
                tile(chip, direction, length, direction == "forward")
                for direction in ("forward", "backward")
                for length in chosen.check
            ]
        for one in tiles:
            measured = measure(one, None)
            if chosen.check:
                found = compare(measured)
            else:
                (schedule,) = measured.schedules.values()
                found = dataclasses.asdict(read_parts(schedule))
            compiled = measured.compiled
            known = {"libtpu": compiled.libtpu, "goes_on": launched(one).goes_on}
            print(chip, one.direction, f"{one.length:,}", known["goes_on"], end=": ")
            print(", ".join(f"{name} {_short(value)}" for name, value in found.items()))
            here = dataclasses.replace(
                environment, device_kind=compiled.device_kind, device_count=1
            )
            yield make_row(here, one, known, found)


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    parser = Parser(__doc__)
    parser.add_argument("--chips", nargs="+", default=list(CHIPS), choices=CHIPS)
    parser.add_argument(
        "--check", nargs="+", type=at_least(1024), metavar="LENGTH", help="of a shard"
    )
    parser.add_argument("--output", type=Path, help="file of rows to write, a new one")
    chosen = parser.parse_args(arguments)
    if chosen.output:
        check_output(chosen.output)
    jax.config.update("jax_platforms", "cpu")  # look for no TPU
    found = list(rows(chosen))
    if chosen.output:
        write_json(chosen.output, found)


if __name__ == "__main__":
    sys.exit(main())
