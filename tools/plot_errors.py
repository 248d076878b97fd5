"""Measures and draws the error of a ring in bfloat16 against its size.

    python -m tools.plot_errors --output results
    python -m tools.plot_errors --rows results/cpu/error_by_ring.json --output results

A striped causal ring, forward and backward, on simulated devices; beside it, plain
attention in bfloat16 on one device. Errors are norms relative to those of the
reference in float64, on the same random operands for all. If a ring rounded between its
hops, they would grow with its size.

Writes `cpu/error_by_ring.json` (rows, with their environment) and `error_by_ring.png`
into the output directory, in place of those of an earlier run. With `--rows` it draws
what that file says, and measures nothing.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from matplotlib.figure import Figure

from kernels.cases import Case, Problem, solve
from tasks.command_line import Parser, as_program, at_least
from tools.lib.benchmarks.rows import (
    Environment,
    check_numbers,
    make_row,
    read_rows,
    write_rows,
)
from tools.lib.benchmarks.variants import Variant, compile_variant
from tools.lib.picture import GREY, INK, PROGRAMS, style, write_picture

RINGS = (1, 2, 4, 8)
RESULTS = ("out", "dq", "dk", "dv")
ONE_DEVICE = "one device"
"""The name of the row of plain attention, whose ring_size is 0."""


def measure(case: Case, rings: Sequence[int]) -> list[dict[str, Any]]:
    """The row of one device, and one of each ring.

    case: of any ring size.
    """
    problem = Problem.of(np.random.default_rng(), case, jnp.bfloat16)
    problem = dataclasses.replace(problem, d_lse=np.zeros_like(problem.d_lse))
    truth = solve(problem, jnp.float64)
    plain = solve(problem, jnp.bfloat16).errors(truth)
    environment = Environment.of(jax.devices())
    rows = [_row(dataclasses.replace(case, ring_size=0), ONE_DEVICE, plain)]
    for ring_size in rings:
        on_ring = dataclasses.replace(case, ring_size=ring_size)
        variant = Variant("blockwise", on_ring, jnp.dtype(jnp.bfloat16))
        mesh = Mesh(np.array(jax.devices()[:ring_size]), ("ring",))
        errors = compile_variant(variant, problem, mesh).answer().errors(truth)
        rows.append(_row(on_ring, "ring", errors))
    return [make_row(row, environment) for row in rows]


def _row(case: Case, system: str, errors: dict[str, float]) -> dict[str, Any]:
    measured = {f"error_{name}": errors[name] for name in RESULTS}
    return make_row({"system": system, "dtype": "bfloat16"}, case, measured)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text."""
    lines = [f"{'':12}" + "".join(f"{name:>10}" for name in RESULTS)]
    for row in rows:
        label = f"ring of {row['ring_size']}" if row["ring_size"] else row["system"]
        numbers = (row[f"error_{name}"] for name in RESULTS)
        lines.append(f"{label:12}" + "".join(f"{number:10.1e}" for number in numbers))
    return "\n".join(lines)


def _check(plain: Sequence[dict[str, Any]], rings: Sequence[dict[str, Any]]) -> None:
    """Raises ValueError if rows of one device and of rings make no curves."""
    if len(plain) != 1 or not rings:
        raise ValueError(
            f"{len(plain)} rows of one device and {len(rings)} of rings: there must be "
            "one, and at least one; measure them again, without --rows"
        )
    check_numbers([*plain, *rings], [f"error_{name}" for name in RESULTS])
    problems = {(r["layout"], r["mask"], r["length"]) for r in rings}
    sizes = [row["ring_size"] for row in rings]
    if len(problems) > 1 or sizes != sorted(set(sizes)):
        raise ValueError(
            f"rings of {sizes} devices, {sorted(problems)}, make no curve: there must "
            "be one of each size, in increasing order, all of one problem"
        )


def draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """A curve of each result, and a dotted line at the error of one device.

    Raises:
      ValueError: the rows make no curves.
    """
    plain = [row for row in rows if row["system"] == ONE_DEVICE]
    rings = [row for row in rows if row["system"] == "ring"]
    _check(plain, rings)
    sizes = [row["ring_size"] for row in rings]
    figure = Figure(figsize=(9, 3.9), layout="constrained", facecolor="white")
    panels = figure.subplots(1, len(RESULTS), sharey=True)
    ring = rings[0]
    labels = f"{ring['layout']} ring", "plain attention on one device"
    for axes, name in zip(panels, RESULTS, strict=True):
        field = f"error_{name}"
        errors = [row[field] * 1e3 for row in rings]
        look = {"color": PROGRAMS["this repository"], "marker": "o"}
        drawn = axes.plot(sizes, errors, label=labels[0], **look)
        limit = plain[0][field] * 1e3
        drawn += [axes.axhline(limit, color=GREY, linestyle=":", label=labels[1])]
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        style(axes, title=name, x="devices in the ring")
    highest = max(row[f"error_{name}"] for row in rows for name in RESULTS)
    panels[0].set_ylim(0, 1.35e3 * highest)
    panels[0].set_ylabel("relative error, thousandths", color=INK)
    below = {"loc": "outside lower center", "ncols": 2, "labelcolor": INK}
    figure.legend(handles=drawn, frameon=False, **below)
    figure.suptitle(
        f"Errors of attention in bfloat16 against float64 ({ring['mask']}, "
        f"{ring['length']} tokens)",
        color=INK,
        fontsize=12,
    )
    return figure


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add(
        "--tokens", default=1024, type=at_least(1), help="of the sequence (%(default)s)"
    )
    add("--rows", type=Path, help="draw these instead of measuring")
    add("--output", required=True, type=Path, help="directory to write into")
    return parser.parse_args(arguments)


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    chosen = _arguments(arguments)
    if chosen.rows:
        errors = [f"error_{name}" for name in RESULTS]
        problem = "system", "ring_size", "layout", "mask", "length"
        rows = read_rows(chosen.rows, *problem, *errors)
    else:
        if chosen.tokens % max(RINGS):
            raise ValueError(
                f"--tokens {chosen.tokens} must be a multiple of {max(RINGS)}"
            )
        case = Case(1, "striped", "causal", 4, chosen.tokens, 64)
        rows = measure(case, RINGS)
    figure = draw(rows)
    (chosen.output / "cpu").mkdir(parents=True, exist_ok=True)
    if not chosen.rows:
        write_rows(chosen.output / "cpu" / "error_by_ring.json", rows)
    write_picture(chosen.output / "error_by_ring.png", figure)
    print(table(rows))
    print(f"written to {chosen.output}")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(RINGS))
    sys.exit(main())
