"""Estimates the time of a compiled program's own instructions from scheduled HLO.

An instruction lasts as long as its FLOPs at the chip's peak, or as the bytes that it
moves to and from the device's memory at that memory's rate, whichever is longer. Bytes
are those of operands and results with the padding of their tiles, but

- what lies in VMEM, or anywhere else than in the device's memory, counts nothing;
- what a fusion reads of an operand through slices alone counts those slices;
- a slice that is updated in place counts itself, not what it is a slice of;
- an asynchronous copy takes the memory's time that instructions beside it leave.

That is the least: it knows no latency, no arithmetic but products, no partial tiles of
the matrix units. Attention kernels and collectives are timed elsewhere.
"""

import functools
import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from training.chips import Chip
from training.hlo import COLLECTIVES, Program
from training.hlo_text import HEAD, INSTRUCTION, Array, arrays, called_by

FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}
FREE |= {"partition-id", "replica-id", "opt-barrier", "add-dependency", "domain"}
FREE |= {"copy-done", "slice-done", "async-update", "async-done", *COLLECTIVES}
FREE |= {f"{kind}-{phase}" for kind in COLLECTIVES for phase in ("start", "done")}
"""Opcodes that compute and move nothing here."""

SLICES = ("dynamic-slice", "slice", "gather")
IN_PLACE = ("dynamic-update-slice", "scatter")
COPIES = ("copy-start", "slice-start")
PRODUCTS = ("convolution", "dot", "custom-call")

PASSES = {"high": 3, "highest": 6}
"""bfloat16 products for one of float32 on a TPU, by precision; otherwise 1."""

_GEMM = re.compile(r'custom_call_target="__cublas\$(?:lt\$)?matmul|__cublas\$gemm')
_WINDOW = re.compile(r"(\w+)=([\dx_-]+)")


@dataclass(frozen=True)
class Work:
    """Seconds of instructions.

    products: with matrix products; recomputed: of those, the ones that `jax.checkpoint`
      computes again. elementwise: all others.
    elsewhere: kernels and collectives, as they were given.
    memory: seconds of these in which the device's memory is busy.
    """

    products: float = 0.0
    recomputed: float = 0.0
    elementwise: float = 0.0
    elsewhere: float = 0.0
    memory: float = 0.0

    @property
    def seconds(self) -> float:
        return self.products + self.recomputed + self.elementwise + self.elsewhere

    def __add__(self, other: "Work") -> "Work":
        return Work(
            *(getattr(self, f.name) + getattr(other, f.name) for f in fields(self))
        )

    def __mul__(self, times: float) -> "Work":
        return Work(*(times * getattr(self, f.name) for f in fields(self)))


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
        return called_by(self.rest)

    @property
    def elements(self) -> int:
        return sum(array.elements for array in self.results)

    @property
    def op_name(self) -> str:
        """What JAX calls the operation; "" where the compiler made it."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""


class Computation:
    """Operations of a computation in their order, by name; the last is its root."""

    def __init__(self) -> None:
        self.operations: dict[str, Operation] = {}

    @functools.cached_property
    def root(self) -> Operation:
        return next(reversed(self.operations.values()))

    @functools.cached_property
    def users(self) -> dict[str, list[Operation]]:
        """Operations that take a result, by its name."""
        found = defaultdict(list)
        for operation in self.operations.values():
            for operand in dict.fromkeys(operation.operands):
                found[operand].append(operation)
        return found

    @functools.cached_property
    def parameters(self) -> dict[int, Operation]:
        """By number."""
        return {
            int(operation.rest.partition(")")[0]): operation
            for operation in self.operations.values()
            if operation.opcode == "parameter"
        }

    def operands(self, operation: Operation) -> Iterator[Operation]:
        """Yields the operations whose results an operation takes."""
        return (self.operations[n] for n in operation.operands if n in self.operations)


def read(text: str) -> tuple[str, dict[str, Computation]]:
    """Reads `Compiled.as_text()`: the entry's name, and computations by name."""
    found: dict[str, Computation] = {}
    entry, here = "", Computation()
    for line in text.splitlines():
        if head := HEAD.match(line):
            here = found[head[2]] = Computation()
            entry = head[2] if head[1] else entry
        elif match := INSTRUCTION.match(line):
            name, result, opcode, rest = match.groups()
            here.operations[name] = Operation(name, opcode, arrays(result), rest)
    return entry, found


class Roofline:
    """Times of a program's instructions on a chip.

    total: those of the whole program.
    beside: by name of a collective's done, the seconds of what runs between its start
      and that.
    """

    def __init__(
        self, text: str, program: Program, chip: Chip, elsewhere: Mapping[str, float]
    ) -> None:
        """Reads a program.

        program: the same, with its loops. elsewhere: seconds of kernels, and of
          collectives that are not asynchronous, by their names.
        """
        entry, self._computations = read(text)
        self._program, self._chip, self._elsewhere = program, chip, elsewhere
        self._shares: dict[tuple[str, str, bool], float] = {}
        self._runs: dict[str, Work] = {}
        self.beside: dict[str, float] = {}
        self.total = self._run(entry)

    def _run(self, name: str) -> Work:
        """Returns one run of a computation."""
        if name not in self._runs:
            self._runs[name] = self._in_order(name)
        return self._runs[name]

    def _in_order(self, name: str) -> Work:
        computation, total = self._computations[name], Work()
        copies: dict[str, float] = {}  # seconds of the memory that they still need
        started: dict[str, float] = {}
        trips = self._trips(name)
        for operation in computation.operations.values():
            first = next(iter(operation.operands), "")
            if operation.opcode in COPIES:
                copies[operation.name] = self._memory(computation, operation)
                continue
            if operation.opcode.endswith("-start"):
                started[operation.name] = total.seconds
            elif first in started:
                self.beside[operation.name] = total.seconds - started[first]
            if operation.opcode in ("while", "call", "conditional", "async-start"):
                times = trips.get(operation.name, 1)
                runs = (self._run(one) for one in operation.called)
                work = sum(runs, Work()) * times
            else:
                left = copies.pop(first, 0.0)
                work = self._work(computation, operation)
                work += Work(elementwise=left, memory=left)
            idle = work.seconds - work.memory
            for copy, left in copies.items():
                taken = min(idle, left)
                copies[copy], idle = left - taken, idle - taken
                work += Work(memory=taken)
            total += work
        return total

    def _trips(self, name: str) -> dict[str, int]:
        """Returns the trips of a computation's loops; 1 where they are unknown."""
        loops = (i for i in self._program.computations[name] if i.kind == "loop")
        return {loop.name: self._program.trips(loop) or 1 for loop in loops}

    def _work(self, computation: Computation, operation: Operation) -> Work:
        """Returns the work of an operation that calls no computation but a fusion's."""
        known = self._known(operation)
        if known is not None:
            return Work(elsewhere=known)
        if operation.opcode in FREE:
            return Work()
        products = list(self._products(computation, operation))
        if operation.opcode == "custom-call" and not products:
            return Work()  # buffers, hints for the compiler
        memory = self._memory(computation, operation)
        seconds = max(memory, sum(s for _, s in products))
        if not products:
            return Work(elementwise=seconds, memory=memory)
        op_name = max(products, key=lambda product: product[1])[0] or operation.op_name
        if "rematted_computation" in op_name:
            return Work(recomputed=seconds, memory=memory)
        return Work(products=seconds, memory=memory)

    def _known(self, operation: Operation) -> float | None:
        """Returns the seconds of a kernel or collective, or of a fusion with one."""
        if operation.name in self._elsewhere:
            return self._elsewhere[operation.name]
        if operation.opcode != "fusion":
            return None
        inside = [
            self._elsewhere[name]
            for called in operation.called
            for name in self._computations[called].operations
            if name in self._elsewhere
        ]
        return sum(inside) if inside else None

    def _products(
        self, computation: Computation, operation: Operation
    ) -> Iterator[tuple[str, float]]:
        """Yields name and seconds of an operation's matrix products."""
        if operation.opcode == "fusion":
            for called in operation.called:
                inner = self._computations[called]
                for one in inner.operations.values():
                    yield from self._products(inner, one)
        elif flops := product_flops(computation, operation):
            yield operation.op_name, flops / self._chip.peak_flops

    def _memory(self, computation: Computation, operation: Operation) -> float:
        """Returns the seconds in which an operation keeps the device's memory busy."""
        return sum(self._bytes(computation, operation)) / (
            self._chip.hbm_bytes_per_second
        )

    def _bytes(self, computation: Computation, operation: Operation) -> Iterator[float]:
        """Yields what an operation reads and writes."""
        operands = list(computation.operands(operation))
        if operation.opcode == "fusion":
            inner = self._computations[operation.called[0]]
            if any(_collects(one) for one in inner.operations.values()):
                return  # moved by the collective
            for number, operand in enumerate(operands):
                parameter = inner.parameters[number]
                share = self._read_share(inner, parameter)
                yield share * sum(map(_stored, operand.results))
            roots = [inner.root]
            if inner.root.opcode == "tuple":
                roots = list(inner.operands(inner.root))
            for array, root in zip(operation.results, roots, strict=True):
                yield self._written_share(inner, root) * _stored(array)
        elif operation.opcode in COPIES:
            ends = sorted(operation.results, key=lambda array: -array.bytes)[:2]
            moved = min(array.stored_bytes for array in ends)
            yield moved * sum(array.space == 0 for array in ends)
        elif operation.opcode in SLICES:
            (result,) = operation.results
            yield result.stored_bytes * (operands[0].results[0].space == 0)
            yield _stored(result)
        elif operation.opcode in IN_PLACE:
            share = self._written_share(computation, operation)
            yield 2 * share * sum(map(_stored, operation.results))
        else:
            for one in (operation, *operands):
                yield sum(map(_stored, one.results))

    def _read_share(
        self, computation: Computation, operation: Operation, is_updated: bool = False
    ) -> float:
        """Returns the share of an operation's result that its computation reads.

        is_updated: whether it has been updated in place: then writing it as a result
          reads nothing.
        """
        key = operation.name, computation.root.name, is_updated
        if key not in self._shares:
            share = 0.0 if is_updated else float(operation is computation.root)
            for user in computation.users[operation.name]:
                share += self._share_of(computation, operation, user, is_updated)
            self._shares[key] = min(1.0, share)
        return self._shares[key]

    def _share_of(
        self,
        computation: Computation,
        operation: Operation,
        user: Operation,
        is_updated: bool,
    ) -> float:
        """Returns the share that one user reads."""
        is_first = user.operands[0] == operation.name
        if user.opcode in SLICES and is_first:
            return user.elements / operation.elements
        if user.opcode in IN_PLACE and is_first:
            return self._read_share(computation, user, is_updated=True)
        if user.opcode == "tuple":
            return float(not is_updated)
        share = 1.0
        if user.opcode == "fusion":
            inner = self._computations[user.called[0]]
            share = min(
                1.0,
                sum(
                    self._read_share(inner, inner.parameters[number], is_updated)
                    for number, name in enumerate(user.operands)
                    if name == operation.name
                ),
            )
        if user.elements == operation.elements and user.opcode not in PRODUCTS:
            is_updated &= user.opcode == "bitcast"
            return share * self._read_share(computation, user, is_updated)
        return share

    def _written_share(self, computation: Computation, operation: Operation) -> float:
        """Returns the share of an operation's result that is written."""
        if operation.opcode == "bitcast":
            return self._written_share(computation, *computation.operands(operation))
        if operation.opcode == "fusion":
            inner = self._computations[operation.called[0]]
            return self._written_share(inner, inner.root)
        if operation.opcode not in IN_PLACE:
            return 1.0
        place = 1 if operation.opcode == "dynamic-update-slice" else -1
        update = computation.operations[operation.operands[place]]
        return update.elements / max(operation.elements, 1)


def _stored(array: Array) -> float:
    """Returns the bytes of an array in the device's memory."""
    return array.stored_bytes if array.space == 0 else 0.0


def _collects(operation: Operation) -> bool:
    return operation.opcode in COLLECTIVES or "AsyncCollective" in operation.rest


def product_flops(computation: Computation, operation: Operation) -> float:
    """Returns the FLOPs of a matrix product at the rate of bfloat16; 0 of others."""
    is_product = operation.opcode in ("convolution", "dot")
    if not (is_product or _GEMM.search(operation.rest)):
        return 0.0
    left, right, *_ = computation.operands(operation)
    if operation.opcode == "convolution":
        depth = _convolved(operation, left.results[0], right.results[0])
    elif operation.opcode == "dot":
        axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", operation.rest)
        depth = _contracted(left.results[0], axes[1].split(","))
    else:
        config = json.loads(operation.rest.split("backend_config=")[-1])
        numbers = config["gemm_backend_config"]["dot_dimension_numbers"]
        depth = _contracted(left.results[0], numbers["lhs_contracting_dimensions"])
    is_float32 = any(one.results[0].dtype == "f32" for one in (left, right))
    precisions = re.findall(r"high(?:est)?", operation.rest.partition("metadata=")[0])
    passes = max([PASSES[p] for p in precisions] if is_float32 else [], default=1)
    return 2.0 * operation.results[0].elements * depth * passes


def _contracted(left: Array, axes: list[str]) -> int:
    return math.prod(left.sizes[int(axis)] for axis in axes if axis)


def _convolved(operation: Operation, left: Array, right: Array) -> float:
    """Returns the products that are summed for a result of a convolution, on average.

    A window counts where it lies on the operand and not on its padding: TPUs print
    products with several axes of columns, or of batches, as such windows.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", operation.rest)
    window = re.search(r"window=\{([^}]*)\}", operation.rest)
    given = dict(_WINDOW.findall(window[1])) if window else {}
    depth = float(right.sizes[labels[2].index("i")])
    for axis in range(len(labels[1]) - 2):
        size, result = (
            array.sizes[label.index(str(axis))]
            for array, label in (
                (left, labels[1]),
                (operation.results[0], labels[3]),
            )
        )

        def of(field: str, default: str, axis: int = axis) -> int:
            return int(given.get(field, "x".join([default] * 9)).split("x")[axis])

        low = given.get("pad", "x".join(["0_0"] * 9)).split("x")[axis].split("_")[0]
        depth *= (
            _on_operand(
                size,
                result,
                (of("size", "1"), of("stride", "1"), int(low)),
                (of("lhs_dilate", "1"), of("rhs_dilate", "1")),
            )
            / result
        )
    return depth


@functools.cache
def _on_operand(
    size: int, results: int, window: tuple[int, int, int], dilation: tuple[int, int]
) -> int:
    """Counts the pairs of a result and a place of its window that is on the operand."""
    count = 0
    for place, result in itertools.product(range(window[0]), range(results)):
        at = result * window[1] + place * dilation[1] - window[2]
        count += at % dilation[0] == 0 and 0 <= at // dilation[0] < size
    return count
