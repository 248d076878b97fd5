"""Plans a training run for a pod that is not attached: memory, communication, time.

    python -m tools.plan_pod --config=configs/tpuv4_7b.py --topology=v4:8x8x8
    python -m tools.plan_pod --config=configs/tpuv4_7b.py --topology=v4:8x8x8 \\
        --context=8388608 --config.remat=offload --output plan.json
    python -m tools.plan_pod --config=configs/h200_1b.py --topology=h200:1x8 \\
        --config.mesh.ring=8
    python -m tools.plan_pod --config=configs/tpuv4_7b.py --topology=v4:8x8x8 \\
        --find-max-context
    python -m tools.plan_pod --config=configs/tpuv4_7b.py --topology=v4:8x8x8 --suggest
    python -m tools.plan_pod --config=configs/tpuv4_7b.py --topology=v4:8x8x8 \\
        --documents 8192 65536

Compiles the step that `train.py` runs for an AOT topology, with the chips' own
compilers, and reads memory, schedule and collectives from the compiled program. No
accelerator is needed: XLA's compilers are in requirements/dev.txt. Every field of the
config can be changed as for `train.py`.

The contexts of Ring Attention's table 5 (results/tpu/exorl_memory.json) are, for 32
and 128 trajectories,
    python -m tools.plan_pod --config=configs/exorl_at.py --topology=v5e:2x4
with --config.attention=ring or striped, and for vanilla, memory_efficient and blockwise
with --devices=1 --config.mesh.ring=1. A system that does not fit ends with an error.
"""

import argparse
import functools
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import ml_collections

from data.row_trees import GROUP
from kernels import layouts
from tasks.command_line import CONFIG_FLAGS, Parser, as_program, at_least, read_config
from tasks.layout_choice import row_lines, typical_rows
from tasks.memory_choice import SPARE_SHARE, choice_line
from tasks.systems import AUTO
from tasks.task import make_run
from tools.lib.benchmarks.rows import check_output
from tools.lib.compiled.pods import Pod, TooLarge, aot_pod
from tools.lib.files import write_json
from tools.lib.planning.meshes import count_parameters, suggestions
from tools.lib.planning.phases import phase
from tools.lib.planning.plan import Plan
from tools.lib.planning.step import Step, check, longest_context, precision
from tools.lib.planning.text import answer, describe, describe_meshes, size

LEAST_STEP = 256
"""Smallest difference of contexts, in tokens of a device."""

MOST_MESHES = 12
"""Suggestions printed; --output gets all."""


def compiled_plan(
    config: ml_collections.ConfigDict, pod: Pod, documents: tuple[int | str, ...] = ()
) -> Plan:
    """Compiles the plan of a config; says so on the standard error.

    documents: those packed in a row (see `typical_rows`); none for one document.

    Raises:
      ValueError: something in the config is wrong; before anything is compiled.
      TooLarge: the step does not fit.
    """
    shape = " ".join(f"{axis} {size}" for axis, size in config.mesh.items())
    kind = f"{pod.topology}, {shape}, {config.model.num_layers} layers, {config.remat}"
    timed = functools.partial(phase, kind)
    with timed("building the step"):
        step = Step.of(config, pod, documents)
    rows, columns = config.data.batch_rows, config.data.context_tokens
    what = f"compiling a step of {rows} x {columns:,} tokens for {_described(pod)}"
    print(what, file=sys.stderr, flush=True)
    return Plan.of(step, timed)


def _described(pod: Pod) -> str:
    return f"{len(pod.devices)} x {pod.devices[0].device_kind} ({pod.topology})"


def find_max_context(
    config: ml_collections.ConfigDict, pod: Pod, documents: tuple[int | str, ...] = ()
) -> Plan:
    """Finds the plan of the longest context that leaves SPARE_SHARE of the memory.

    Prints every try.

    Raises:
      ValueError: something in the config is wrong, or nothing fits.
    """
    run = make_run(config, pod.devices)
    partition = run.partition
    divisor = layouts.divisor(run.layout, partition.ring_size, partition.slices)
    unit = divisor * max(1, LEAST_STEP // (divisor // partition.ring_size))
    limit = (1 - SPARE_SHARE) * pod.chip.hbm_bytes
    plans: dict[int, Plan] = {}

    def peak_of(context: int) -> int | None:
        """Compiles a context and prints what it takes: bytes, or None if too many."""
        start = time.perf_counter()
        config.data.context_tokens = context
        jax.clear_caches()  # of earlier tries, which are large
        try:
            plan = compiled_plan(config, pod, documents)
        except TooLarge as error:
            seconds = time.perf_counter() - start
            print(f"{context:,} tokens: {error} ({seconds:.0f} s)", flush=True)
            return None
        plans[context] = plan
        memory = plan.memory
        fits = "fits" if memory.peak <= limit else "does not fit"
        print(
            f"{context:,} tokens: {size(memory.peak)}, {memory.spare_share:.1%} spare: "
            f"{fits}; {plan.hidden_share:.0%} of the ring's bytes hidden "
            f"({plan.compile_seconds:.0f} s)",
            flush=True,
        )
        return memory.peak

    best = longest_context(peak_of, config.data.context_tokens, unit, limit)
    if not best:
        least = config.data.context_tokens  # the last try
        raise ValueError(f"no context fits, down to {least} tokens")
    config.data.context_tokens = best
    print(
        f"longest context that leaves {SPARE_SHARE:.0%}: {best:,} tokens, to within "
        f"{precision(best, unit):,}\n"
    )
    return plans[best]


def run(options: argparse.Namespace, config: ml_collections.ConfigDict) -> None:
    """Runs what the options ask for.

    Raises:
      ValueError, ModuleNotFoundError: bad input, or no compiler: before anything is
        compiled.
      TooLarge: the step does not fit.
    """
    if options.output:
        check_output(options.output)
    if options.context is not None:
        config.data.context_tokens = options.context
    check(config)
    documents = tuple(options.documents)
    pod = aot_pod(options.topology)
    if options.devices is not None:
        pod = pod.first(options.devices)
    if options.suggest:
        meshes = suggestions(config, len(pod.devices), pod.chip, documents)
        rows, columns = config.data.batch_rows, config.data.context_tokens
        parameters = count_parameters(config, pod.chip) / 1e9
        print(
            f"{answer(meshes, pod.chip, config)}\n\n"
            f"{parameters:.3g}B parameters in {config.model.num_layers} layers, "
            f"{rows} x {columns:,} tokens, {_described(pod)}"
        )
        print("\n".join(describe_meshes(meshes[:MOST_MESHES], pod.chip)))
        what = {"topology": pod.topology, "documents": documents}
        what |= {"rows": config.data.batch_rows, "context": config.data.context_tokens}
        value: Any = [what | mesh.row() for mesh in meshes]
    else:
        way = find_max_context if options.find_max_context else compiled_plan
        plan = way(config, pod, documents)
        rows = typical_rows(config, documents)
        planned = make_run(config, pod.devices, rows)
        print("\n".join([*describe(plan), *row_lines(planned)]))
        if config.remat == AUTO:
            print(choice_line(planned))
        value = plan.row()
    if options.output:
        write_json(options.output, value)


def _document(text: str) -> int | str:
    """Reads a length, or a group."""
    return text if GROUP.fullmatch(text) else at_least(1)(text)


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    parser = Parser(__doc__, epilog=CONFIG_FLAGS)
    kinds = "as v4:8x8x8 (chips), v5p-128 (a cloud's name) or b200:4x8 (hosts x GPUs)"
    parser.add_argument("--topology", required=True, metavar="CHIP:SHAPE", help=kinds)
    parser.add_argument(
        "--devices", type=int, help="use only this many devices of the topology"
    )
    parser.add_argument("--context", type=int, metavar="TOKENS", help="of a row")
    parser.add_argument(
        "--documents",
        type=_document,
        nargs="+",
        default=(),
        metavar="TOKENS",
        help="lengths packed in a row, repeated until it is full (default: one); of a "
        "prompt and its answers as 32768+16x4096",
    )
    parser.add_argument("--output", type=Path, metavar="JSON")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument(
        "--find-max-context",
        action="store_true",
        help="plan the longest context that fits, from the one that is given on",
    )
    ways.add_argument(
        "--suggest", action="store_true", help="rank meshes; compiles nothing"
    )
    options, rest = parser.parse_known_args(arguments)
    # Compiles for an AOT topology: the devices of this machine do not matter.
    jax.config.update("jax_platforms", "cpu")
    # tokamax warns of each product for whose shape it has no tuned tiles.
    logging.getLogger("absl").setLevel(logging.ERROR)
    try:
        run(options, read_config(rest))
    except TooLarge as error:
        raise ValueError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
