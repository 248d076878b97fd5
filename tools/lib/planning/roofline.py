"""Estimates the time of a compiled program's own instructions from scheduled HLO.

An instruction lasts as long as its FLOPs at the chip's peak, or as the bytes that it
moves to and from the device's memory at that memory's rate, whichever is longer. Bytes
are those of operands and results with the padding of their tiles, but

- what lies in VMEM, or anywhere else than in the device's memory, counts nothing;
- what a fusion reads of an operand through slices alone counts those slices;
- a slice that is updated in place counts itself, not what it is a slice of;
- an asynchronous copy takes the memory's time that instructions beside it leave.

That is the least: it knows no latency, no arithmetic but products, no partial tiles of
the matrix units; but see `grouped_flops`. Or an instruction lasts as long as XLA takes
it to, where XLA says so (TPUs). Attention kernels and collectives are timed elsewhere.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

from kernels.devices.chips import Chip
from tools.lib.compiled.hlo import Program
from tools.lib.compiled.hlo_text import COLLECTIVES, Array, Computation, Operation

SLICES = ("dynamic-slice", "slice", "gather")
IN_PLACE = ("dynamic-update-slice", "scatter")
COPIES = ("copy-start", "slice-start", "fusion-start")


PRODUCTS = ("convolution", "dot", "custom-call")
"""Opcodes that can be matrix products."""

PASSES = {"high": 3, "highest": 6}
"""bfloat16 products for one of float32 on a TPU, by precision; otherwise 1, which is
less than a GPU takes."""

_GEMM = re.compile(r'custom_call_target="__cublas\$(?:lt\$)?matmul|__cublas\$gemm')

_KERNEL = re.compile(r'custom_call_target="(?:tpu_custom_call|triton_kernel_call)')
"""Kernels. Grouped products, of XLA, JAX and tokamax, are recognised by their arrays:
where a program has several of JAX's, XLA names them after their caller."""

GROUPED = {2: 1.1, 3: 1.4}
"""Cycles of a grouped product over those at the peak, by axes of its result: rows, or a
gradient of weights. Counted in bundles of v5p, v6e and TPU7x (0.8 to 1.3, 1.2 to 1.5);
of GPUs taken to be the same."""

_BATCH = re.compile(r'lhs_batch_dim(?:s=\{|ensions":\[)([\d,"]*)')

_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")


@dataclass(frozen=True)
class Work:
    """Seconds of instructions.

    products: with matrix products; recomputed: of those, the ones that `jax.checkpoint`
      computes again. elementwise: all others, but for small ones (`is_small`).
    instructions: how many of those there are.
    elsewhere: kernels and collectives, as they were given.
    memory: seconds of these in which the device's memory is busy.
    """

    products: float = 0.0
    recomputed: float = 0.0
    elementwise: float = 0.0
    small: float = 0.0
    elsewhere: float = 0.0
    memory: float = 0.0
    instructions: float = 0.0

    @property
    def seconds(self) -> float:
        computed = self.products + self.recomputed + self.elementwise
        return computed + self.small + self.elsewhere

    def __add__(self, other: "Work") -> "Work":
        names = [field.name for field in fields(self)]
        return Work(**{n: getattr(self, n) + getattr(other, n) for n in names})

    def __mul__(self, times: float) -> "Work":
        names = [field.name for field in fields(self)]
        return Work(**{name: times * getattr(self, name) for name in names})


class Roofline:
    """Times of a program's instructions on a chip.

    total: those of the whole program.
    beside: by name of a collective's done, the seconds of what runs between its start
      and that, and after the transfers of `links` that are done before it.
    """

    def __init__(
        self,
        program: Program,
        chip: Chip,
        elsewhere: Mapping[str, float],
        cycles_per_second: float = math.inf,
        links: Mapping[str, float] | None = None,
    ) -> None:
        """Reads a program.

        elsewhere: seconds of kernels, and of collectives that are not asynchronous, by
          their names. cycles_per_second: of a core, to count those that XLA says.
        links: seconds of transfers that go one after another, by their dones' names.
        """
        self.cycles_per_second = cycles_per_second
        self._computations = program.text
        self._program = program
        self._chip = chip
        self._elsewhere = elsewhere
        self._links = links or {}
        self._shares: dict[tuple[str, str, bool], float] = {}
        self._runs: dict[str, Work] = {}
        self.beside: dict[str, float] = {}
        self.total = self._run(program.entry)

    def _run(self, name: str) -> Work:
        """Returns one run of a computation."""
        if name not in self._runs:
            self._runs[name] = self._in_order(name)
        return self._runs[name]

    def _in_order(self, name: str) -> Work:
        computation = self._computations[name]
        total = Work()
        free = 0.0  # when the links have ended the transfers so far
        copies: dict[str, float] = {}  # seconds of the memory that they still need
        started: dict[str, float] = {}
        calls = self._program.computations[name]
        trips = {call.name: self._program.times(call) for call in calls}
        for operation in computation.operations.values():
            first = next(iter(operation.operands), "")
            if operation.opcode in COPIES:
                copies[operation.name] = self._memory(computation, operation)
                continue
            if operation.opcode.endswith("-start") or operation.opcode == "call-update":
                started[operation.name] = total.seconds
            elif first in started:
                now = total.seconds
                begin = started[first]
                if seconds := self._links.get(operation.name):
                    begin = max(begin, free)
                    free = min(now, begin + seconds)  # `total` has no waits
                self.beside[operation.name] = now - begin
            if operation.opcode in ("while", "call", "conditional", "async-start"):
                times = trips.get(operation.name, 1)
                runs = list(map(self._run, operation.called))
                if operation.opcode == "conditional":
                    runs = [max(runs, key=lambda run: (run.seconds, run.instructions))]
                work = sum(runs, Work()) * times
            else:
                left = copies.pop(first, 0.0)
                work = self._work(computation, operation)
                work += Work(elementwise=left, memory=left)
            idle = work.seconds - work.memory
            for copy, left in copies.items():
                taken = min(idle, left)
                copies[copy] = left - taken
                idle -= taken
                work += Work(memory=taken)
            total += work
        return total

    def _work(self, computation: Computation, operation: Operation) -> Work:
        """Returns the work of an operation that calls no computation but a fusion's."""
        known = self._known(operation)
        if known is not None:
            return Work(elsewhere=known)
        if operation.is_free or operation.opcode in COLLECTIVES:
            return Work()
        products = list(self._products(computation, operation))
        if operation.opcode == "custom-call" and not products:
            return Work()  # buffers, hints for the compiler
        memory = self._memory(computation, operation)
        seconds = max(memory, sum(s for _, s in products))
        seconds = max(seconds, (operation.cycles or 0) / self.cycles_per_second)
        if not products and operation.is_small:
            return Work(small=seconds, memory=memory, instructions=1)
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
        inside = []
        for called in operation.called:
            names = self._computations[called].operations
            inside += [
                self._elsewhere[name] for name in names if name in self._elsewhere
            ]
        return sum(inside) if inside else None

    def _products(
        self, computation: Computation, operation: Operation
    ) -> Iterator[tuple[str, float]]:
        """Yields name and seconds of an operation's matrix products."""
        if operation.opcode == "fusion":
            for called in operation.called:
                inner = self._computations[called]
                for fused in inner.operations.values():
                    yield from self._products(inner, fused)
        elif flops := product_flops(computation, operation):
            yield operation.op_name, flops / self._chip.peak_flops
        elif flops := grouped_flops(computation, operation):
            yield operation.op_name, flops / self._chip.peak_flops

    def _memory(self, computation: Computation, operation: Operation) -> float:
        """Returns the seconds in which an operation keeps the device's memory busy."""
        moved = sum(self._bytes(computation, operation))
        return moved / self._chip.hbm_bytes_per_second

    def _bytes(self, computation: Computation, operation: Operation) -> Iterator[float]:
        """Yields what an operation reads and writes."""
        operands = list(computation.operands(operation))
        if operation.opcode in COPIES:
            operation = _synchronous(operation, operands)
        if operation.opcode == "fusion":
            inner = self._computations[operation.called[0]]
            if any(map(_collects, inner.operations.values())):
                return  # moved by the collective
            for number, operand in enumerate(operands):
                parameter = inner.parameters[number]
                share = self._read_share(inner, parameter)
                yield share * sum(map(_stored, operand.results))
            roots = [inner.root]
            if inner.root.opcode == "tuple":
                roots = list(inner.operands(inner.root))
            written = []
            for root in roots:  # a reduction may have several results
                written += [self._written_share(inner, root)] * len(root.results)
            for array, share in zip(operation.results, written, strict=True):
                yield share * _stored(array)
        elif operation.opcode in SLICES:
            (result,) = operation.results
            yield result.stored_bytes * (operands[0].results[0].space == 0)
            yield _stored(result)
        elif operation.opcode in IN_PLACE:
            share = self._written_share(computation, operation)
            yield 2 * share * sum(map(_stored, operation.results))
        else:
            for moved in (operation, *operands):
                yield sum(map(_stored, moved.results))

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
            shares = [
                self._read_share(inner, inner.parameters[number], is_updated)
                for number, name in enumerate(user.operands)
                if name == operation.name
            ]
            share = min(1.0, sum(shares))
        if user.elements == operation.elements and user.opcode not in PRODUCTS:
            is_updated &= user.opcode == "bitcast"
            return share * self._read_share(computation, user, is_updated)
        return share

    def _written_share(self, computation: Computation, operation: Operation) -> float:
        """Returns the share of an operation's result that is written."""
        if operation.opcode == "bitcast":
            (operand,) = computation.operands(operation)
            return self._written_share(computation, operand)
        if operation.opcode == "fusion":
            inner = self._computations[operation.called[0]]
            return self._written_share(inner, inner.root)
        if operation.opcode not in IN_PLACE:
            return 1.0
        number = 1 if operation.opcode == "dynamic-update-slice" else -1
        update = computation.operations[operation.operands[number]]
        return update.elements / max(operation.elements, 1)


def _stored(array: Array) -> float:
    """Returns the bytes of an array in the device's memory."""
    return array.stored_bytes if array.space == 0 else 0.0


def _synchronous(start: Operation, operands: list[Operation]) -> Operation:
    """Returns the operation that is started: its result stands among other things."""
    opcode = start.opcode.removesuffix("-start")
    given = sum(len(operand.results) for operand in operands)
    results = start.results[:1] if opcode == "copy" else start.results[given:-1]
    return replace(start, opcode=opcode, results=results)


def _collects(operation: Operation) -> bool:
    return operation.opcode in COLLECTIVES or "AsyncCollective" in operation.rest


def product_flops(computation: Computation, operation: Operation) -> float:
    """Returns the FLOPs of a matrix product at the rate of bfloat16; 0 of others.

    Of b products of (m, k) and (k, n) the arrays have b m k, b k n and b m n elements:
    b m n k is the root of the three together, and b.
    """
    is_product = operation.opcode in ("convolution", "dot")
    if not (is_product or _GEMM.search(operation.rest)):
        return 0.0
    operands = list(computation.operands(operation))
    left = operands[0].results[0]
    right = operands[1].results[0]
    arrays = left, right, operation.results[0]
    elements = math.prod(array.elements for array in arrays)
    products = math.sqrt(elements / _batch(operation, arrays))
    is_float32 = "f32" in (left.dtype, right.dtype)
    precision = re.search(r"operand_precision=\{(\w+)", operation.rest)
    passes = PASSES.get(precision[1], 1) if precision and is_float32 else 1
    return 2.0 * products * passes


def grouped_flops(computation: Computation, operation: Operation) -> float:
    """Returns the FLOPs that take as long as a grouped product; 0 of others.

    Of rows (m, I), weights (X, I, O) and results (m, O), one of which is the result,
    the elements multiply to X (m I O)^2. A tile with rows of two groups is computed for
    both: TPUs' kernels read how many tiles that makes.
    """
    if not _KERNEL.search(operation.rest):
        return 0.0
    operands = [operand.results[0] for operand in computation.operands(operation)]
    listed = [array.elements for array in operands if array.dtype == "s32"]
    result = operation.results[0]
    factors = [array for array in (*operands, result) if "f" in array.dtype]
    axes = sorted(len(array.sizes) for array in factors)
    if axes != [2, 2, 3] or len(operation.results) > 1 or not listed:
        return 0.0
    weights = [array for array in factors if len(array.sizes) == 3]
    groups = weights[0].sizes[0]
    elements = math.prod(array.elements for array in factors)
    flops = 2.0 * math.sqrt(elements / groups)
    visited = max(listed)
    if visited > groups + 1:  # TPUs list the tiles, GPUs only the groups
        flops *= visited / (visited - groups + 1)
    return flops * GROUPED[len(result.sizes)]


def _batch(operation: Operation, arrays: tuple[Array, Array, Array]) -> int:
    """Returns how many products there are.

    TPUs print them as windows over an axis that all three arrays have.
    """
    if operation.opcode != "convolution":
        batch = _BATCH.search(operation.rest)
        axes = re.findall(r"\d+", batch[1]) if batch else []
        return math.prod(arrays[0].sizes[int(axis)] for axis in axes)
    labels = _LABELS.search(operation.rest).groups()
    count = 1
    for axis in range(len(labels[0]) - 2):
        sizes = set()
        for array, letters in zip(arrays, labels, strict=True):
            sizes.add(array.sizes[letters.index(str(axis))])
        if len(sizes) == 1:
            count *= sizes.pop()
    return count
