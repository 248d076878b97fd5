"""Plans a training run for a pod that is not there: does it fit, and what does it take?

    python tools/plan_pod.py --config=configs/tpuv4_7b.py --topology=v4:8x8x8
    python tools/plan_pod.py --config=configs/tpuv4_7b.py --topology=v4:8x8x8 \\
        --context=8388608 --config.remat=offload --output plan.json
    python tools/plan_pod.py --config=configs/h200_1b.py --topology=h200:1x1x8 \\
        --config.mesh.ring=8
    python tools/plan_pod.py --config=configs/tpuv4_7b.py --topology=v4:8x8x8 \\
        --find-max-context
    python tools/plan_pod.py --config=configs/tpuv4_7b.py --topology=v4:8x8x8 --suggest

Compiles the step that `train.py` runs for the described devices, with the compilers
that the real ones have, and reads what the compiled program says of memory, schedule
and collectives. No accelerator is needed: XLA's compilers are in requirements-dev.txt.
Every field of the config can be changed as for `train.py`.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a script, which puts tools/ on the path, not the root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import ml_collections

import assemble
from tools.bench_rows import check_output
from tools.config_file import read_config
from tools.plan import Plan
from tools.plan_context import TOLERANCE, longest_context, longest_that_fits
from tools.plan_estimate import Estimate
from tools.plan_memory import SPARE_SHARE
from tools.plan_mesh import Suggestion, suggestions
from tools.plan_step import Pod, Step, TooLarge, described_pod
from training.chips import Chip
from training.mesh import MESH_AXES

LEAST_STEP = 256
"""Tokens of a device by which contexts are varied."""

MOST_MESHES = 12
"""Printed of those suggested; --output gets all."""


def describe(plan: Plan) -> list[str]:
    """The lines that are printed of a plan."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    lines = [
        f"{plan.devices} x {plan.device_kind} ({plan.topology}): {mesh}",
        f"step: {plan.rows} x {plan.context_tokens:,} tokens, remat {plan.remat}, "
        f"attention {plan.implementation}",
        f"compiled in {plan.compile_seconds:.0f} s with {_size(plan.planner_bytes)}",
        *_memory_lines(plan),
        *_transfer_lines(plan),
        "collectives of a step, sent by each device (as often as their loops turn):",
    ]
    for kind in plan.collectives:
        lines.append(
            f"  {kind.name:20s} {kind.count:10,d} x {_size(kind.bytes_sent):>12s}, "
            f"{_size(kind.waited_bytes)} of it behind no kernel"
        )
    if plan.unknown_loops:
        lines.append(f"  {plan.unknown_loops} loops of unknown length counted once")
    lines.append(
        f"model FLOPs of a step: {plan.work.model_flops:.3e} "
        f"({plan.work.paper_flops:.3e} as Ring Attention counts them)"
    )
    return lines + _estimate_lines(plan.estimate)


def _memory_lines(plan: Plan) -> list[str]:
    memory = plan.memory
    rows = {
        "parameters": memory.parameters,
        "optimizer state": memory.optimizer_state,
        f"saved by layers (formula of remat={plan.remat})": memory.saved,
        "workspace (the rest)": memory.workspace,
        "peak": memory.peak,
        "of": memory.capacity,
    }
    lines = ["memory of a device:"]
    lines += [f"  {name:50s} {_size(size):>12s}" for name, size in rows.items()]
    note = "" if memory.spare_share >= SPARE_SHARE else f", below {SPARE_SHARE:.0%}"
    lines.append(f"  {'spare':50s} {memory.spare_share:12.1%}{note}")
    if memory.host:
        lines.append(
            f"  {'of the host, for each device':50s} {_size(memory.host):>12s}"
        )
    return lines


def _transfer_lines(plan: Plan) -> list[str]:
    found = plan.transfers
    total = found.hidden + found.exposed
    if not total:
        return ["transfers of the ring: none"]
    sent = found.hidden_bytes + found.exposed_bytes
    line = f"transfers of the ring: {total:,}, {_size(sent)}: "
    if not found.kernels:
        return [line + f"{plan.implementation} has no kernel that could hide them"]
    if not found.exposed:
        return [line + "all behind a kernel"]
    share = f"{found.exposed_bytes / sent:.2%}"
    return [
        line + f"{found.hidden:,} behind a kernel",
        f"  and {found.exposed:,} not ({_size(found.exposed_bytes)}, {share})",
    ]


def _estimate_lines(estimate: Estimate) -> list[str]:
    step, products, attention, waits = map(
        _seconds,
        (estimate.step, estimate.products, estimate.attention, estimate.waits),
    )
    return [
        f"estimate, not measured: {step} a step, MFU {estimate.mfu:.1%}",
        f"  products {products}, attention {attention}, waits {waits}, assuming",
        *(f"  - {assumption}" for assumption in estimate.assumptions),
    ]


def _seconds(count: float) -> str:
    return f"{count:,.1f} s" if count >= 10 else f"{count:.3g} s"


def _size(count: float) -> str:
    """Bytes, as people read them."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def write_json(path: Path, value: Any) -> None:
    """Writes under a temporary name until it is complete."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def find_max_context(config: ml_collections.ConfigDict, pod: Pod) -> Plan:
    """The plan of the longest context that leaves SPARE_SHARE of a device's memory.

    Prints every try.

    Raises:
      ValueError: something in the config is wrong, or nothing fits.
    """
    limit = (1 - SPARE_SHARE) * pod.chip.hbm_bytes
    ring = assemble.partition(config, pod.devices).ring_size
    divisor = assemble.attention_system(config).layout.divisor(ring)
    unit = divisor * max(1, LEAST_STEP // (divisor // ring))
    plans: dict[int, Plan] = {}

    def peak_of(context: int) -> int | None:
        start = time.perf_counter()
        config.data.context_tokens = context
        jax.clear_caches()  # of earlier tries, which are large
        try:
            plans[context] = Plan.of(Step.of(config, pod))
        except TooLarge as error:
            seconds = time.perf_counter() - start
            print(f"{context:,} tokens: {error} ({seconds:.0f} s)", flush=True)
            return None
        memory = plans[context].memory
        fits = "fits" if memory.peak <= limit else "does not fit"
        seconds = plans[context].compile_seconds
        hidden = 1 - plans[context].transfers.exposed_share
        print(
            f"{context:,} tokens: {_size(memory.peak)}, {memory.spare_share:.1%} "
            f"spare: {fits}; {hidden:.0%} of the ring behind kernels ({seconds:.0f} s)",
            flush=True,
        )
        return memory.peak

    first = config.data.context_tokens
    tries = longest_context(peak_of, first=first, unit=unit, limit=limit)
    best = longest_that_fits(tries, limit)
    if best is None:
        raise ValueError(f"no context fits, down to {tries[-1].context} tokens")
    print(
        f"longest context that leaves {SPARE_SHARE:.0%}: {best.context:,} tokens, to "
        f"within {max(unit, int(TOLERANCE * best.context)):,}\n"
    )
    return plans[best.context]


def describe_meshes(found: Sequence[Suggestion], chip: Chip) -> list[str]:
    """The lines that are printed of suggested meshes."""
    lines = [
        f"{'data':>5s} {'fsdp':>5s} {'ring':>5s} {'tensor':>6s}  {'memory':>11s}  "
        f"fits  {'kernel / transfer':>17s}  {'waits for':>11s}"
    ]
    for one in found:
        sizes = [one.mesh[axis] for axis in MESH_AXES]
        hiding = "no ring" if one.hiding is None else f"{one.hiding:.2f}"
        lines.append(
            "{:5d} {:5d} {:5d} {:6d}".format(*sizes)
            + f"  {_size(one.memory):>11s}  {'yes' if one.fits else 'no':4s}  "
            f"{hiding:>17s}  {_size(one.waited_bytes):>11s}"
        )
    return lines + [
        "by rule of thumb, best first, nothing compiled: memory of "
        f"{_size(chip.hbm_bytes)} less {SPARE_SHARE:.0%}; a ring hides at 1 or more; "
        "see tools/plan_mesh.py"
    ]


def run(options: argparse.Namespace, config: ml_collections.ConfigDict) -> None:
    """Makes the plan that was asked for.

    Raises:
      ValueError, ModuleNotFoundError: bad input, or no compiler: before anything is
        compiled.
      TooLarge: the step does not fit.
    """
    if options.output:
        check_output(options.output)
    if options.context is not None:
        config.data.context_tokens = options.context
    pod = described_pod(options.topology)
    if options.suggest:
        found = suggestions(config, len(pod.devices), pod.chip)
        print("\n".join(describe_meshes(found[:MOST_MESHES], pod.chip)))
        value: Any = [dataclasses.asdict(one) for one in found]
    else:
        if options.find_max_context:
            plan = find_max_context(config, pod)
        else:
            plan = Plan.of(Step.of(config, pod))
        print("\n".join(describe(plan)))
        value = plan.row()
    if options.output:
        write_json(options.output, value)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program; errors end it with one line and status 1."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--topology", required=True, metavar="CHIP:SHAPE")
    parser.add_argument("--context", type=int, metavar="TOKENS", help="of each row")
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
    # What is compiled for is described: the devices of this machine do not matter.
    jax.config.update("jax_platforms", "cpu")
    try:
        run(options, read_config(rest))
    except (ValueError, ModuleNotFoundError, TooLarge) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
