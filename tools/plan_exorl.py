"""Which attention systems hold the contexts of Ring Attention's table 5, and which not.

    python -m tools.plan_exorl --output results/tpu/exorl_memory.json
    python -m tools.plan_exorl --systems blockwise --trajectories 32 --attention-parts 4

Compiles the training step of configs/exorl_at_32.py and exorl_at_128.py for described
chips: vanilla, memory-efficient and blockwise attention on one of them, rings on all.
Every system recomputes layers in the backward (remat="nothing") and trains one sequence
in bfloat16. The paper does not say on which chips its systems ran out of memory.

A row takes minutes, and is written when it is there; rows of other cases, which the
output has from before, are kept.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from configs import exorl_at_32
from data.json_text import parse_json
from tasks import base, exorl
from tasks.command_line import Parser, as_program, at_least
from tools.lib.benchmarks.rows import Environment, make_row
from tools.lib.files import write_json
from tools.lib.planning.memory import peak_bytes
from tools.lib.planning.progress import progress
from tools.lib.planning.step import Pod, TooLarge, described_pod
from training.chips import GIB
from training.optimizer import make_optimizer

SYSTEMS = ("vanilla", "memory_efficient", "blockwise", "ring", "striped")
TRAJECTORIES = (32, 128)


def plan(
    pod: Pod, system: str, trajectories: int, attention_parts: int | None = None
) -> dict[str, Any]:
    """What the compiler says of a training step.

    attention_parts: shares of the heads attended to at a time; None for the config's.

    Returns:
      Where and when, what was compiled, and `peak_gib` of a device, or `refusal` where
      no program fits.
    """
    config = exorl_at_32.agent(trajectories, "plan").unlock()
    config.attention = system
    if attention_parts is not None:
        config.attention_parts = attention_parts
    is_ring = base.attention_system(config).sharded
    devices = pod.devices if is_ring else pod.devices[:1]
    config.mesh.ring = len(devices)
    partition = base.partition(config, devices)
    model = exorl.model(config, partition)
    optimizer, _ = make_optimizer(base.optimizer_settings(config))
    state = base.abstract_state(model, optimizer, partition)
    loss_sums = exorl.loss_function(config, model, partition)
    count = exorl.count(config)
    step = base.train_step(config, loss_sums, optimizer, state, count)
    batch = exorl.abstract_batch(config, partition)
    environment = Environment.now(devices[0].device_kind, len(devices))
    start, peak, refusal = time.monotonic(), None, None
    try:
        compiled = pod.compile_to_fit(partition.mesh, step, state, batch)
        peak = round(peak_bytes(compiled.memory_analysis()) / GIB, 2)
    except TooLarge as error:
        refusal = str(error)
    return make_row(
        {
            "system": system,
            "trajectories": trajectories,
            "attention_parts": config.attention_parts,
            "tokens": config.data.context_tokens,
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(model.shapes)),
            "capacity_gib": pod.chip.hbm_bytes / GIB,
            "peak_gib": peak,
            "refusal": refusal,
            "compile_seconds": round(time.monotonic() - start, 1),
        },
        environment,
    )


def with_row(
    rows: Sequence[dict[str, Any]], row: dict[str, Any]
) -> list[dict[str, Any]]:
    """The rows in the order of their cases; an earlier row of the same case is gone."""
    return sorted([*(old for old in rows if _case(old) != _case(row)), row], key=_case)


def _case(row: dict[str, Any]) -> tuple[int, int, int]:
    place = SYSTEMS.index(row["system"])
    return place, row["trajectories"], row["attention_parts"]


def earlier_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, none where there is no file yet.

    Raises:
      ValueError: nothing can be written there, or the file has something else.
    """
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is not a directory: make it first")
    if not path.exists():
        return []
    try:
        return sorted(parse_json(path.read_text()), key=_case)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} has no rows: give another --output") from error


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--topology", default="v5e:2x4", help="default: %(default)s")
    add("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS)
    add("--trajectories", nargs="+", type=at_least(1), default=TRAJECTORIES)
    add(
        "--attention-parts",
        type=at_least(1),
        help="shares of the heads attended to at a time (default: as in the config)",
    )
    add("--output", type=Path, help="JSON to write")
    chosen = parser.parse_args(arguments)
    # What is compiled for is described: the devices of this machine do not matter.
    jax.config.update("jax_platforms", "cpu")
    rows = earlier_rows(chosen.output) if chosen.output else []
    pod = described_pod(chosen.topology)
    for system in chosen.systems:
        for trajectories in chosen.trajectories:
            what = f"{system} attention to {trajectories} trajectories"
            with progress(f"compiling {what} for {chosen.topology}", sys.stderr):
                row = plan(pod, system, trajectories, chosen.attention_parts)
            print(json.dumps(row), flush=True)
            rows = with_row(rows, row)
            if chosen.output:
                write_json(chosen.output, rows)


if __name__ == "__main__":
    sys.exit(main())
