"""Measures and draws the error of a ring in bfloat16 against its size.

    python tools/plot_errors.py --output results
    python tools/plot_errors.py --rows results/cpu/error_by_ring.json --output results

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

if not __package__:  # run as a script, which puts tools/ on the path, not the root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from matplotlib.figure import Figure

from tests.cases import Case, Problem, solve
from tools.bench_rows import Environment, make_row, read_rows, write_rows
from tools.picture import write_picture
from tools.ring_variant import Variant, compile_variant

RINGS = (1, 2, 4, 8)
RESULTS = ("out", "dq", "dk", "dv")
ONE_DEVICE = "one device"
"""The name of the row of plain attention, whose ring_size is 0."""

INK, GREY = "#1b2733", "#5c6b7a"
COLOURS = dict(zip(RESULTS, ("#0d3f6e", "#2a70ab", "#c2571a", "#2f8f6b"), strict=True))
MARKS = dict(zip(RESULTS, "osD^", strict=True))


def measure(case: Case, rings: Sequence[int]) -> list[dict[str, Any]]:
    """The row of one device, and one of each ring.

    case: of any ring size.
    """
    problem = Problem.of(case, jnp.bfloat16)
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


def draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """A curve of each result, and a dotted line at the error of one device.

    Raises:
      ValueError: there is no row of one device, or none of a ring.
    """
    plain = [row for row in rows if row["system"] == ONE_DEVICE]
    rings = [row for row in rows if row["system"] == "ring"]
    if len(plain) != 1 or not rings:
        raise ValueError(
            f"{len(plain)} rows of one device and {len(rings)} of rings: there must be "
            "one, and at least one; measure them again, without --rows"
        )
    figure = Figure(figsize=(9, 3.6), layout="constrained", facecolor="white")
    panels = figure.subplots(1, len(RESULTS), sharey=True)
    sizes = [row["ring_size"] for row in rings]
    for axes, name in zip(panels, RESULTS, strict=True):
        field = f"error_{name}"
        errors = [row[field] * 1e3 for row in rings]
        look = {"color": COLOURS[name], "marker": MARKS[name]}
        axes.plot(sizes, errors, **look)
        axes.axhline(plain[0][field] * 1e3, color=GREY, linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_title(name, color=INK)
        axes.set_xlabel("devices in the ring", color=INK)
        axes.tick_params(labelcolor=INK, color=GREY)
        axes.spines[["top", "right"]].set_visible(False)
    highest = max(row[f"error_{name}"] for row in rows for name in RESULTS)
    panels[0].set_ylim(0, 1.35e3 * highest)
    panels[0].set_ylabel("relative error, thousandths", color=INK)
    ring = rings[0]
    figure.suptitle(
        f"A {ring['layout']} ring in bfloat16 against float64 ({ring['mask']}, "
        f"{ring['length']} tokens); dotted: plain attention on one device",
        color=INK,
        fontsize=11,
    )
    return figure


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tokens", default=1024, type=int, help="of the sequence (%(default)s)")
    add("--rows", type=Path, help="draw these instead of measuring")
    add("--output", required=True, type=Path, help="directory to write into")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status, 0 or 1."""
    chosen = _arguments(arguments)
    try:
        if chosen.rows:
            rows = read_rows(chosen.rows)
        else:
            if chosen.tokens < 1 or chosen.tokens % max(RINGS):
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
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(rows))
    print(f"written to {chosen.output}")
    return 0


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(RINGS))
    sys.exit(main())
