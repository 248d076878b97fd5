"""Times attention on one device, forward and backward apart: ours and its peers.

    python -m tools.bench_kernels --output kernels.json  # as suits the device
    python -m tools.bench_kernels --lengths 8192 --contestants hopper cudnn

Contestants are the implementations of `kernels.backends` and the peers of
`tools/lib/benchmarks/peers.py`. All of them get the same operands, in one process, and
are timed in rounds, so a machine that is slow for a while is slow for all. A sample is
a number of runs started one after the other and then waited for, so that starting a run
overlaps the one before it.

A contestant that is not installed or refuses a problem is named with its reason, and
has no row. The output is a JSON list of rows. Keys: the fields of `Environment` and
`Times` in `tools/lib/benchmarks/rows.py` and of `Problem` here, and

- contestant, direction ("forward" or "backward"), calls (runs of a sample);
- tflops by flops_convention, peak_share (null on an unknown chip, or if not bfloat16);
- error, the largest relative norm of the errors of out, or of dq, dk and dv, against
  `blockwise` in float32 on the same operands.
"""

import argparse
import functools
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels import backends as backend
from tasks.command_line import Parser, as_program, at_least
from tools.lib.benchmarks.peers import PEERS, Operands, Runs, Unavailable, ours
from tools.lib.benchmarks.rings import draw_seed, group_of
from tools.lib.benchmarks.rows import (
    Environment,
    Times,
    add_output,
    check_output,
    make_row,
    peak_share,
    take_rounds,
    take_sample,
)
from tools.lib.files import write_json

FLOPS_CONVENTION = (
    "visible pairs only; forward 4 * head_dim * heads * pairs, backward 2.5 times that"
)
BACKWARD = 2.5
DIRECTIONS = "forward", "backward"

DEFAULTS: dict[str, dict[str, Any]] = {
    "tpu": {"contestants": ["pallas_tpu", "splash"]},
    "gpu": {"contestants": ["hopper", "triton", *(n for n in PEERS if n != "splash")]},
    "cpu": {
        "contestants": ["blockwise", "reference"],
        **{"lengths": [512, 1024], "dtypes": ["float32"], "heads": 2, "kv_heads": 2},
    },
}
"""Arguments that are others on other devices."""


@dataclass(frozen=True)
class Problem:
    """Self-attention over `length` tokens."""

    length: int
    head_dim: int
    dtype: str
    mask: str
    batch: int
    heads: int
    kv_heads: int
    seed: int = field(default_factory=draw_seed)

    def draw(self) -> Operands:
        """Draws random operands from the seed."""
        keys = jax.random.split(jax.random.key(self.seed), 4)
        heads = self.heads, self.kv_heads, self.kv_heads, self.heads
        shapes = [(self.batch, self.length, h, self.head_dim) for h in heads]
        return Operands(
            *(
                jax.random.normal(key, shape, jnp.dtype(self.dtype))
                for key, shape in zip(keys, shapes, strict=True)
            )
        )

    def flops(self, direction: str) -> float:
        """Counts those of one run, by `FLOPS_CONVENTION`."""
        pairs = self.length**2
        if self.mask == "causal":
            pairs = self.length * (self.length + 1) // 2
        forward = 4 * self.head_dim * self.heads * self.batch * pairs
        return forward * (1 if direction == "forward" else BACKWARD)


@dataclass(frozen=True)
class Entry:
    """A compiled contestant. compile_seconds: until it had run once."""

    name: str
    runs: Runs
    compile_seconds: float


def prepare(name: str, problem: Problem, operands: Operands) -> Entry:
    """Compiles a contestant, and runs it once.

    Raises:
      Unavailable: it is not installed, or refuses the problem.
    """
    begin = time.perf_counter()
    is_causal = problem.mask == "causal"
    if name in PEERS:
        runs = PEERS[name](operands, is_causal)
    else:
        runs = ours(name, operands, is_causal)
    for run in (runs.forward, runs.backward):
        if run is not None:
            runs.wait(run())
    return Entry(name, runs, time.perf_counter() - begin)


def measure(
    problem: Problem, names: Sequence[str], repeats: int, calls: int
) -> list[dict[str, Any]]:
    """Returns a row for each direction of each contestant that takes the problem.

    Raises:
      ValueError: none of them does.
    """
    environment = Environment.of(jax.devices()[:1])
    operands = problem.draw()
    entries = []
    for name in names:
        try:
            entries.append(prepare(name, problem, operands))
        except Unavailable as reason:
            print(f"{name} left out: {reason}", flush=True)
    if not entries:
        raise ValueError(f"none of {', '.join(names)} can be measured here")
    exact = ours(
        "blockwise",
        Operands(*(x.astype(jnp.float32) for x in operands)),
        problem.mask == "causal",
    )
    rows = []
    for direction in DIRECTIONS:
        able = [entry for entry in entries if getattr(entry.runs, direction)]
        takes = [
            functools.partial(
                take_sample, getattr(entry.runs, direction), calls, entry.runs.wait
            )
            for entry in able
        ]
        samples = take_rounds(takes, repeats)
        truth = jax.device_get(getattr(exact, direction)())
        for entry, mine in zip(able, samples, strict=True):
            times = Times.of(entry.compile_seconds, mine)
            rate = problem.flops(direction) / times.seconds_median
            facts = {
                "contestant": entry.name,
                "direction": direction,
                "calls": calls,
                "tflops": rate / 1e12,
                "flops_convention": FLOPS_CONVENTION,
                "peak_share": peak_share(rate, environment, jnp.dtype(problem.dtype)),
                "error": largest_error(entry.runs, direction, truth),
            }
            rows.append(make_row(environment, problem, facts, times))
    return rows


def largest_error(runs: Runs, direction: str, truth: Sequence[np.ndarray]) -> float:
    """Returns the largest norm of an array's error relative to that of the truth."""
    found = runs.results(getattr(runs, direction)())
    norms = []
    for x, exact in zip(found, truth, strict=True):
        error = np.asarray(x, np.float32) - exact
        norms.append(np.linalg.norm(error) / np.linalg.norm(exact))
    return float(max(norms))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the rows as text, one line for both directions of a contestant."""
    titles = "forward ms", "TFLOP/s", "spread", "backward ms", "TFLOP/s", "spread"
    lines = ["contestant".ljust(22) + "".join(f"{t:>12}" for t in titles) + "  error"]
    for name, mine in itertools.groupby(rows, key=lambda row: row["contestant"]):
        mine = list(mine)
        line = name.ljust(22)
        for direction in DIRECTIONS:
            found = [row for row in mine if row["direction"] == direction]
            line += _cells(found[0]) if found else "-".rjust(12) * 3
        worst = max(row["error"] for row in mine)
        lines.append(line + f"  {worst:.1e}")
    lines.append(
        "ms: medians; spread: (max - min) / median; error: the largest relative norm, "
        "of both\ndirections, against blockwise in float32"
    )
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> str:
    seconds, spread = row["seconds_median"], row["seconds_spread"]
    return f"{seconds * 1e3:12.3f}{row['tflops']:12.1f}{spread:12.1%}"


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = functools.partial(parser.add_argument, help="default: %(default)s")
    add("--lengths", default=[8192, 16384, 32768], nargs="+", type=at_least(1))
    add("--head-dims", default=[128], nargs="+", type=at_least(1))
    add("--masks", default=["causal"], nargs="+", choices=("causal", "full"))
    types = "bfloat16", "float16", "float32"
    add("--dtypes", default=["bfloat16"], nargs="+", choices=types)
    known = *backend.IMPLEMENTATIONS, *PEERS
    add("--contestants", nargs="+", choices=known)
    for name, default in {"batch": 1, "heads": 16, "kv-heads": 16}.items():
        add(f"--{name}", default=default, type=at_least(1))
    add("--repeats", default=5, type=at_least(1))
    add("--calls", default=10, type=at_least(1))
    add_output(parser)
    parser.set_defaults(**DEFAULTS[jax.default_backend()])
    return parser.parse_args(arguments)


def _problems(chosen: argparse.Namespace) -> Iterator[Problem]:
    group_of(chosen.heads, chosen.kv_heads)  # raises where they do not fit
    product = itertools.product(
        chosen.dtypes, chosen.masks, chosen.head_dims, chosen.lengths
    )
    for dtype, mask, head_dim, length in product:
        yield Problem(
            length, head_dim, dtype, mask, chosen.batch, chosen.heads, chosen.kv_heads
        )


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    chosen = _arguments(arguments)
    rows = []
    if chosen.output:
        check_output(chosen.output)
    for problem in list(_problems(chosen)):
        print(f"\n{problem}", flush=True)
        found = measure(problem, chosen.contestants, chosen.repeats, chosen.calls)
        found.sort(key=lambda row: chosen.contestants.index(row["contestant"]))
        print(table(found), flush=True)
        rows += found
        if chosen.output:  # after each problem: what is measured is not lost
            write_json(chosen.output, rows)


if __name__ == "__main__":
    sys.exit(main())
