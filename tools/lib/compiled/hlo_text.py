"""Reads the lines of HLO text: computations, operations, and the arrays they make.

Of the operations that are collectives, kernels, loops and calls, what they do.
"""

import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
"""First line of a computation: whether it is the entry, its name."""

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\((.*)$")
"""Name, result, opcode; operands and attributes."""

_CALLED = re.compile(r"(?:calls|to_apply|body)=%?([\w.-]+)")

_ARRAY = re.compile(r"\b([a-z]+\d*)\w*\[([\d,]*)\](?:\{([\d,]*):?([^}]*)\})?")
_BRANCHES = re.compile(
    r"branch_computations=\{([^}]*)\}|(?:true|false)_computation=%([\w.-]+)"
)

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
)

FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}
FREE |= {"partition-id", "replica-id", "opt-barrier", "add-dependency", "domain"}
FREE |= {"call-update", "async-update"}
"""Opcodes that compute and move nothing."""

CALLS = {"while", "call", "conditional", "custom-call"}

UNKNOWN_CYCLES = 2**62
SMALL_CYCLES, SMALL_ELEMENTS = 5000, 4096
"""XLA gives those instructions that move a few bytes about 2,200 cycles."""

TRANSFER = "collective-permute"
"""The collective of a ring step, from neighbour to neighbour."""
SHIFT = "permute"
"""A collective-permute of parameters, or of a part of a scatter that XLA cut."""
_OF_RING = re.compile(r'op_name="(?![^"]*\bparameters\)*/ppermute)')
_KERNEL = re.compile(r"(flash|delta)_(forward|backward)")
DELTA = "delta"
"""Name of the kernels of Gated DeltaNet, forward and backward."""
_PALLAS = re.compile(r'custom_call_target="(?:tpu_custom_call|mosaic_gpu|__gpu|triton)')
_CALL_STEPS = ("call-start", "call-update", "call-done")
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\s*\{"n":\s*"(\d+)"')


@dataclass(frozen=True)
class Array:
    """An array that an instruction makes.

    order: dimensions from the innermost to the outermost; () where nothing is printed.
    tile: sizes of the innermost dimensions are stored in multiples of these.
    space: 0 is the memory of the device; TPUs: 1 VMEM, 2 semaphores, 5 host, 6 SMEM.
    """

    dtype: str
    sizes: tuple[int, ...]
    order: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()
    space: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def bits(self) -> int:
        """Bits of an element; 0 of tokens and the like."""
        return 8 if self.dtype == "pred" else int(re.sub(r"\D", "", self.dtype) or 0)

    @property
    def bytes(self) -> float:
        """Bytes without padding."""
        return self.elements * self.bits / 8

    @property
    def stored_bytes(self) -> float:
        """Bytes with the padding of its tiles."""
        elements = self.elements
        for axis, whole in zip(self.order, reversed(self.tile), strict=False):
            size = self.sizes[axis]
            elements = elements // max(size, 1) * -(-size // whole) * whole
        return elements * self.bits / 8


@functools.lru_cache(maxsize=4096)
def arrays(result: str) -> tuple[Array, ...]:
    """Reads the arrays of an instruction's result, those of a tuple in their order."""
    read = []
    for dtype, sizes, order, layout in _ARRAY.findall(result):
        tile = re.match(r"T\(([\d,]+)\)", layout)
        space = re.search(r"S\((\d+)\)", layout)
        array = Array(
            dtype,
            _numbers(sizes),
            _numbers(order),
            _numbers(tile[1]) if tile else (),
            int(space[1]) if space else 0,
        )
        read.append(array)
    return tuple(read)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, filter(None, text.split(","))))


@dataclass(frozen=True)
class Operation:
    """An instruction of a program; `rest` holds its operands and attributes."""

    name: str
    opcode: str
    results: tuple[Array, ...]
    rest: str

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(re.findall(r"%([\w.-]+)", self.rest.partition(")")[0]))

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it runs."""
        branches = " ".join(map("".join, _BRANCHES.findall(self.rest)))
        return (*_CALLED.findall(self.rest), *re.findall(r"[\w.-]+", branches))

    @property
    def elements(self) -> int:
        return sum(array.elements for array in self.results)

    @functools.cached_property
    def cycles(self) -> int | None:
        """What XLA takes it to last, in cycles of a core; None where it is not said.

        Of what a SparseCore runs XLA says the largest integer that there is.
        """
        cycles = re.search(r'"estimated_cycles":"(\d+)"', self.rest)
        return int(cycles[1]) if cycles and int(cycles[1]) < UNKNOWN_CYCLES else None

    @property
    def is_small(self) -> bool:
        """Whether a core runs it, and XLA takes it to last less than SMALL_CYCLES.

        Or, where XLA does not say, whether it makes few numbers.
        """
        if self.is_free or self.opcode in CALLS or self.opcode in COLLECTIVES:
            return False
        if self.cycles is None:
            return self.elements <= SMALL_ELEMENTS
        return self.cycles < SMALL_CYCLES

    @property
    def is_free(self) -> bool:
        """Whether it computes and moves nothing, or starts or ends what does."""
        return self.opcode in FREE or self.opcode.endswith(("-start", "-done"))

    @property
    def op_name(self) -> str:
        """What JAX calls the operation; "" where the compiler made it."""
        name = re.search(r'op_name="([^"]*)"', self.rest)
        return name[1] if name else ""


class Computation:
    """Operations of a computation in their order, by name; a fusion's root is last."""

    def __init__(self) -> None:
        self.operations: dict[str, Operation] = {}

    @functools.cached_property
    def root(self) -> Operation:
        return next(reversed(self.operations.values()))

    @functools.cached_property
    def users(self) -> dict[str, list[Operation]]:
        """Operations that take a result, by its name."""
        users = defaultdict(list)
        for operation in self.operations.values():
            for operand in dict.fromkeys(operation.operands):
                users[operand].append(operation)
        return users

    @functools.cached_property
    def parameters(self) -> dict[int, Operation]:
        """By number."""
        parameters = {}
        for operation in self.operations.values():
            if operation.opcode == "parameter":
                parameters[int(operation.rest.partition(")")[0])] = operation
        return parameters

    def operands(self, operation: Operation) -> Iterator[Operation]:
        """Yields the operations whose results an operation takes."""
        return (self.operations[n] for n in operation.operands if n in self.operations)


def read(text: str) -> tuple[str, dict[str, Computation]]:
    """Reads `Compiled.as_text()`: the entry's name, and computations by name."""
    computations: dict[str, Computation] = {}
    entry = ""
    here = Computation()
    for line in text.splitlines():
        if head := _HEAD.match(line):
            here = computations[head[2]] = Computation()
            entry = head[2] if head[1] else entry
        elif match := _INSTRUCTION.match(line):
            name, result, opcode, rest = match.groups()
            here.operations[name] = Operation(name, opcode, arrays(result), rest)
    return entry, computations


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
    called = operation.called
    first = next(iter(operation.operands), "")
    if opcode == "custom-call":
        kernel = _KERNEL.search(f"{name} {rest}")
        if kernel is None or _PALLAS.search(rest) is None:
            return None
        of, direction = kernel.groups()
        return Instruction(name, "kernel", kernel=of if of == DELTA else direction)
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
    kind = opcode.removesuffix("-start").removesuffix("-done")
    phase = opcode[len(kind) + 1 :]
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
        return 2 if any(source != target for source, target in pairs) else 1
    named = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", rest)
    if named:  # of these axes of a mesh
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        axes = re.findall(r"'(\w+)'", named[2])
        return math.prod(int(sizes[axis]) for axis in axes)
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", rest)
    if listed:  # {{0,1},{2,3}}
        return len(listed[1].split(","))
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=", rest)
    return int(iota[2]) if iota else devices  # [groups,devices of one]<=[all]
