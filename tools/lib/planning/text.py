"""Formats a plan as tables."""

import textwrap
from collections.abc import Callable, Iterable, Sequence

import ml_collections

from kernels.devices.chips import Chip
from tasks.memory_choice import SPARE_SHARE
from tasks.systems import AUTO
from tools.lib.compiled.hlo import TRANSFER
from tools.lib.compiled.pods import chip_of
from tools.lib.planning.estimate import PARTS, Estimate, bytes_per_second
from tools.lib.planning.meshes import Suggestion
from tools.lib.planning.plan import Kind, Plan
from training.sharding.mesh import MESH_AXES

RING_NAME = f"{TRANSFER} (ring)"

SENT = "{:26s} {:>7s}  {:>10s}  {:>12s}  {:>9s}  {:>10s}  {:>9s}"
"""Format of a row of communication."""

SENT_HEAD = (
    "sent by a device in a step   times  bytes each  bytes in all       time  "
    "   exposed     waited"
)

MESH = (
    "{mesh} {memory:>9s}{mark:1s} {kernels:>7s} {others:>7s} {waits:>7s} {step:>7s}  "
    "{ring}"
)
"""Format of a row of a suggested mesh."""

MESH_HEAD = f"{' '.join(MESH_AXES)}    memory  kernels  others   waits    step  "
MESH_HEAD += "layout, ring"

WIDTH = 100
"""Columns of what is printed."""


def describe(plan: Plan) -> list[str]:
    """Returns the lines printed for a plan."""
    mesh = " x ".join(f"{axis} {length}" for axis, length in plan.mesh.items())
    lines = [
        f"{plan.devices} x {plan.device_kind} ({plan.topology}): {mesh}",
        f"step: {plan.rows} x {plan.context_tokens:,} tokens{_documents(plan)}, "
        f"remat {plan.remat}, attention {plan.implementation}",
        f"model FLOPs {plan.work.model_flops:.3e} ({plan.work.paper_flops:.3e} as Ring "
        "Attention counts them)",
        plan.execution,
        f"compiled in {plan.compile_seconds:.0f} s, with {size(plan.planner_bytes)} of "
        "this machine's memory",
    ]
    return lines + _memory_lines(plan) + _sent_lines(plan) + _estimate_lines(plan)


def _memory_lines(plan: Plan) -> list[str]:
    memory = plan.memory
    rows = {
        "parameters": memory.parameters,
        "optimizer state": memory.optimizer_state,
        "saved by layers (formula of what remat keeps)": memory.saved,
        "workspace (the rest)": memory.workspace,
        "peak (all of these)": memory.peak,
        "of the device": memory.capacity,
    }
    lines = ["", "memory of the fullest device"]
    lines += [f"  {name:50s} {size(count):>12s}" for name, count in rows.items()]
    note = "" if memory.spare_share >= SPARE_SHARE else f", below {SPARE_SHARE:.0%}"
    lines.append(f"  {'spare':50s} {memory.spare_share:12.1%}{note}")
    if memory.host:
        host = size(memory.host)
        lines.append(f"  {'memory of the host, for each device':50s} {host:>12s}")
    return lines


def _documents(plan: Plan) -> str:
    if not plan.documents:
        return ""
    names = [n if isinstance(n, str) else f"{n:,}" for n in plan.documents]
    return f" in documents of {', '.join(names)}"


def _sent_lines(plan: Plan) -> list[str]:
    if not plan.collectives:
        return ["", "sent by a device in a step: nothing"]
    lines = ["", SENT_HEAD]
    chip = chip_of(plan.topology, plan.device_kind)
    for kind in plan.collectives:
        lines.append(_sent_line(plan, kind, chip))
    for kind in plan.collectives:
        if kind.exposed_bytes:
            lines.append(f"  {kind.name}: {_why_exposed(plan, kind)}")
    if plan.unknown_loops:
        lines.append(f"  {plan.unknown_loops} loops of unknown length counted once")
    return lines


def _sent_line(plan: Plan, kind: Kind, chip: Chip) -> str:
    rate = bytes_per_second(chip, kind.name, plan.ways)
    exposed = "none"
    waited = ""
    if kind.exposed_bytes:
        exposed = size(kind.exposed_bytes)
        waited = seconds(kind.exposed_bytes / rate)
    return SENT.format(
        "  " + (RING_NAME if kind.name == TRANSFER else kind.name),
        f"{kind.count:,}",
        size(kind.bytes_sent / kind.count),
        size(kind.bytes_sent),
        seconds(kind.bytes_sent / rate),
        exposed,
        waited,
    ).rstrip()


def _why_exposed(plan: Plan, kind: Kind) -> str:
    if not plan.kernels:
        return f"{plan.implementation} attention has no kernel that could hide it"
    alone = kind.synchronous_bytes
    if not alone and kind.name == TRANSFER:
        return "not beside all kernels of its ring step"
    if not alone:
        return "nothing that takes long enough runs beside it"
    if alone == kind.exposed_bytes:
        return "not asynchronous: nothing runs beside it"
    return f"{size(alone)} not asynchronous, the rest outlasts what runs beside it"


def _estimate_lines(plan: Plan) -> list[str]:
    columns = {"at least": plan.estimate}
    if plan.at_cycles != plan.estimate:  # as it is where XLA counts no cycles
        columns["XLA's cycles"] = plan.at_cycles
    if plan.with_stalls:
        columns["and stalls"] = plan.with_stalls
    tokens = plan.rows * plan.context_tokens
    of_device = tokens / plan.devices
    hours = 1e9 / tokens * plan.devices / 3600

    def line(name: str, cells: Iterable[tuple[str, str]]) -> str:
        joined = " ".join(f"{cell:>12s} {share:>7s}" for cell, share in cells)
        return f"{name:54s} {joined}".rstrip()

    head = "time of a step, estimated and not measured"
    lines = ["", line(head, ((name, "") for name in columns))]
    names = PARTS | {"step": "step (all of these)"}
    for part, name in names.items():
        if part == "small":
            name += f", {plan.estimate.instructions:,}"
        cells = []
        for estimate in columns.values():
            spent = getattr(estimate, part)
            cells.append((seconds(spent), f"{spent / estimate.step:.1%}"))
        lines.append(line(f"  {name}", cells))
    rates: dict[str, Callable[[Estimate], str]] = {
        "MFU": lambda e: f"{e.mfu:.1%}",
        "tokens a second": lambda e: f"{tokens / e.step:,.0f}",
        "tokens a second, of a device": lambda e: f"{of_device / e.step:,.1f}",
        "device-hours for 1e9 tokens": lambda e: f"{hours * e.step:,.1f}",
    }
    for name, rate in rates.items():
        lines.append(line(f"  {name}", ((rate(e), "") for e in columns.values())))
    last = plan.with_stalls or plan.estimate
    return lines + textwrap.wrap(f"assuming {last.assumption}", WIDTH)


def answer(
    meshes: Sequence[Suggestion], chip: Chip, config: ml_collections.ConfigDict
) -> str:
    """Returns whether a mesh fits, how fast it is, and the flags that choose it."""
    best = meshes[0]
    if not best.fits:
        best = min(meshes, key=lambda mesh: mesh.memory)
    changed = []
    for axis, given in config.mesh.items():
        if best.mesh.get(axis, 1) != given:
            changed.append(axis)
    flags = " ".join(f"--config.mesh.{x}={best.mesh.get(x, 1)}" for x in changed)
    if all(config.mesh[axis] == -1 for axis in changed):  # which is what remains
        flags = "the config's own mesh"
    memory = f"{best.memory / 2**30:.3g} of {chip.hbm_bytes / 2**30:.3g} GiB"
    if not best.fits:
        return (
            f"does not fit: at least {memory}, with {flags}; try "
            "--config.remat=nothing or offload, more --config.attention_parts, more "
            "devices or a shorter --context"
        )
    if config.remat == AUTO:
        flags += f", where remat=auto is {best.remat}"
    tokens = config.data.batch_rows * config.data.context_tokens / best.seconds
    return (
        f"fits: {memory}; at least {seconds(best.seconds)} a step, at most "
        f"{tokens:,.0f} tokens/s; run with {flags}"
    )


def describe_meshes(meshes: Sequence[Suggestion], chip: Chip) -> list[str]:
    """Returns the lines printed for suggested meshes."""
    lines = [MESH_HEAD]
    for suggested in meshes:
        sizes = [f"{suggested.mesh.get(axis, 1):{len(axis)}d}" for axis in MESH_AXES]
        line = MESH.format(
            mesh=" ".join(sizes),
            memory=size(suggested.memory),
            mark="" if suggested.fits else "!",
            kernels=seconds(suggested.attention),
            others=seconds(suggested.products),
            waits=seconds(suggested.ring_waits + suggested.other_waits),
            step=seconds(suggested.seconds),
            ring=f"{suggested.layout}, {suggested.route}",
        )
        lines.append(line)
    return lines + [
        "best first, by a rule of thumb: estimated, and nothing compiled",
        f"memory: of a device; ! beyond {size(chip.hbm_bytes)} less {SPARE_SHARE:.0%}",
        "kernels: of attention; others: other products; waits: rings and collectives",
        "step: all of these, at least",
    ]


def seconds(count: float) -> str:
    """Formats a time with a unit that suits it."""
    if count >= 10:
        return f"{count:,.1f} s"
    for unit, length in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if count >= length:
            return f"{count / length:.3g} {unit}"
    return f"{1e9 * count:.3g} ns" if count else "0 s"


def size(count: float) -> str:
    """Formats bytes with a unit that suits them."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if abs(count) >= 2**power:
            return f"{count / 2**power:.2f} {unit}"
    return f"{count:.0f} B"
