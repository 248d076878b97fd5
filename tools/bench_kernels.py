"""Times attention on one device, forward and backward apart: ours and its peers.

    python -m tools.bench_kernels --output kernels.json  # as suits the device
    python -m tools.bench_kernels --lengths 8192 --contestants hopper cudnn

Contestants are the implementations of `kernels.backends` and the peers of PEERS, other
people's kernels. All of them get the same operands, in one process, and are timed in
rounds, so a machine that is slow for a while is slow for all. A sample is
a number of runs started one after the other and then waited for, so that starting a run
overlaps the one before it.

A contestant that refuses a problem is named with its reason, and has no row. The output
is a JSON list of rows. Keys: the fields of `Environment` and `times` in
`tools/lib/benchmarks/rows.py` and of `Problem` in `problems.py`, and

- contestant, direction ("forward" or "backward"), calls (runs of a sample);
- tflops by flops_convention, peak_share (null on an unknown chip, or if not bfloat16);
- error, the largest relative norm of the errors of out, or of dq, dk and dv, against
  `blockwise` in float32 on the same operands.
"""

import argparse
import functools
import importlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels import backends, masks
from kernels.attention import attention
from tasks.command_line import Parser, as_program, at_least
from tools.lib.benchmarks.problems import Operands, Problem, relative_error
from tools.lib.benchmarks.rows import (
    Environment,
    add_output,
    make_row,
    report,
    take_rounds,
    take_sample,
    times,
)

DIRECTIONS = "forward", "backward"
COLUMNS = {
    "contestant": "{contestant}",
    "direction": "{direction}",
    "tokens": "{length:,}",
    "head": "{head_dim}",
    "type": "{dtype}",
    "mask": "{mask}",
    "median s": "{seconds_median:.6f}",
    "spread": "{seconds_spread:.1%}",
    "TFLOP/s": "{tflops:.1f}",
    "error": "{error:.1e}",
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "tpu": {"contestants": ["pallas_tpu", "splash"]},
    "gpu": {"contestants": ["hopper", "triton", "cudnn"]},
    "cpu": {
        "contestants": ["blockwise", "reference"],
        **{"lengths": [512, 1024], "dtypes": ["float32"], "heads": 2, "kv_heads": 2},
    },
}
"""Arguments that are others on other devices."""


class Unavailable(Exception):
    """It refuses the problem; the message says why."""


@dataclass(frozen=True)
class Runs:
    """A problem, ready to be run.

    forward, backward: start the computation of (out,), or of dq, dk and dv from what a
      forward pass has left, (B, T, …) each.
    """

    forward: Callable[[], Any]
    backward: Callable[[], Any]


Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def jax_runs(attend: Attend, operands: Operands) -> Runs:
    """Compiles a JAX function, and returns its runs.

    Raises:
      Unavailable: it cannot be compiled or run.
    """
    q, k, v, d_out = operands
    try:
        forward = jax.jit(attend).lower(q, k, v).compile()
        _, pull = jax.jit(lambda *qkv: jax.vjp(attend, *qkv))(q, k, v)
        backward = jax.jit(lambda pull, d_out: pull(d_out)).lower(pull, d_out).compile()
        return Runs(lambda: (forward(q, k, v),), lambda: backward(pull, d_out))
    # Libraries refuse in every way, failed assertions included.
    except Exception as error:
        lines = str(error).splitlines() or [""]
        raise Unavailable(f"{type(error).__name__}: {lines[0]}") from error


def ours(implementation: str, operands: Operands, is_causal: bool) -> Runs:
    """Compiles one of `kernels.backends`."""
    visible = masks.causal() if is_causal else masks.full()
    run = functools.partial(attention, visible=visible, implementation=implementation)
    return jax_runs(run, operands)


def cudnn(operands: Operands, is_causal: bool) -> Runs:
    """NVIDIA's cuDNN, through JAX."""
    options = {"is_causal": is_causal, "implementation": "cudnn"}
    attend = functools.partial(jax.nn.dot_product_attention, **options)
    return jax_runs(attend, operands)


def splash(operands: Operands, is_causal: bool, interpret: bool = False) -> Runs:
    """JAX's splash attention for TPUs, in tiles of up to 1024 x 1024.

    interpret: runs it without a TPU.
    """
    package = "jax.experimental.pallas.ops.tpu.splash_attention"
    kernel = importlib.import_module(f"{package}.splash_attention_kernel")
    masks_of = importlib.import_module(f"{package}.splash_attention_mask")
    length, heads, depth = operands.q.shape[1:]
    if not (interpret or jax.default_backend() == "tpu"):
        raise Unavailable("it runs on TPUs")
    make_mask = masks_of.CausalMask if is_causal else masks_of.FullMask
    mask = make_mask((length, length))
    block = min(1024, length)
    sizes = "block_q", "block_kv", "block_kv_compute"
    sizes += "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"
    blocks = dict.fromkeys(sizes, block) | {"use_fused_bwd_kernel": True}
    options = {"head_shards": 1, "q_seq_shards": 1, "interpret": interpret}
    options["block_sizes"] = kernel.BlockSizes(**blocks)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        mask_of_heads = masks_of.MultiHeadMask([mask] * heads)
        splash = jax.vmap(kernel.make_splash_mha(mask_of_heads, **options))
        q = jnp.swapaxes(q * depth**-0.5, 1, 2)  # (B, H, T, D)
        k = jnp.swapaxes(k, 1, 2)
        v = jnp.swapaxes(v, 1, 2)
        return jnp.swapaxes(splash(q, k, v), 1, 2)

    return jax_runs(attend, operands)


PEERS: dict[str, Callable[[Operands, bool], Runs]] = {
    "cudnn": cudnn,
    "splash": splash,
}


def prepare(name: str, problem: Problem, operands: Operands) -> tuple[Runs, float]:
    """Compiles a contestant, runs it once, and returns the seconds that this took.

    Raises:
      Unavailable: it refuses the problem.
    """
    begin = time.perf_counter()
    make = PEERS.get(name) or functools.partial(ours, name)
    runs = make(operands, problem.mask == "causal")
    for run in (runs.forward, runs.backward):
        jax.block_until_ready(run())
    return runs, time.perf_counter() - begin


def measure(
    problem: Problem, names: Sequence[str], repeats: int, calls: int
) -> Iterator[dict[str, Any]]:
    """Yields a row for each direction of each contestant that takes the problem.

    Raises:
      ValueError: none of them does.
    """
    print(f"\n{problem.heads} heads, keys and values {problem.kv_heads}", flush=True)
    environment = Environment.of(jax.devices()[:1])
    operands = problem.draw()
    entries = {}
    for name in names:
        try:
            entries[name] = prepare(name, problem, operands)
        except Unavailable as reason:
            print(f"{name} left out: {reason}", flush=True)
    if not entries:
        raise ValueError(f"none of {', '.join(names)} can be measured here")
    wide = jax.tree.map(jnp.float32, operands)
    exact = ours("blockwise", wide, problem.mask == "causal")
    for direction in DIRECTIONS:
        takes = [
            functools.partial(take_sample, getattr(runs, direction), calls)
            for runs, _ in entries.values()
        ]
        truth = jax.device_get(getattr(exact, direction)())
        for (name, (runs, seconds)), samples in zip(
            entries.items(), take_rounds(takes, repeats), strict=True
        ):
            timed = times(seconds, samples)
            facts = {"contestant": name, "direction": direction, "calls": calls}
            facts |= problem.rates(direction, timed["seconds_median"], environment)
            facts["error"] = largest_error(runs, direction, truth)
            yield make_row(environment, problem, facts, timed)


def largest_error(runs: Runs, direction: str, truth: Sequence[np.ndarray]) -> float:
    """Returns the largest norm of an array's error relative to that of the truth."""
    results = [np.asarray(x, np.float32) for x in getattr(runs, direction)()]
    return max(map(relative_error, results, truth))


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = functools.partial(parser.add_argument, help="default: %(default)s")
    add("--lengths", default=[8192, 16384, 32768], nargs="+", type=at_least(1))
    add("--head-dims", default=[128], nargs="+", type=at_least(1))
    add("--masks", default=["causal"], nargs="+", choices=("causal", "full"))
    types = "bfloat16", "float16", "float32"
    add("--dtypes", default=["bfloat16"], nargs="+", choices=types)
    known = *backends.IMPLEMENTATIONS, *PEERS
    names = f"of {', '.join(known)} (default: those of the device)"
    add("--contestants", nargs="+", choices=known, metavar="NAME", help=names)
    for name in ("--heads", "--kv-heads"):
        add(name, default=16, type=at_least(1))
    add("--repeats", default=5, type=at_least(1))
    add("--calls", default=10, type=at_least(1))
    add_output(parser)
    parser.set_defaults(**DEFAULTS[jax.default_backend()])
    return parser.parse_args(arguments)


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    chosen = _arguments(arguments)
    problems = [
        Problem(length, chosen.heads, chosen.kv_heads, head_dim, dtype, mask)
        for dtype, mask, head_dim, length in itertools.product(
            chosen.dtypes, chosen.masks, chosen.head_dims, chosen.lengths
        )
    ]

    def rows() -> Iterator[dict[str, Any]]:
        for problem in problems:
            yield from measure(
                problem, chosen.contestants, chosen.repeats, chosen.calls
            )

    report(chosen.output, rows, COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
