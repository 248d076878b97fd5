"""Times attention on a ring, forward and backward, for every layout.

    python -m tools.bench_ring --output rings.json
    python -m tools.bench_ring --devices 4 --dtype bfloat16 --head-dim 128
    python -m tools.bench_ring --simulate --output steps.json
    python -m tools.bench_ring --beside ORIGINAL/bin/python --output rows.json

A run computes the output and the gradients of q, k and v. Variants are timed in rounds,
so a noisy machine is noisy for all. Without an accelerator, or with JAX_PLATFORMS=cpu,
CPU devices are simulated. They share the machine's cores, so times show the work of all
devices together (column "all" of the table), and not how long a ring waits for its
slowest device (column "path").

--simulate does that: it times every step of every device on one device, each in a
program of its own, and then all steps of a device in one program, as a ring has them:
what they take less is JAX's dispatch. A ring waits in every step for its slowest
device, so the sum of the slowest times is how long a ring computes whose transfers are
hidden. The limit of the speed-up over the contiguous ring is the same sum in tiles
(Striped Attention, 2311.09431, section 3.3).

--beside times the original `ringattention` too, on the CPU, in a process of its own
(ORIGINAL/bin/pip install -r tools/ringattention.txt), with each of --chunks.

The output is a JSON list of rows. Keys: the fields of `Environment` and `times` in
`tools/lib/benchmarks/rows.py`, of `Problem` in `problems.py`, and

- implementation and layout; gpu_transfers, what moves shards between NVIDIA GPUs (see
  `kernels/devices/compiler.py`); block_q and block_k of the tiles that are counted;
- tflops, model TFLOP/s of all devices by flops_convention, and peak_share, its share of
  the devices' peak (null on an unknown chip, or if not in bfloat16);
- tiles_total over devices and ring steps, tiles_critical_path (of the slowest device of
  each step), tiles_bound (visible pairs, evenly spread) and bound_share (bound / path);
- error_out, error_dq, error_dk and error_dv against the reference in float64, relative
  to its norm, measured in this run with error_length tokens;
- with --simulate: direction, seconds (by step, of each device: medians),
  seconds_together (of each device, all steps in one program), seconds_path,
  tiles_path, speed_up and limit (over the contiguous ring), limit_share.
"""

import argparse
import contextlib
import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels import make_ring_attention, masks
from kernels.backends import IMPLEMENTATIONS, choose
from kernels.backends.steps import Rows
from kernels.backends.tile_layout import BlockSizes
from kernels.cost.choice import default_granule
from kernels.devices.compiler import GPU_TRANSFERS, compiler_options
from kernels.layouts import Contiguous, Layout, Striped, Zigzag, permute, unpermute
from tasks.command_line import Parser, as_program, at_least
from tools.lib.benchmarks import rows
from tools.lib.benchmarks.original import Original
from tools.lib.benchmarks.problems import (
    GRADED,
    MASKS,
    Operands,
    Problem,
    bounds_of_steps,
    count_tiles,
    relative_error,
)

LAYOUTS: dict[str, Layout] = {
    "contiguous": Contiguous(),
    "striped": Striped(),
    "zigzag": Zigzag(),
}

TILE = 128
"""Rows and keys of the tiles that are counted."""
COLUMNS = {
    "layout": "{layout}",
    "implementation": "{implementation}",
    "transfers": "{gpu_transfers}",
    "median s": "{seconds_median:.4f}",
    "spread": "{seconds_spread:.0%}",
    "cpu s": "{cpu_seconds_median:.3f}",
    "TFLOP/s": "{tflops:.4f}",
    "path": "{tiles_critical_path}",
    "all": "{tiles_total}",
    "error of dq": "{error_dq:.1e}",
    "load": "{load}",
}
COLUMNS_OF_STEPS = {
    "layout": "{layout}",
    "direction": "{direction}",
    "s": "{seconds_path:.6f}",
    "tiles": "{tiles_path}",
    "speed-up": "{speed_up:.3f}",
    "limit": "{limit:.3f}",
    "share": "{limit_share:.1%}",
}
"""Of the slowest device of each step, summed; over the contiguous ring."""
LONGEST_CHECKED = 8192
"""Tokens whose scores the reference is asked to hold: 512 MiB a copy in float64."""


def layout_of(name: str, problem: Problem) -> Layout:
    """Returns a layout of LAYOUTS; in stripes as wide as a run's by default."""
    if name != "striped":
        return LAYOUTS[name]
    kind = jax.devices()[0].device_kind
    return Striped(default_granule(problem.ring_size, problem.length, kind))


class CompiledRing:
    """Our ring, forward and backward, with its operands on their devices."""

    versions = {"jax": jax.__version__}

    def __init__(
        self,
        problem: Problem,
        operands: Operands,
        layout: str,
        implementation: str,
        gpu_transfers: str,
        devices: Sequence[jax.Device],
    ):
        mesh = Mesh(np.array(devices), ("ring",))
        self._order = layout_of(layout, problem)
        self._size = problem.ring_size
        options = {"layout": self._order, "implementation": implementation}
        attend = make_ring_attention(mesh, **options)
        in_order = partial(permute, layout=self._order, ring_size=self._size)
        visible = masks.Visible._make(map(in_order, problem.visible))

        def both(q: Any, k: Any, v: Any, d_out: Any) -> tuple:
            out, pull = jax.vjp(lambda *x: attend(*x, visible), q, k, v)
            return out, *pull(d_out)

        sharding = NamedSharding(mesh, PartitionSpec(None, "ring"))
        sharded = [jax.device_put(in_order(np.asarray(x)), sharding) for x in operands]
        begin = time.perf_counter()
        chosen = compiler_options(mesh, gpu_transfers)
        program = jax.jit(both, compiler_options=chosen).lower(*sharded).compile()
        self._run = partial(program, *sharded)
        self.compile_seconds = time.perf_counter() - begin

    def sample(self) -> rows.Sample:
        """Runs it once."""
        return rows.take_sample(self._run)

    def answer(self) -> dict[str, np.ndarray]:
        """Runs it, and brings the results into natural order, in float64."""
        answer = {}
        for name, result in zip(GRADED, self._run(), strict=True):
            result = np.asarray(result, np.float64)
            answer[name] = unpermute(result, self._order, self._size)
        return answer


Steps = Callable[[jax.Array, jax.Array], Any]
"""Takes ring steps with their bounds, (steps, M, T) each."""


def make_steps(problem: Problem, implementation: str) -> dict[str, Steps]:
    """Returns forward and backward ring steps, in one program a call."""
    step = choose(implementation, jnp.dtype(problem.dtype), problem.head_dim)
    local = problem.length // problem.ring_size
    q, k, v, d_out = jax.tree.map(lambda x: x[:, :local], problem.draw())
    wide = jnp.zeros(q.shape, jnp.float32)
    row = jnp.zeros((problem.batch, problem.heads, local), jnp.float32)
    # Weights are exp(score - lse): with this lse they stay small.
    lse = row + np.log(problem.length)
    queries = Rows(q, d_out, lse, delta=row)
    scale = problem.head_dim**-0.5

    @jax.jit
    def forward(q, k, v, starts, stops, out, lse):
        def attend(carry, bounds):
            start, stop = bounds
            carry = step.forward(q, k, v, start, stop, scale=scale, carry=carry)
            return carry, None

        return jax.lax.scan(attend, (out, lse), (starts, stops))

    @jax.jit
    def backward(queries: Rows, k, v, starts, stops, dq):
        q, do, lse, delta = queries

        def add(dq, bounds):
            start, stop = bounds
            dq, dk, dv = step.backward(
                q, k, v, do, lse, delta, start, stop, scale=scale, dq=dq
            )
            return dq, (dk, dv)

        return jax.lax.scan(add, dq, (starts, stops))

    return {
        "forward": lambda *bounds: forward(q, k, v, *bounds, wide, lse),
        "backward": lambda *bounds: backward(queries, k, v, *bounds, wide),
    }


def time_steps(
    problem: Problem,
    layouts: Sequence[str],
    steps: Steps,
    repeats: int,
    calls: int,
    together: bool = False,
) -> dict[str, np.ndarray]:
    """Returns median seconds, (devices, steps), of each layout, timed in rounds.

    together: whether all steps of a device are in one program: (devices, 1).
    """
    size = problem.ring_size
    programs = (size, 1) if together else (size, size)
    seconds = {name: np.zeros(programs) for name in layouts}
    bounds = {}
    for name in layouts:
        each = bounds_of_steps(layout_of(name, problem), size, problem.visible)
        # (2, devices · steps, M, T)
        known = np.stack([counts for _, counts in each], 1)
        bounds[name] = known.reshape(2, *programs, -1, *known.shape[2:])
    for program in np.ndindex(programs):
        takes = []
        for name in layouts:
            starts, stops = (jnp.int32(known[program]) for known in bounds[name])
            run = partial(steps, starts, stops)
            takes.append(partial(rows.take_sample, run, calls))
        for name, samples in zip(
            layouts, rows.take_rounds(takes, repeats), strict=True
        ):
            seconds[name][program] = statistics.median(x.wall for x in samples)
    return seconds


def start_devices(count: int) -> list[jax.Device]:
    """Returns `count` accelerators, or simulated CPU devices without any.

    Raises:
      ValueError: the machine has fewer.
    """
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # JAX has its devices already, and they cannot change
    devices = jax.devices()
    if len(devices) < count:
        raise ValueError(
            f"--devices {count}, but there are {len(devices)} of "
            f"{devices[0].device_kind}: ask for fewer, or set JAX_PLATFORMS=cpu"
        )
    return devices[:count]


def _tiles(problem: Problem, layout: str) -> dict[str, Any]:
    sizes = BlockSizes(TILE, TILE)
    order = layout_of(layout, problem)
    return count_tiles(order, problem.ring_size, problem.visible, sizes)


def measure(problem: Problem, chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times the chosen variants in rounds, and the original's chunk sizes."""
    devices = start_devices(problem.ring_size)
    environment = rows.Environment.of(devices)
    operands = problem.draw()
    with contextlib.ExitStack() as stack:
        makes: list[Callable[..., CompiledRing | Original]] = []
        facts: list[dict[str, Any]] = []
        variants = (chosen.implementations, chosen.layouts, chosen.gpu_transfers)
        for name, layout, transfers in itertools.product(*variants):
            options = {"layout": layout, "implementation": name}
            options["gpu_transfers"] = transfers
            makes.append(partial(CompiledRing, **options, devices=devices))
            tiles = _tiles(problem, layout)
            facts.append(options | {"block_q": TILE, "block_k": TILE} | tiles)
        for chunk in chosen.chunks if chosen.beside else ():
            how = {"python": chosen.beside, "chunk": chunk, "stack": stack}
            makes.append(partial(Original, **how))
            options = {"layout": "contiguous", "implementation": "ringattention"}
            options["gpu_transfers"] = None
            facts.append(options | {"block_q": chunk, "block_k": chunk})
        runs = [make(problem, operands) for make in makes]
        samples = rows.take_rounds([run.sample for run in runs], chosen.repeats)
        length = min(problem.length, LONGEST_CHECKED)
        checked = dataclasses.replace(problem, length=length)
        given = operands if checked == problem else checked.draw()
        truth = checked.truth(given)
        for make, about, run, taken in zip(makes, facts, runs, samples, strict=True):
            times = rows.times(run.compile_seconds, taken)
            rates = problem.rates("both", times["seconds_median"], environment)
            same = run if checked == problem else make(checked, given)
            errors = {}
            for name, result in same.answer().items():
                errors[f"error_{name}"] = relative_error(result, truth[name])
            errors |= {"error_length": length, "versions": run.versions}
            yield rows.make_row(environment, problem, about, times, rates, errors)


def simulate(problem: Problem, chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times the steps of every device; a row for each layout and direction."""
    environment = rows.Environment.of(jax.devices()[:1])
    (implementation,) = chosen.implementations
    names = tuple(dict.fromkeys(("contiguous", *chosen.layouts)))
    for direction, steps in make_steps(problem, implementation).items():
        how = {"repeats": chosen.repeats, "calls": chosen.calls}
        seconds = time_steps(problem, names, steps, **how)
        in_one = time_steps(problem, names, steps, together=True, **how)
        paths = {name: float(seconds[name].max(axis=0).sum()) for name in names}
        tiles = {n: _tiles(problem, n)["tiles_critical_path"] for n in names}
        for name in names:
            speed_up = paths[names[0]] / paths[name]
            limit = tiles[names[0]] / tiles[name]
            facts = {"layout": name, "direction": direction, "tile": TILE}
            facts |= {"implementation": implementation} | how
            facts |= {"seconds": seconds[name].T.tolist()}
            facts |= {"seconds_together": in_one[name].ravel().tolist()}
            facts |= {"seconds_path": paths[name], "tiles_path": tiles[name]}
            facts |= {"speed_up": speed_up, "limit": limit}
            facts |= {"limit_share": speed_up / limit}
            yield rows.make_row(environment, problem, facts)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    sizes = {
        "--devices": (8, "devices in the ring"),
        "--length": (8192, "tokens of a sequence"),
        "--heads": (4, "query heads"),
        "--kv-heads": (4, "key/value heads"),
        "--head-dim": (64, "size of a head"),
        "--repeats": (5, "timed runs of every variant"),
        "--calls": (10, "runs timed together, with --simulate"),
    }
    for name, (default, text) in sizes.items():
        words = {"help": f"{text} (default: {default})"}
        parser.add_argument(name, default=default, type=at_least(1), **words)
    add = partial(parser.add_argument, help="default: %(default)s")
    add("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    add("--mask", default="causal", choices=tuple(MASKS))
    layouts = list(LAYOUTS)
    add("--layouts", default=layouts, nargs="+", choices=layouts)
    known = tuple(IMPLEMENTATIONS)
    words = {"help": f"of {', '.join(known)} (default: the best of the device)"}
    add("--implementations", nargs="+", choices=known, metavar="NAME", **words)
    modes = tuple(GPU_TRANSFERS)
    add("--gpu-transfers", default=["nccl"], nargs="+", choices=modes)
    add("--chunks", default=[128, 256, 512], nargs="+", type=at_least(1))
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--simulate", action="store_true", help="step by step")
    ways.add_argument("--beside", type=Path, metavar="PYTHON", help="the original's")
    rows.add_output(parser)
    return parser.parse_args(arguments)


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    chosen = _arguments(arguments)
    names = "length", "heads", "kv_heads", "head_dim", "dtype", "mask"
    given = {name: getattr(chosen, name) for name in names}
    problem = Problem(**given, ring_size=chosen.devices)
    if not chosen.simulate:
        kind = start_devices(chosen.devices)[0].device_kind
        if chosen.gpu_transfers != ["nccl"] and not kind.startswith("NVIDIA"):
            raise ValueError(f"--gpu-transfers must be nccl, got devices of {kind}")
    if not chosen.implementations:
        best = choose(None, jnp.dtype(chosen.dtype), chosen.head_dim)
        known = IMPLEMENTATIONS
        chosen.implementations = [name for name in known if known[name] is best]
    run = simulate if chosen.simulate else measure
    columns = COLUMNS_OF_STEPS if chosen.simulate else COLUMNS
    rows.report(chosen.output, partial(run, problem, chosen), columns)


if __name__ == "__main__":
    sys.exit(main())
