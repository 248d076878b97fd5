"""Counts the cycles of a tile in the TPU compiler's static schedule: needs no TPU.

    python -m tools.tpu_schedule
    python -m tools.tpu_schedule --chips v4 v5e v5p v6e --output schedules.json
    python -m tools.tpu_schedule --soft-cap 50
    python -m tools.tpu_schedule --chips v4 v5e v5p v6e --try rows=128,256,512,1024 \\
        columns=128,256 ahead=0,1,2 behind=0,1,2
    python -m tools.tpu_schedule --direction backward --chips v4 v5e v5p v6e \\
        --try rows=128,256,512,1024

Compiles our Pallas kernel for AOT topologies, finds the body of one full tile in its
static schedule, and counts the bundles (VLIW instructions): its cycles, unless
something stalls. The count is exact and the same in every run. Of a tile that is
computed in a loop it counts one iteration, and mxu_bound is too small by that factor.
The branch that ends a body, and up to four bundles in its delay slots, are not counted.
Commit 43b984f counts splash attention's and tokamax's bundles too.

`--try` compiles all combinations of some fields of `TpuBlocks` beside the blocks of the
table (`kernels/backends/tpu/block_sizes.py`), and prints the best as the line for it;
pieces that do not divide the tile are left out. Each takes about 5 seconds of one core.
The two grids above are those that the table was chosen from.

No chip is faster than its peak, which schedules ignore: they may issue matmuls up to an
eighth faster. At the peak (of a v5e: 197 TFLOP/s, 4 MXUs x 128 x 128 at 1.5 GHz) the
two matmuls of 1024 x 1024 x 128 take a v4, v5e or v5p 4096 cycles, and backward's five
10240.

The output is a JSON list of rows. Keys: the fields of `Environment` in
`tools/lib/benchmarks/rows.py` (device_kind: of the AOT chip) and of `Tile` in
`tile_program.py`, and

- kernel, its name, and libtpu, the compiler's version;
- bodies, how many were counted, and bundles, of all of them;
- blocks_rows ..., the fields of `TpuBlocks`, of those tried;
- mxu_bound, the bundles that the MXU's work would fill by itself, and mxu_share;
- used_mxu, used_xlu ...: slots of each unit that are used, VLOAD with its fills and
  VSTORE with its spills, and slots_mxu ...: those that a bundle has;
- vmem_bytes, spilled registers included.
"""

import argparse
import dataclasses
import functools
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from kernels.backends.tpu.block_sizes import TPU_BLOCKS, TpuBlocks
from tasks.command_line import Parser, as_program, at_least
from tools.lib.benchmarks.rows import ROOT, Environment, check_output, make_row
from tools.lib.benchmarks.rows import table as rows_as_text
from tools.lib.compiled.bundles import DUMP_FLAGS, Schedule, read_schedule, tile_body
from tools.lib.compiled.pods import ENVIRONMENT, PODS, device_kind
from tools.lib.compiled.tile_program import Tile, write_request
from tools.lib.files import write_json

PROGRAM = "tools.lib.compiled.tile_program"

TRIED = {"forward": ("rows", "columns", "ahead", "behind"), "backward": ("rows",)}
"""Fields of `TpuBlocks` that a full tile depends on, beside its own sizes."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Result of one compilation; vmem_bytes: of the kernel, spills included."""

    tile: Tile
    blocks: TpuBlocks | None
    vmem_bytes: int
    schedule: Schedule

    @property
    def bodies(self) -> float:
        """Number of bodies that make up the area of the requested tile."""
        if not self.blocks:
            return 1.0
        area = self.blocks.stacked_rows * self.blocks.block_k
        return self.tile.block_q * self.tile.block_k / area

    def row(self) -> dict[str, Any]:
        """Returns the measurement as a row, without its environment."""
        body = tile_body(self.schedule)
        bodies = self.bodies
        row = {"kernel": self.tile.kernel, "libtpu": version("libtpu")}
        row |= {"bodies": bodies, "bundles": bodies * body.bundles}
        row["mxu_bound"] = bodies * body.mxu_bound
        row["mxu_share"] = body.mxu_bound / body.bundles
        for unit, slots in self.schedule.slots.items():
            name = unit.lower().replace(":", "_")
            row |= {f"used_{name}": bodies * body.used[unit], f"slots_{name}": slots}
        blocks = dataclasses.asdict(self.blocks) if self.blocks else {}
        row |= {f"blocks_{name}": number for name, number in blocks.items()}
        return make_row(self.tile, row, {"vmem_bytes": self.vmem_bytes})


def measure(tile: Tile, blocks: TpuBlocks | None) -> Measurement:
    """Compiles our kernel in a process of its own; blocks: None for the table's.

    Raises:
      ValueError: it does not compile, or without the kernel that it should have.
    """
    with tempfile.TemporaryDirectory(prefix="tpu_schedule_") as folder:
        environment = {
            "JAX_PLATFORMS": "cpu",
            "LIBTPU_INIT_ARGS": DUMP_FLAGS.format(folder=folder),
        }
        done = subprocess.run(
            [sys.executable, "-m", PROGRAM, write_request(tile, blocks)],
            cwd=ROOT,
            env=os.environ | ENVIRONMENT | environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise ValueError(f"{blocks or tile} does not compile: {_reason(done)}")
        schedule = read_dump(Path(folder), tile.kernel)
    return Measurement(tile, blocks, int(done.stdout), schedule)


def _reason(done: subprocess.CompletedProcess) -> str:
    """Returns the error of a Python process, less JAX's note on its traceback."""
    text = done.stderr.split("\n-----")[0]
    errors = re.findall(r"^[\w.]+: ", text, re.MULTILINE)
    return text[text.rindex(errors[-1]) :].strip() if errors else text[-500:]


def read_dump(folder: Path, kernel: str) -> Schedule:
    """Reads the schedule of a kernel from the compiler's dump.

    Raises:
      ValueError: there is not exactly one kernel of that name.
    """
    name = re.compile(rf"(\d+-{re.escape(kernel)}(\.\d+)?)-\d+-final_bundles\.txt")
    dumped = list(filter(None, map(name.match, os.listdir(folder))))
    if len(dumped) != 1:
        raise ValueError(f"the compiler dumped {len(dumped)} kernels {kernel!r}, not 1")
    (used,) = folder.glob(f"{dumped[0][1]}-*-final_hlo-static-per-bundle-*.txt")
    return read_schedule((folder / dumped[0][0]).read_text(), used.read_text())


def table(rows: Sequence[dict[str, Any]], fields: Sequence[str] = ()) -> str:
    """Formats rows as text. fields: those of `TpuBlocks` to show."""
    units = [name.removeprefix("slots_") for name in rows[0] if "slots_" in name]
    columns = {"chip": "{chip}", "tile": "{block_q} x {block_k}"}
    columns |= {name: f"{{blocks_{name}}}" for name in fields}
    columns |= {"bundles": "{bundles:.0f}", "MXU bound": "{mxu_bound:.0f}"}
    columns |= {"MXU": "{mxu_share:.1%}", "spills": "{spills:.0f}"}
    columns["VMEM MiB"] = "{vmem:.1f}"
    columns |= {f"used {unit.split('_')[-1]}": f"{{{unit}:.0%}}" for unit in units}
    shown = []
    for row in rows:
        use = {n: row[f"used_{n}"] / row[f"slots_{n}"] / row["bundles"] for n in units}
        spills = row["used_vload_fill"] + row["used_vstore_spill"]
        shown.append(row | use | {"spills": spills, "vmem": row["vmem_bytes"] / 2**20})
    note = "used: slots of a unit, of those there are; spills: stores and fills"
    return f"{rows_as_text(shown, columns)}\n{note}"


def candidates(tile: Tile, tried: dict[str, tuple[int, ...]]) -> list[TpuBlocks | None]:
    """Returns the table's blocks for a tile's chip, and all that are tried and fit.

    tried: numbers by field of `TpuBlocks`; other fields are as in the table. Without
      any, None: the table's blocks for the tile.
    """
    if not tried:
        return [None]
    current = tile.own_blocks()
    fitting = [current]
    for numbers in itertools.product(*tried.values()):
        blocks = dataclasses.replace(current, **dict(zip(tried, numbers, strict=True)))
        if not (blocks.stacked_rows % blocks.rows or blocks.block_k % blocks.columns):
            fitting.append(blocks)
    return list(dict.fromkeys(fitting))  # each once


def _numbers(text: str) -> tuple[str, tuple[int, ...]]:
    """Reads a field of `TpuBlocks` and the numbers to try."""
    field = re.fullmatch(r"(\w+)=(\d+(?:,\d+)*)", text)
    if field is None:
        raise argparse.ArgumentTypeError(f"must be as rows=128,256, got {text!r}")
    return field[1], tuple(map(int, field[2].split(",")))


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = functools.partial(parser.add_argument, help="default: %(default)s")
    add("--chips", nargs="+", default=["v5e"], choices=tuple(PODS))
    add("--direction", default="forward", choices=tuple(TPU_BLOCKS))
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    sizes = {
        "block-q": (1024, "query rows of the tile, those of a group stacked"),
        "block-k": (1024, "keys of the tile"),
        "head-dim": (128, "size of a head"),
        "group": (1, "query heads of a key/value head"),
        "length": (4096, "tokens"),
    }
    for name, (default, text) in sizes.items():
        text += f" (default: {default})"
        parser.add_argument(f"--{name}", default=default, type=at_least(1), help=text)
    parser.add_argument(
        "--soft-cap", type=at_least(2**-10, float), help="of scores (default: none)"
    )
    parser.add_argument(
        "--try",
        dest="tried",
        type=_numbers,
        nargs="+",
        default=[],
        metavar="FIELD=N,N",
        help="fields of TpuBlocks and the numbers to try",
    )
    parser.add_argument("--output", type=Path, help="file of rows to write, a new one")
    chosen = parser.parse_args(arguments)
    known = "stacked_rows", "block_k", *TRIED[chosen.direction]
    for name, _ in chosen.tried:
        if name not in known:
            raise ValueError(
                f"the {chosen.direction} kernel's full tiles have no {name}: try some "
                f"of {', '.join(known)}"
            )
    return chosen


def run(chosen: argparse.Namespace) -> tuple[list[Measurement], list[str]]:
    """Measures tiles, those of a chip with the fewest bundles first; and failures."""
    measured = []
    failures = []
    names = [field.name for field in dataclasses.fields(Tile) if field.name != "chip"]
    sizes = {name: getattr(chosen, name) for name in names}
    for chip in dict.fromkeys(chosen.chips):
        tile = Tile(chip, **sizes)
        of_chip = []
        for blocks in candidates(tile, dict(chosen.tried)):
            try:
                of_chip.append(measure(tile, blocks))
            except ValueError as error:
                failures.append(f"{chip}: {error}")
        measured += sorted(of_chip, key=lambda result: result.row()["bundles"])
    return measured, failures


@as_program
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status, 1 if a chip has no result, else 0."""
    chosen = _arguments(arguments)
    if chosen.output:
        check_output(chosen.output)
    jax.config.update("jax_platforms", "cpu")  # look for no TPU
    environment = Environment.of(jax.devices())
    measured, failures = run(chosen)
    rows = []
    for each in measured:
        kind = {"device_kind": device_kind(each.tile.chip), "device_count": 1}
        rows.append(make_row(environment, kind, each.row()))
    if chosen.output:
        write_json(chosen.output, rows)
    if rows:
        print(table(rows, [name for name, _ in chosen.tried]))
    best = {each.tile.chip: each.blocks for each in reversed(measured)}
    if chosen.tried:
        print("\n".join(f"{chip}: {best[chip]}" for chip in sorted(best)))
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 0 if best.keys() == {*chosen.chips} else 1


if __name__ == "__main__":
    sys.exit(main())
