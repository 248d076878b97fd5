"""Reads the parts of our compiled TPU kernels, of which the planner's times are made.

    python -m tools.tpu_kernel_parts --output parts.json
    python -m tools.tpu_kernel_parts --chips v5e --check 1024 4096 --output check.json

Needs no TPU. Compiles each chip's kernels with tiles of 1024 x 1024 x 128 in bfloat16:
forward with and without a carry, backward with dq in VMEM and streamed through it.

With --check it compiles them at these shard lengths instead, of so many heads that XLA
leaves their operands in HBM, adds up all regions as often as they run in a ring step
(striped, the last of 8 devices on the first one's keys and, without a carry, on its
own), and compares with what the parts in results/tpu/kernel_parts.json give, and with
the live area. Stalls are in neither.

The output is a JSON list of rows. Keys: the fields of `Environment` in
`tools/lib/benchmarks/rows.py` and of `Tile` in `tools/lib/tpu_compiler/tile_program.py`
(length: of the shard), libtpu, goes_on (there is a carry, or dq stays in VMEM), and

- the fields of `Parts` in `tools/lib/tpu_compiler/bundles.py`; or with --check
- source, whose keys, "visiting" or "own" (backward in two halves, as in the ring);
- bundles, by the kernel compiled at this length, and estimated, by the parts;
- full_tiles, the bundles of its area of live sub-tiles of 256 x 256 in full tiles;
- seconds and waited, of the planner for this kernel and head: in all, and for copies;
- waited_bundles, those copies in bundles, and ideal, the bundles of the visible pairs
  in full tiles (of this kernel or of the parts, whichever are less); over_ideal, how
  many times that bundles and waited_bundles take.
"""

import argparse
import dataclasses
import functools
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
from tools.lib.tpu_compiler.bundles import read_parts, tile_body
from tools.lib.tpu_compiler.runs import Tiles, run_bundles
from tools.lib.tpu_compiler.tile_program import Tile
from tools.tpu_schedule import Measurement, measure
from training import chips

CHIPS = "v4", "v5e", "v5p", "v6e"
RING = 8
LONG, LONGEST = 2**15, 2**17
"""Lengths of the kernels whose parts are read: operands of two heads of shorter ones
would lie in VMEM. At the longest, dq is streamed on every chip."""


def tile(chip: str, direction: str, length: int, has_carry: bool) -> Tile:
    """Returns the tile to compile, of as many heads as keep operands in HBM."""
    sizes, heads = (1024, 1024, 128), 2 * max(1, LONG // length)
    return Tile(
        chip, direction, *sizes, "bfloat16", 1, length, has_carry, kv_heads=heads
    )


def launched(tile: Tile) -> Launched:
    """Returns the kernel as the planner cuts it."""
    keys = tile.length, tile.kv_heads
    shape = 1, *keys, tile.head_dim
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


def sources(tile: Tile) -> dict[str, int]:
    """Returns the devices whose keys the last device's kernel is checked on."""
    visiting, own = {"visiting": 0}, {"own": RING - 1}
    if tile.direction == "backward":
        return visiting | own
    return visiting if tile.has_carry else own


def compare(measured: Measurement, source: int = 0) -> dict[str, Any]:
    """Compares a kernel compiled at some length with its parts and its live area.

    source: device whose keys the last device attends to.
    """
    tile, kernel = measured.tile, launched(measured.tile)
    length, is_backward = tile.length, tile.direction == "backward"
    token = Striped().index(RING - 1, RING, length)
    k_end = np.asarray(Striped().count(source, token + 1, RING, length))[None]
    sequence = ring_steps.Sequence(Striped(), RING, length)
    calls = [sequence.bounds(RING - 1, source, kernel.blocks.piece)]
    exact = [ring_steps.Bounds(np.zeros_like(k_end), k_end)]
    if is_backward and source == RING - 1:
        calls = ring_steps.halves(calls[0], length)
        exact = ring_steps.halves(exact[0], length)
    work = functools.reduce(
        ring_steps.Work.__add__,
        (ring_steps.work(tile.direction, one, kernel.blocks, length) for one in calls),
    )
    (schedule,) = measured.schedules.values()
    key = measured.compiled.device_kind, tile.direction, kernel.goes_on
    area = key_ranges(np.zeros((1, length)), k_end, 256, 256).work().sum()
    kernels = Kernels.of(chips.find(measured.compiled.device_kind))
    parts, chip = read_kernel_parts()[key], kernels.chip
    full = min(parts.full, tile_body(schedule).bundles)
    bundles = sum(
        run_bundles(schedule, Tiles.of(start[0], end[0], 1024, 256, is_backward))
        for start, end in exact
    )
    waited = kernel.waited_bytes(work) / chip.hbm_bytes_per_second
    waited_bundles = waited * chip.bundles_per_second
    ideal = float(k_end.sum()) / 1024**2 * full
    return {
        "bundles": bundles,
        "estimated": kernel.bundles(work, parts),
        "full_tiles": float(area) / 16 * full,
        "seconds": kernels.call_seconds(kernel, work),
        "waited": waited,
        "waited_bundles": waited_bundles,
        "ideal": ideal,
        "over_ideal": (bundles + waited_bundles) / ideal,
    }


def rows(chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row for each compiled kernel, and prints it."""
    environment = Environment.of(jax.devices())
    for chip in chosen.chips:
        tiles = tiles_of_parts(chip)
        if chosen.check:
            kinds = ("forward", True), ("forward", False), ("backward", False)
            tiles = [
                tile(chip, *kind[:1], length, kind[1])
                for kind in kinds
                for length in chosen.check
            ]
        for one in tiles:
            measured = measure(one, None)
            if chosen.check:
                every = [
                    {"source": name} | compare(measured, source)
                    for name, source in sources(one).items()
                ]
            else:
                (schedule,) = measured.schedules.values()
                every = [dataclasses.asdict(read_parts(schedule))]
            compiled = measured.compiled
            known = {"libtpu": compiled.libtpu, "goes_on": launched(one).goes_on}
            here = dataclasses.replace(
                environment, device_kind=compiled.device_kind, device_count=1
            )
            for found in every:
                print(
                    chip, one.direction, f"{one.length:,}", known["goes_on"], end=": "
                )
                print(
                    ", ".join(
                        f"{name} {_short(value)}" for name, value in found.items()
                    )
                )
                yield make_row(here, one, known, found)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Formats `over_ideal` of checked rows as text, a column for each shard length."""
    lengths = sorted({row["length"] for row in rows})
    lines: dict[tuple[str, str, str], dict[int, float]] = {}
    for row in rows:
        key = row["direction"], row["source"], row["chip"]
        lines.setdefault(key, {})[row["length"]] = row["over_ideal"]
    return "\n".join(
        ["over the ideal            " + "".join(f"{n:>9,}" for n in lengths)]
        + [
            f"{direction:9}{source:9}{chip:8}"
            + "".join(f"{found[n]:9.3f}" for n in lengths)
            for (direction, source, chip), found in lines.items()
        ]
    )


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
    if chosen.check:
        print(table(found))


if __name__ == "__main__":
    sys.exit(main())
