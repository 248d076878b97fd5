"""Which attention systems hold the contexts of Ring Attention's table 5, and which not.

    python tools/plan_exorl.py --topology v5e:2x4 --output results/tpu/exorl_memory.json

Compiles the training step of configs/exorl_at_32.py and exorl_at_128.py for described
chips: vanilla, memory-efficient and blockwise attention on one of them, rings on all.
Every system recomputes layers in the backward (remat="nothing") and trains one sequence
in bfloat16. The paper does not say on which chips its systems ran out of memory.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a script, which puts tools/ on the path, not the root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax

import assemble
import assemble_agents
from configs import exorl_at_32
from tools.bench_rows import check_output, write_rows
from tools.plan_memory import peak_bytes
from tools.plan_step import Pod, TooLarge, described_pod
from training.chips import GIB
from training.optimizer import make_optimizer

SYSTEMS = ("vanilla", "memory_efficient", "blockwise", "ring", "striped")
TRAJECTORIES = (32, 128)


def plan(
    pod: Pod, system: str, trajectories: int, attention_parts: int
) -> dict[str, Any]:
    """What the compiler says of a training step.

    attention_parts: as of the config.

    Returns:
      Among others, `peak_gib` of a device, or `refusal` where no program fits.
    """
    config = exorl_at_32.agent(trajectories, "plan").unlock()
    config.attention = system
    config.attention_parts = attention_parts
    is_ring = assemble.attention_system(config).sharded
    devices = pod.devices if is_ring else pod.devices[:1]
    config.mesh.ring = len(devices)
    partition = assemble.partition(config, devices)
    model = assemble_agents.model(config, partition)
    optimizer, _ = make_optimizer(assemble.optimizer_settings(config))
    state = assemble.abstract_state(model, optimizer, partition)
    loss_sums = assemble_agents.loss_function(config, model, partition)
    count = assemble_agents.count(config)
    step = assemble.train_step(config, loss_sums, optimizer, state, count)
    batch = assemble_agents.abstract_batch(config, partition)
    row = {
        "system": system,
        "trajectories": trajectories,
        "attention_parts": attention_parts,
        "tokens": config.data.context_tokens,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(model.shapes)),
        "devices": len(devices),
        "device_kind": devices[0].device_kind,
        "capacity_gib": pod.chip.hbm_bytes / GIB,
    }
    try:
        compiled = pod.compile_to_fit(partition.mesh, step, state, batch)
    except TooLarge as refusal:
        return row | {"peak_gib": None, "refusal": str(refusal)}
    peak = peak_bytes(compiled.memory_analysis())
    return row | {"peak_gib": round(peak / GIB, 2), "refusal": None}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status, 0 or 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--topology", default="v5e:2x4", help="default: %(default)s")
    add("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS)
    add("--trajectories", nargs="+", type=int, default=TRAJECTORIES)
    add(
        "--attention-parts",
        type=int,
        default=1,
        help="shares of the heads attended to at a time (default: %(default)s)",
    )
    add("--output", type=Path, help="JSON to write")
    chosen = parser.parse_args(arguments)
    rows = []
    try:
        if chosen.output:
            check_output(chosen.output)
        pod = described_pod(chosen.topology)
        for system in chosen.systems:
            for trajectories in chosen.trajectories:
                rows.append(plan(pod, system, trajectories, chosen.attention_parts))
                print(json.dumps(rows[-1]), flush=True)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if chosen.output:
        write_rows(chosen.output, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
