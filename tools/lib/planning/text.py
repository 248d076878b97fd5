"""Formats a plan as tables."""

import textwrap
from collections.abc import Callable, Iterable, Sequence

from kernels.chips import Chip
from tools.lib.compiled.hlo import TRANSFER
from tools.lib.compiled.pods import chip_of
from tools.lib.planning.estimate import PARTS, Estimate, bytes_per_second
from tools.lib.planning.meshes import Suggestion
from tools.lib.planning.plan import Kind, Plan
from tools.lib.planning.step import SPARE_SHARE
from training.mesh import MESH_AXES

RING_NAME = f"{TRANSFER} (ring)"

SENT = "{:26s} {:>7s}  {:>10s}  {:>12s}  {:>9s}  {:>10s}  {:>9s}"
"""Format of a row of communication."""

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
    return lines + [
        *_memory_lines(plan),
        *_sent_lines(plan),
        *_estimate_lines(plan),
    ]


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
    named = (n if isinstance(n, str) else f"{n:,}" for n in plan.documents)
    return f" in documents of {', '.join(named)}"


def _sent_lines(plan: Plan) -> list[str]:
    if not plan.collectives:
        return ["", "sent by a device in a step: nothing"]
    head = "times", "bytes each", "bytes in all", "time", "exposed", "waited"
    lines = ["", SENT.format("sent by a device in a step", *head).rstrip()]
    chip = chip_of(plan.topology, plan.device_kind)
    lines += [_sent_line(plan, kind, chip) for kind in plan.collectives]
    lines += [
        f"  {kind.name}: {_why_exposed(plan, kind)}"
        for kind in plan.collectives
        if kind.exposed_bytes
    ]
    if plan.unknown_loops:
        lines.append(f"  {plan.unknown_loops} loops of unknown length counted once")
    return lines


def _sent_line(plan: Plan, kind: Kind, chip: Chip) -> str:
    rate = bytes_per_second(chip, kind.name, plan.ways)
    exposed = "none", ""
    if kind.exposed_bytes:
        exposed = size(kind.exposed_bytes), seconds(kind.exposed_bytes / rate)
    return SENT.format(
        "  " + (RING_NAME if kind.name == TRANSFER else kind.name),
        f"{kind.count:,}",
        size(kind.bytes_sent / kind.count),
        size(kind.bytes_sent),
        seconds(kind.bytes_sent / rate),
        *exposed,
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
    tokens = plan.rows * plan.context_tokens
    each, hours = tokens / plan.devices, 1e9 / tokens * plan.devices / 3600

    def line(name: str, cells: Iterable[tuple[str, str]]) -> str:
        joined = " ".join(f"{cell:>12s} {share:>7s}" for cell, share in cells)
        return f"{name:54s} {joined}".rstrip()

    head = "time of a step, estimated and not measured"
    lines = ["", line(head, ((name, "") for name in columns))]
    names = PARTS | {"step": "step (all of these)"}
    for part, name in names.items():
        if part == "small":
            name += f", {plan.estimate.instructions:,}"
        found = ((getattr(e, part), e.step) for e in columns.values())
        cells = ((seconds(count), f"{count / step:.1%}") for count, step in found)
        lines.append(line(f"  {name}", cells))
    rates: dict[str, Callable[[Estimate], str]] = {
        "MFU": lambda e: f"{e.mfu:.1%}",
        "tokens a second": lambda e: f"{tokens / e.step:,.0f}",
        "tokens a second, of a device": lambda e: f"{each / e.step:,.1f}",
        "device-hours for 1e9 tokens": lambda e: f"{hours * e.step:,.1f}",
    }
    for name, of in rates.items():
        lines.append(line(f"  {name}", ((of(e), "") for e in columns.values())))
    said = textwrap.wrap(f"assuming {plan.estimate.assumption}", WIDTH)
    return [*lines, *said]


def describe_meshes(found: Sequence[Suggestion], chip: Chip) -> list[str]:
    """Returns the lines printed for suggested meshes."""
    row = "{} {:>9s}{:1s}" + " {:>7s}" * 4 + "  {}"
    head = "memory", "", "kernels", "others", "waits", "step", "layout, ring"
    lines = [row.format(" ".join(MESH_AXES), *head)]
    for one in found:
        sizes = [one.mesh.get(axis, 1) for axis in MESH_AXES]
        pairs = zip(MESH_AXES, sizes, strict=True)
        waits = one.ring_waits + one.other_waits
        lines.append(
            row.format(
                " ".join(f"{size:{len(axis)}d}" for axis, size in pairs),
                size(one.memory),
                "" if one.fits else "!",
                *map(seconds, (one.attention, one.products, waits, one.seconds)),
                f"{one.layout}, {one.route}",
            )
        )
    return lines + [
        "rule of thumb, best first, estimated and nothing compiled: "
        "tools.lib.planning.meshes",
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
    for unit, length in (
        ("TiB", 2**40),
        ("GiB", 2**30),
        ("MiB", 2**20),
        ("KiB", 2**10),
    ):
        if abs(count) >= length:
            return f"{count / length:.2f} {unit}"
    return f"{count:.0f} B"
