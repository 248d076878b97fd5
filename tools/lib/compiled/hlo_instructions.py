"""Reads those operations of HLO text that are collectives, kernels, loops and calls."""

import math
import re
from dataclasses import dataclass

from tools.lib.compiled.hlo_text import COLLECTIVES, Array, Operation

TRANSFER = "collective-permute"
"""The collective of a ring step, from neighbour to neighbour."""

SHIFT = "permute"
"""A collective-permute of parameters, or of a part of a scatter that XLA cut."""

_OF_RING = re.compile(r'op_name="(?![^"]*\bparameters\)*/ppermute)')

_KERNEL = re.compile(r"flash_(forward|backward)")
_PALLAS = re.compile(r'custom_call_target="(?:tpu_custom_call|mosaic_gpu|__gpu|triton)')
_CALL_STEPS = ("call-start", "call-update", "call-done")
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\s*\{"n":\s*"(\d+)"')


@dataclass(frozen=True)
class Instruction:
    """A collective, a kernel, or a call of another computation.

    kind: one of COLLECTIVES, SHIFT, "kernel", "loop" or "call".
    phase: "start" or "done" of an asynchronous collective, "fused" of one inside a
      product's fusion, else "".
    first_operand: its name; that of a done is its start.
    size: bytes of a collective's result on one device, else 0.
    group: devices that a collective spans; 0 of a done, whose start has it.
    kernel: "forward" or "backward", of a kernel.
    called: names of the computations that it runs.
    condition: of a loop, the name of the computation that ends it.
    trips: of a loop, its trip count, where the compiler prints it.
    """

    name: str
    kind: str
    phase: str = ""
    first_operand: str = ""
    size: int = 0
    group: int = 0
    kernel: str = ""
    called: tuple[str, ...] = ()
    condition: str = ""
    trips: int | None = None


def read_instruction(operation: Operation, devices: int) -> Instruction | None:
    """Reads an operation, if it matters."""
    name, opcode, rest = operation.name, operation.opcode, operation.rest
    called, first = operation.called, next(iter(operation.operands), "")
    if opcode == "custom-call":
        kernel = _KERNEL.search(f"{name} {rest}")
        if kernel is None or _PALLAS.search(rest) is None:
            return None
        return Instruction(name, "kernel", kernel=kernel[1])
    if opcode == "while":
        trips = _KNOWN_TRIPS.search(rest)
        condition = re.search(r"condition=%?([\w.-]+)", rest)
        return Instruction(
            name,
            "loop",
            called=called,
            condition=condition[1] if condition else "",
            trips=int(trips[1]) if trips else None,
        )
    if opcode in _CALL_STEPS:
        size = _size(operation.results) if opcode == "call-done" else 0
        phase = opcode.removeprefix("call-")
        return Instruction(name, "call", phase, first, size, called=called)
    if opcode in ("fusion", "call", "conditional", "async-start"):
        return Instruction(name, "call", called=called) if called else None
    phase = next((p for p in ("start", "done") if opcode.endswith(f"-{p}")), "")
    kind = opcode.removesuffix(f"-{phase}") if phase else opcode
    if kind not in COLLECTIVES:
        return None
    group = 0 if phase == "done" else _group(kind, rest, devices)
    if kind == TRANSFER and phase != "done" and not _OF_RING.search(rest):
        kind = SHIFT
    size = 0 if phase == "start" else _size(operation.results)
    return Instruction(name, kind, phase, first, size, group)


def _size(results: tuple[Array, ...]) -> int:
    """Returns the bytes of an operation's results."""
    return math.ceil(sum(array.bytes for array in results))


def _group(kind: str, rest: str, devices: int) -> int:
    """Returns the number of devices in each group of a collective."""
    if kind == TRANSFER:
        # A device that sends to itself communicates nothing.
        pairs = re.findall(r"\{(\d+),(\d+)\}", rest.split("source_target_pairs=")[-1])
        return 2 if any(a != b for a, b in pairs) else 1
    named = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", rest)
    if named:  # of these axes of a mesh
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(sizes[a]) for a in re.findall(r"'(\w+)'", named[2]))
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", rest)
    if listed:  # {{0,1},{2,3}}
        return len(listed[1].split(","))
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=", rest)
    return int(iota[2]) if iota else devices  # [groups,devices of one]<=[all]
