"""Times attention on a ring, forward and backward, for every layout.

    python -m tools.bench_attention --output attention.json
    python -m tools.bench_attention --devices 4 --dtype bfloat16 --head-dim 128

A run computes the output and the gradients of q, k and v. The variants are timed in
rounds, so a noisy machine is noisy for all.

Without an accelerator, or with JAX_PLATFORMS=cpu, CPU devices are simulated. They share
the machine's cores, so times show the work of all devices together (column "all"
of the table), not what a ring waits for (column "path"): they cannot show balance.

The output is a JSON list of rows. Keys: the fields of `Environment` and `Times`
in `tools/lib/benchmarks/rows.py`, of `Case` in `kernels/cases.py`, and

- implementation, dtype, block_q, block_k (null: not in tiles);
- tflops, model TFLOP/s of all devices by flops_convention, and peak_share, its share of
  the devices' peak (null on an unknown chip, or if not in bfloat16);
- tiles_total over devices and ring steps, tiles_critical_path (of the slowest device of
  each step), tiles_bound (visible pairs, evenly spread) and bound_share (bound / path),
  all null if not in tiles;
- error_out, error_dq, error_dk, error_dv and error_lse against the reference in
  float64, relative to its norm, measured in this run with error_length tokens, batch 1.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kernels import backends as backend
from kernels.cases import LAYOUTS, MASKS, Case, Problem, solve
from tasks.command_line import Parser, as_program, at_least
from tools.lib.benchmarks.rows import (
    Environment,
    Times,
    add_output,
    make_row,
    report,
    take_rounds,
    take_sample,
)
from tools.lib.benchmarks.variants import (
    Program,
    Variant,
    compile_variant,
    group_of,
    measure_rates,
    start_devices,
)
from tools.lib.benchmarks.work import balanced_tiles, critical_path, tiles_per_step

LONGEST_CHECKED = 8192
"""Tokens whose scores the reference is asked to hold: 512 MiB a copy in float64."""


def measure(
    variants: Sequence[Variant], devices: Sequence[jax.Device], repeats: int
) -> list[dict[str, Any]]:
    """Times the variants of one problem in rounds: returns a row for each."""
    environment = Environment.of(devices)
    mesh = Mesh(np.array(devices), ("ring",))
    problem = Problem.of(np.random.default_rng(), variants[0].case, variants[0].dtype)
    programs = [compile_variant(variant, problem, mesh) for variant in variants]
    takes = [functools.partial(take_sample, program) for program in programs]
    samples = take_rounds(takes, repeats)
    errors = measure_errors(programs, problem, mesh)
    rows = []
    for program, seconds, error in zip(programs, samples, errors, strict=True):
        times = Times.of(program.compile_seconds, seconds)
        variant = program.variant
        rates = measure_rates(variant, times.seconds_median, environment)
        names = {
            "implementation": variant.implementation,
            "dtype": jnp.dtype(variant.dtype).name,
        }
        tiles = count_tiles(variant)
        rows.append(
            make_row(environment, variant.case, names, rates, tiles, times, error)
        )
    return rows


def measure_errors(
    programs: Sequence[Program], problem: Problem, mesh: Mesh
) -> list[dict[str, float]]:
    """Returns the errors of the timed programs against the reference in float64.

    Where its score matrix would be too big: of the same variants at fewer tokens.
    """
    case = programs[0].variant.case
    length = min(case.length, LONGEST_CHECKED)
    if (case.batch, case.length) != (1, length):
        shorter = [_shorten(program.variant, length) for program in programs]
        problem = Problem.of(np.random.default_rng(), shorter[0].case, shorter[0].dtype)
        programs = [compile_variant(variant, problem, mesh) for variant in shorter]
    no_gradient = np.zeros_like(problem.d_lse)
    truth = solve(dataclasses.replace(problem, d_lse=no_gradient), jnp.float64)
    rows = []
    for program in programs:
        errors = program.answer().errors(truth)
        row = {f"error_{name}": error for name, error in errors.items()}
        rows.append(row | {"error_length": length})
    return rows


def _shorten(variant: Variant, length: int) -> Variant:
    case = dataclasses.replace(variant.case, length=length, batch=1)
    return dataclasses.replace(variant, case=case)


def count_tiles(variant: Variant) -> dict[str, Any]:
    """Counts tiles of one head and one batch row; Nones if the variant has no tiles."""
    names = "total", "critical_path", "bound"
    sizes, ring_size = variant.block_sizes, variant.case.ring_size
    if sizes is None:
        missing = {f"tiles_{name}": None for name in names}
        return {"block_q": None, "block_k": None, **missing, "bound_share": None}
    visible = variant.case.visible(variant.padded_length)
    work = tiles_per_step(variant.layout, ring_size, visible, sizes)
    path, bound = critical_path(work), balanced_tiles(ring_size, visible, sizes)
    counts = dict(zip(names, (int(work.sum()), path, bound), strict=True))
    tiles = {f"tiles_{name}": count for name, count in counts.items()}
    return dataclasses.asdict(sizes) | tiles | {"bound_share": bound / path}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the rows as text: times, how they compare, tiles, and largest error."""
    titles = "median s", "spread", "cpu s", "TFLOP/s", "path", "all", "error"
    lines = [f"{'layout':12}{'implementation':15}" + "".join(f"{t:>9}" for t in titles)]
    for row in rows:
        error = max(row[f"error_{name}"] for name in ("out", "dq", "dk", "dv"))
        speed_up, less_work = (
            rows[0][name] / row[name]
            for name in ("seconds_median", "cpu_seconds_median")
        )
        lines.append(
            f"{row['layout']:12}{row['implementation']:15}{row['seconds_median']:9.4f}"
            f"{row['seconds_spread']:9.0%}{row['cpu_seconds_median']:9.3f}"
            f"{row['tflops']:9.4f}{row['tiles_critical_path'] or '-':>9}"
            f"{row['tiles_total'] or '-':>9}{error:9.1e}"
            f"   {speed_up:.2f} x as fast, {less_work:.2f} x by cpu s"
        )
    lines.append(
        "path: tiles of the slowest device of each step; all: of all devices; cpu s: "
        "processor time\nof all threads; as fast: as the first row, by the medians"
    )
    if rows[0]["device_kind"] == "cpu":
        lines.append(
            f"{rows[0]['device_count']} simulated devices share {rows[0]['cores']} "
            f"cores (load {rows[0]['load']}): times show the work of all, not the path"
        )
    return "\n".join(lines)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    sizes = {
        "--devices": (8, "devices in the ring"),
        "--batch": (1, "sequences"),
        "--length": (8192, "tokens of a sequence"),
        "--heads": (4, "query heads"),
        "--kv-heads": (4, "key/value heads"),
        "--head-dim": (64, "size of a head"),
        "--repeats": (5, "timed runs of every variant"),
        "--block-q": (None, "query rows of a tile (default: the implementation's)"),
        "--block-k": (None, "key slots of a tile (default: the implementation's)"),
    }
    for name, (default, text) in sizes.items():
        text += f" (default: {default})" if default else ""
        parser.add_argument(name, default=default, type=at_least(1), help=text)
    add = functools.partial(parser.add_argument, help="default: %(default)s")
    add("--dtype", default="float32", choices=("float32", "bfloat16"))
    add("--mask", default="causal", choices=tuple(MASKS))
    layouts = "contiguous", "striped", "zigzag"
    add("--layouts", default=layouts, nargs="+", choices=tuple(LAYOUTS))
    implementations = tuple(backend.IMPLEMENTATIONS)
    add("--implementations", default=["blockwise"], nargs="+", choices=implementations)
    add_output(parser)
    return parser.parse_args(arguments)


def _variants(chosen: argparse.Namespace) -> list[Variant]:
    case = functools.partial(
        Case,
        ring_size=chosen.devices,
        mask=chosen.mask,
        group=group_of(chosen.heads, chosen.kv_heads),
        length=chosen.length,
        head_dim=chosen.head_dim,
        heads=chosen.heads,
        batch=chosen.batch,
    )
    dtype, sizes = jnp.dtype(chosen.dtype), (chosen.block_q, chosen.block_k)
    return [
        Variant(implementation, case(layout=name), dtype, *sizes)
        for implementation in chosen.implementations
        for name in chosen.layouts
    ]


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    chosen = _arguments(arguments)

    def rows() -> list[dict[str, Any]]:
        variants = _variants(chosen)
        return measure(variants, start_devices(chosen.devices), chosen.repeats)

    report(chosen.output, rows, table)


if __name__ == "__main__":
    sys.exit(main())
