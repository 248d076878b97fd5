"""Times every hop of every device of a ring on one device, layout beside layout.

    python -m tools.simulate_ring --output ring.json
    python -m tools.simulate_ring --ring-size 4 --local-tokens 4096

A ring waits in every hop for its slowest device, so the sum of the slowest times is how
long a ring computes whose transfers are hidden. What a device sees in a hop depends on
the layout alone: one device, given each device's bounds in turn, takes the same time.

The limit of the speed-up over the contiguous ring is the same sum, in tiles of
--tile x --tile scores: what skipping tiles can give at most (Striped Attention,
2311.09431, section 3.3).

The output is a JSON list of rows, one for each layout and direction. Keys: the fields
of `Environment` in `bench_rows.py` and of `Problem` here, and layout, direction, calls,
repeats, seconds (by hop, of each device: medians), seconds_path, tiles_path, speed_up
and limit (over the contiguous ring), limit_share (speed_up / limit).
"""

import argparse
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
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
from tools.lib.benchmarks.rows import Environment, check_output, make_row, write_rows
from tools.lib.benchmarks.work import critical_path, tiles_per_hop

DIRECTIONS = "forward", "backward"
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
        """Of the whole sequence, in natural order."""
        tokens = self.ring_size * self.local_tokens
        return masks.causal()(np.arange(tokens, dtype=np.int32), tokens)

    def bounds(self, name: str, device: int, hop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns bounds (1, local_tokens) in the slots of the visiting keys."""
        order, size, length = LAYOUTS[name], self.ring_size, self.local_tokens
        mine = [layout.permute(x, order, size) for x in self.visible]
        bounds = (np.split(x, size, axis=1)[device] for x in mine)
        source = (device - hop) % size
        slots = (order.count(source, x, size, length) for x in bounds)
        return tuple(np.asarray(x, np.int32) for x in slots)


Step = Callable[[jax.Array, jax.Array], Any]


def make_steps(problem: Problem) -> dict[str, Step]:
    """One hop forward, and one backward, for bounds that are given."""
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
    """A row for each layout and direction; contiguous is the first of the names."""
    environment = Environment.of(jax.devices()[:1])
    sizes = BlockSizes(problem.tile, problem.tile)
    rows = []
    for direction, step in make_steps(problem).items():
        seconds = time_hops(problem, names, step, repeats, calls)
        paths = {name: float(seconds[name].max(axis=0).sum()) for name in names}
        tiles = {}
        for name in names:
            work = tiles_per_hop(
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


def time_hops(
    problem: Problem, names: Sequence[str], step: Step, repeats: int, calls: int
) -> dict[str, np.ndarray]:
    """Median seconds, (devices, hops), of each layout. The layouts take turns."""
    size = problem.ring_size
    seconds = {name: np.zeros((size, size)) for name in names}
    for device, hop in np.ndindex(size, size):
        bounds = {
            name: tuple(map(jnp.asarray, problem.bounds(name, device, hop)))
            for name in names
        }
        samples: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(repeats + 1):
            for name in names:
                begin = time.perf_counter()
                for _ in range(calls):
                    last = step(*bounds[name])
                jax.block_until_ready(last)
                if turn:  # the first does not count
                    samples[name].append((time.perf_counter() - begin) / calls)
        for name in names:
            seconds[name][device, hop] = statistics.median(samples[name])
    return seconds


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text."""
    titles = "ms", "tiles", "speed-up", "limit", "share"
    lines = [f"{'layout':12}{'direction':10}" + "".join(f"{t:>10}" for t in titles)]
    for row in rows:
        lines.append(
            f"{row['layout']:12}{row['direction']:10}{row['seconds_path'] * 1e3:10.3f}"
            f"{row['tiles_path']:10}{row['speed_up']:10.3f}{row['limit']:10.3f}"
            f"{row['limit_share']:10.1%}"
        )
    lines.append(
        "ms, tiles: of the slowest device of each hop, summed over the hops; speed-up, "
        "limit:\nover the contiguous ring, by ms and by tiles; share: speed-up of limit"
    )
    return "\n".join(lines)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = functools.partial(parser.add_argument, help="default: %(default)s")
    known = tuple(backend.IMPLEMENTATIONS)
    add("--implementation", default="hopper", choices=known)
    numbers = {
        "ring-size": 8,
        "local-tokens": 4096,
        "heads": 16,
        "kv-heads": 16,
        "head-dim": 128,
        "tile": 128,
        "repeats": 5,
        "calls": 10,
    }
    for name, default in numbers.items():
        add(f"--{name}", default=default, type=at_least(1))
    types = "bfloat16", "float16", "float32"
    add("--dtype", default="bfloat16", choices=types)
    parser.add_argument("--output", type=Path, help="file of rows to write, a new one")
    chosen = parser.parse_args(arguments)
    if chosen.heads % chosen.kv_heads:
        parser.error(
            f"--heads {chosen.heads} is no multiple of --kv-heads {chosen.kv_heads}"
        )
    return chosen


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    chosen = _arguments(arguments)
    fields = [field.name for field in dataclasses.fields(Problem)]
    problem = Problem(**{name: getattr(chosen, name) for name in fields})
    if chosen.output:
        check_output(chosen.output)
    rows = measure(problem, CHOSEN, chosen.repeats, chosen.calls)
    if chosen.output:
        write_rows(chosen.output, rows)
    print(table(rows))


if __name__ == "__main__":
    sys.exit(main())
