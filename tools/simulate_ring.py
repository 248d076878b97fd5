"""Times every ring step of every device of a ring on one device, for every layout.

    python -m tools.simulate_ring --output ring.json
    python -m tools.simulate_ring --ring-size 4 --local-tokens 4096

A ring waits in every step for its slowest device, so the sum of the slowest times is
how long a ring computes whose transfers are hidden. The keys that are visible to a
device in a step depend on the layout alone: one device, given the bounds of each device
one after the other, takes the same time.

The limit of the speed-up over the contiguous ring is the same sum, in tiles of
--tile x --tile scores: what skipping tiles can give at most (Striped Attention,
2311.09431, section 3.3).

The output is a JSON list of rows, one for each layout and direction. Keys: the fields
of `Environment` in `tools/lib/benchmarks/rows.py` and of `Problem` here, and layout,
direction, calls, repeats, seconds (by step, of each device: medians), seconds_path,
tiles_path, speed_up and limit (over the contiguous ring), limit_share (speed_up /
limit).
"""

import argparse
import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels import backends as backend
from kernels import layouts as layout
from kernels import masks
from kernels.block_sizes import BlockSizes
from kernels.cases import LAYOUTS
from kernels.masks import Visible
from tasks.command_line import Parser, as_program, at_least
from tools.lib.benchmarks.rows import (
    Environment,
    add_output,
    make_row,
    report,
    take_rounds,
    take_sample,
)
from tools.lib.benchmarks.variants import group_of
from tools.lib.benchmarks.work import critical_path, tiles_per_step

CHOSEN = "contiguous", "striped", "zigzag"


@dataclass(frozen=True)
class Problem:
    """Causal attention on a ring. local_tokens: those of a device. tile: of scores."""

    implementation: str
    ring_size: int
    local_tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    tile: int

    @property
    def visible(self) -> Visible:
        """Bounds of the whole sequence, in natural order."""
        tokens = self.ring_size * self.local_tokens
        return masks.causal()(np.arange(tokens, dtype=np.int32), tokens)

    def bounds(
        self, name: str, device: int, step: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns bounds (1, local_tokens) in the local slots of a step's keys."""
        order, size, length = LAYOUTS[name], self.ring_size, self.local_tokens
        mine = [layout.permute(x, order, size) for x in self.visible]
        bounds = (np.split(x, size, axis=1)[device] for x in mine)
        source = (device - step) % size
        slots = (order.count(source, x, size, length) for x in bounds)
        return tuple(np.asarray(x, np.int32) for x in slots)


Step = Callable[[jax.Array, jax.Array], Any]


def make_steps(problem: Problem) -> dict[str, Step]:
    """Returns one ring step forward, and one backward, as functions of the bounds."""
    step = backend.choose(problem.implementation, jnp.dtype(problem.dtype))
    keys = jax.random.split(jax.random.key(np.random.default_rng().integers(2**31)), 4)

    def draw(key: jax.Array, heads: int) -> jax.Array:
        shape = 1, problem.local_tokens, heads, problem.head_dim
        return jax.random.normal(key, shape, jnp.dtype(problem.dtype))

    q, d_out = (draw(key, problem.heads) for key in keys[:2])
    k, v = (draw(key, problem.kv_heads) for key in keys[2:])
    wide = jnp.zeros(q.shape, jnp.float32)
    row = jnp.zeros((1, problem.heads, problem.local_tokens), jnp.float32)
    # Weights are exp(score - lse): with such an lse they stay small.
    lse = row + np.log(problem.ring_size * problem.local_tokens)
    scale = problem.head_dim**-0.5

    @jax.jit
    def forward(q, k, v, start, stop, out, lse):
        return step.forward(q, k, v, start, stop, scale=scale, carry=(out, lse))

    @jax.jit
    def backward(q, k, v, d_out, lse, delta, start, stop, dq):
        operands = q, k, v, d_out, lse, delta, start, stop
        return step.backward(*operands, scale=scale, dq=dq)

    return {
        "forward": lambda *bounds: forward(q, k, v, *bounds, wide, lse),
        "backward": lambda *bounds: backward(q, k, v, d_out, lse, row, *bounds, wide),
    }


def measure(
    problem: Problem, names: Sequence[str], repeats: int, calls: int
) -> list[dict[str, Any]]:
    """Returns a row for each layout and direction; the first name is contiguous."""
    environment = Environment.of(jax.devices()[:1])
    sizes = BlockSizes(problem.tile, problem.tile)
    rows = []
    for direction, step in make_steps(problem).items():
        seconds = time_steps(problem, names, step, repeats, calls)
        paths = {name: float(seconds[name].max(axis=0).sum()) for name in names}
        tiles = {}
        for name in names:
            work = tiles_per_step(
                LAYOUTS[name], problem.ring_size, problem.visible, sizes
            )
            tiles[name] = critical_path(work)
        for name in names:
            speed_up, limit = (x[names[0]] / x[name] for x in (paths, tiles))
            facts = {
                "layout": name,
                "direction": direction,
                "calls": calls,
                "repeats": repeats,
                "seconds": seconds[name].T.tolist(),
                "seconds_path": paths[name],
                "tiles_path": tiles[name],
                "speed_up": speed_up,
                "limit": limit,
                "limit_share": speed_up / limit,
            }
            rows.append(make_row(environment, problem, facts))
    return rows


def time_steps(
    problem: Problem, names: Sequence[str], step: Step, repeats: int, calls: int
) -> dict[str, np.ndarray]:
    """Returns median seconds, (devices, steps), of each layout, timed in rounds."""
    size = problem.ring_size
    seconds = {name: np.zeros((size, size)) for name in names}
    for place in np.ndindex(size, size):
        runs = (
            functools.partial(step, *map(jnp.asarray, problem.bounds(name, *place)))
            for name in names
        )
        takes = [functools.partial(take_sample, run, calls) for run in runs]
        for name, samples in zip(names, take_rounds(takes, repeats), strict=True):
            seconds[name][place] = statistics.median(x.wall for x in samples)
    return seconds


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the rows as text."""
    titles = "ms", "tiles", "speed-up", "limit", "share"
    lines = [f"{'layout':12}{'direction':10}" + "".join(f"{t:>10}" for t in titles)]
    for row in rows:
        lines.append(
            f"{row['layout']:12}{row['direction']:10}{row['seconds_path'] * 1e3:10.3f}"
            f"{row['tiles_path']:10}{row['speed_up']:10.3f}{row['limit']:10.3f}"
            f"{row['limit_share']:10.1%}"
        )
    lines.append(
        "ms, tiles: of the slowest device of each step, summed over steps; speed-up, "
        "limit:\nover the contiguous ring, by ms and by tiles; share: speed-up of limit"
    )
    return "\n".join(lines)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = functools.partial(parser.add_argument, help="default: %(default)s")
    known, kind = tuple(backend.IMPLEMENTATIONS), jax.default_backend()
    # None: the best for the device.
    add("--implementation", choices=known)
    numbers = {
        "ring-size": 4 if kind == "cpu" else 8,
        "local-tokens": 256 if kind == "cpu" else 4096,
        "heads": 2 if kind == "cpu" else 16,
        "kv-heads": 2 if kind == "cpu" else 16,
        "head-dim": 128,
        "tile": 128,
        "repeats": 5,
        "calls": 10,
    }
    for name, default in numbers.items():
        add(f"--{name}", default=default, type=at_least(1))
    types = "bfloat16", "float16", "float32"
    add("--dtype", default="bfloat16", choices=types)
    add_output(parser)
    chosen = parser.parse_args(arguments)
    group_of(chosen.heads, chosen.kv_heads)  # raises where they do not fit
    if chosen.implementation is None:
        best = backend.choose(None, jnp.dtype(chosen.dtype))
        names = backend.IMPLEMENTATIONS.items()
        chosen.implementation = next(name for name, one in names if one is best)
    return chosen


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    chosen = _arguments(arguments)
    fields = [field.name for field in dataclasses.fields(Problem)]
    problem = Problem(**{name: getattr(chosen, name) for name in fields})
    report(
        chosen.output,
        lambda: measure(problem, CHOSEN, chosen.repeats, chosen.calls),
        table,
    )


if __name__ == "__main__":
    sys.exit(main())
