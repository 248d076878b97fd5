"""Reads what a compiled program communicates, and what hides it, from scheduled HLO.

`Compiled.as_text()` prints every computation in the order in which it runs, on TPUs
and GPUs alike. An asynchronous collective is two instructions there, its start and its
done; what stands between them runs meanwhile. The body of a loop is printed once: here
it counts once an iteration.

TPUs also run collectives inside a matrix product's fusion. They are printed three
times: in fusions of their own for the start and for the done, and in the product's. A
reduce-scatter may be printed as an all-reduce and a slice in a fusion that runs as one.

On TPUs with SparseCores collectives may run there, beside everything else. They are
computations of their own, called in three steps: the SparseCore is woken, is given the
operand, and is waited for.
"""

import bisect
import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tools.lib.compiled.hlo_text import (
    COLLECTIVES,
    TRANSFER,
    Computation,
    Instruction,
    read,
    read_instruction,
)

_FUSED_START = 'custom_call_target="AsyncCollectiveStart"'
_FUSED_DONE = 'custom_call_target="AsyncCollectiveDone"'
_FUSED_PRODUCT = "async_collective_fusion"
_FUSED_SCATTER = "all-reduce-scatter"


@dataclass(frozen=True)
class Transfer:
    """Positions of a transfer in the order of a computation's instructions.

    available: of the last kernel or done that what it sends depends on; -1 for none.
    """

    start: int
    done: int
    available: int = -1


def hidden_shares(
    kernels: Sequence[int], loops: Sequence[int], transfers: Sequence[Transfer]
) -> list[float]:
    """Returns the share of its ring step's kernels during which each transfer runs.

    Kernels count as equally long. s and d are the start and the done of a transfer, F a
    kernel: in ssssFFdddd, ssssFFdddd all transfers travel for as long as the ring step
    computes, in FssssFdddd for half of it: what they could take of the other kernel's
    time is lost. A step ends where transfers are done before any other starts, and with
    a loop of steps. Its transfers could start where it begins, or later, once what they
    send has arrived or is computed.

    kernels: their positions, ascending. loops: those of them that are loops of kernels.
    """
    kernels_until = functools.partial(bisect.bisect, kernels)  # of a position
    crossing = [t for t in transfers if kernels_until(t.start) < kernels_until(t.done)]
    ends = sorted({*_ends_of_steps(kernels, crossing), *map(kernels_until, loops)})
    windows: dict[Transfer, int] = {}
    first: set[Transfer] = set()
    for transfer in crossing:
        end = kernels_until(transfer.done)
        available = kernels_until(transfer.available)
        begin = max(ends[: bisect.bisect_left(ends, end)], default=0)
        if available < begin or transfer.available < 0:
            first.add(transfer)
        windows[transfer] = end - max(begin, available)
    # What the first transfers of a ring send may have been there for long: kernels
    # before them may be those of another ring's last step.
    shortest = min(windows.values(), default=0)
    windows |= dict.fromkeys(first, shortest)
    shares = []
    for transfer in transfers:
        beside = kernels_until(transfer.done) - kernels_until(transfer.start)
        shares.append(min(1.0, beside / windows.get(transfer, 1)))
    return shares


def _ends_of_steps(kernels: Sequence[int], crossing: Sequence[Transfer]) -> list[int]:
    """Returns the numbers of kernels after which transfers end a step.

    crossing: transfers that run during a kernel.
    """
    first_starts: dict[int, int] = {}  # by the number of kernels before them
    last_dones: dict[int, int] = {}
    for transfer in crossing:
        before = bisect.bisect(kernels, transfer.start)
        first = first_starts.get(before, transfer.start)
        first_starts[before] = min(transfer.start, first)
        before = bisect.bisect(kernels, transfer.done)
        last = last_dones.get(before, transfer.done)
        last_dones[before] = max(transfer.done, last)
    return [n for n, last in last_dones.items() if last < first_starts.get(n, math.inf)]


@dataclass(frozen=True)
class Collective:
    """A collective of the program.

    name: of the instruction that has its result.
    bytes_sent: by each device, each time that it runs, with a ring algorithm:
      of an array of n bytes on g devices (gathered, or before it is scattered),
      (g - 1) / g · n, twice that for an all-reduce, and n for a permute.
    group: devices that it spans; 2 or more.
    times: that a run of the program runs it.
    hidden_share: of a ring's transfer, how much of its step's kernels run between its
      start and its done (see `hidden_shares`). Of others, 1 if any kernel runs there,
      or if they are fused with a product; else 0.
    is_asynchronous: whether it has a start and a done, or is fused.
    """

    name: str
    kind: str
    bytes_sent: float
    group: int
    times: int
    hidden_share: float
    is_asynchronous: bool

    @property
    def is_hidden(self) -> bool:
        """Whether it runs during all the kernels that it could."""
        return self.hidden_share == 1

    @property
    def total_bytes(self) -> float:
        """Sent by each device in a run of the program."""
        return self.bytes_sent * self.times


@dataclass(frozen=True)
class Program:
    """Collectives, kernels and loops of a scheduled program.

    computations: by name, each in its order. text: the same, with all operations.
    """

    entry: str
    computations: dict[str, tuple[Instruction, ...]]
    text: dict[str, Computation] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, devices: int) -> "Program":
        """Reads `Compiled.as_text()`.

        devices: that the program runs on; the groups of a collective without any.

        Raises:
          ValueError: the text holds no program.
        """
        entry, computations = read(text)
        if not entry:
            raise ValueError(f"no scheduled HLO program in {text[:80]!r}")
        fused = {}
        for name, computation in computations.items():
            fused[name] = tuple(_fused_once(name, computation, devices))
        offloaded = {}
        for name, instructions in fused.items():
            offloaded[name] = tuple(_offloaded(instructions, fused))
        return cls(entry, offloaded, computations)

    def trips(self, loop: Instruction) -> int | None:
        """Returns a loop's trip count; None if that is not in the program.

        A bound counts as the trips: JAX's scans count from 0, in ones.
        """
        end = self.text.get(loop.condition)
        if loop.trips is not None or end is None or "direction=LT" not in end.root.rest:
            return loop.trips
        bound = end.operations.get(end.root.operands[-1])
        is_known = bound is not None and bound.opcode == "constant"
        return int(bound.rest.partition(")")[0]) if is_known else None

    def times(self, instruction: Instruction) -> int:
        """Returns how often what it calls runs: once where trips are unknown."""
        trips = self.trips(instruction) if instruction.kind == "loop" else 1
        return 1 if trips is None else trips

    @functools.cached_property
    def runs(self) -> dict[str, int]:
        """Number of runs of each computation in a run of the program.

        Every branch of a conditional counts, and a loop of unknown trips once.
        """
        runs: Counter[str] = Counter()

        def visit(name: str, times: int) -> None:
            runs[name] += times
            for instruction in self.computations.get(name, ()):
                for called in instruction.called:
                    visit(called, times * self.times(instruction))

        visit(self.entry, 1)
        return dict(runs)

    @functools.cached_property
    def unknown_loops(self) -> int:
        """Number of loops with collectives or kernels whose trip count is unknown."""
        unknown = 0
        for name in self.runs:
            for loop in self.computations.get(name, ()):
                if loop.kind == "loop" and self.trips(loop) is None:
                    unknown += self._is_busy(loop)
        return unknown

    def collectives(self) -> list[Collective]:
        """Returns those that move anything, in the order of the computations."""
        collectives = []
        for name, times in self.runs.items():
            if times:
                collectives += self._in_computation(name, times)
        return [collective for collective in collectives if collective.group > 1]

    def kernels(self) -> Counter[str]:
        """Counts the runs of the "forward" and the "backward" kernel."""
        runs: Counter[str] = Counter()
        for name, times in self.runs.items():
            for instruction in self.computations.get(name, ()):
                if instruction.kind == "kernel":
                    runs[instruction.kernel] += times
        return runs

    def orders(self) -> list[str]:
        """Returns the order of transfers and kernels in computations with transfers.

        s and d: start and done of a transfer. S: a synchronous one. F and B: a forward
        and a backward kernel, by itself or fused with what takes its result.
        """
        orders = ["".join(self._letters(name)) for name in self.computations]
        return [order for order in orders if set(order) & set("sS")]

    def sequence(self, name: str) -> Iterator[Instruction]:
        """Yields transfers and kernels of a computation, called ones included."""
        for instruction in self.computations.get(name, ()):
            if instruction.kind in (TRANSFER, "kernel"):
                yield instruction
            elif instruction.kind == "call":
                for called in instruction.called:
                    yield from self.sequence(called)

    def _letters(self, name: str) -> Iterator[str]:
        for instruction in self.sequence(name):
            if instruction.kind == TRANSFER:
                yield {"start": "s", "done": "d"}.get(instruction.phase, "S")
            else:
                yield instruction.kernel[0].upper()

    def _in_computation(self, name: str, times: int) -> Iterator[Collective]:
        instructions = self.computations.get(name, ())
        kernels = [n for n, x in enumerate(instructions) if self._has_kernel(x)]
        loops = [kernel for kernel in kernels if instructions[kernel].kind == "loop"]
        starts: dict[str, int] = {}
        ended: list[tuple[Instruction, int, Transfer]] = []
        available = self._available(name)
        for position, instruction in enumerate(instructions):
            if instruction.kind in ("loop", "call", "kernel"):
                continue
            if instruction.phase == "start":
                starts[instruction.name] = position
                continue
            begin = position
            if instruction.phase == "done":
                begin = starts.get(instruction.first_operand, position)
            # Only a start says what kind it is of, and between which devices.
            start = instructions[begin]
            result = dataclasses.replace(instruction, kind=start.kind)
            transfer = Transfer(begin, position, available.get(start.name, -1))
            ended.append((result, start.group, transfer))
        rings = [transfer for result, _, transfer in ended if result.kind == TRANSFER]
        shares = hidden_shares(kernels, loops, rings)
        share_of = dict(zip(rings, shares, strict=True))
        for result, group, transfer in ended:
            before = bisect.bisect(kernels, transfer.start)
            is_beside = before < bisect.bisect_left(kernels, transfer.done)
            is_hidden = is_beside or result.phase == "fused"
            share = share_of.get(transfer, float(is_hidden))
            yield _collective(result, group, times, share)

    def _available(self, name: str) -> dict[str, int]:
        """Returns the last kernel or done that each instruction depends on.

        By names of instructions; positions of what they depend on, -1 for nothing.
        """
        events: dict[str, int] = {}
        for position, instruction in enumerate(self.computations.get(name, ())):
            if instruction.phase == "done" or self._has_kernel(instruction):
                events[instruction.name] = position
        available: dict[str, int] = {}
        for result, operation in self.text[name].operations.items():
            operands = [available.get(operand, -1) for operand in operation.operands]
            available[result] = events.get(result, max(operands, default=-1))
        return available

    def _inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yields the instructions of the computations that it calls."""
        for called in instruction.called:
            yield from self.computations.get(called, ())

    def _has_kernel(self, instruction: Instruction) -> bool:
        is_kernel = instruction.kind == "kernel"
        return is_kernel or any(map(self._has_kernel, self._inside(instruction)))

    def _is_busy(self, instruction: Instruction) -> bool:
        return any(
            inner.kind not in ("loop", "call") or self._is_busy(inner)
            for inner in self._inside(instruction)
        )


def _fused_once(
    name: str, computation: Computation, devices: int
) -> Iterator[Instruction]:
    """Yields a computation's instructions; a fused collective only where it is done."""
    operations = computation.operations.values()
    is_done = any(_FUSED_DONE in operation.rest for operation in operations)
    is_begun = any(_FUSED_START in operation.rest for operation in operations)
    is_begun |= name.startswith(_FUSED_PRODUCT)
    for operation in operations:
        instruction = read_instruction(operation, devices)
        if instruction is None:
            continue
        if name.startswith(_FUSED_SCATTER) and instruction.kind == "all-reduce":
            kept = instruction.size // instruction.group
            instruction = dataclasses.replace(
                instruction, kind="reduce-scatter", size=kept
            )
        if instruction.kind in COLLECTIVES and is_done:
            yield dataclasses.replace(instruction, phase="fused")
        elif instruction.kind not in COLLECTIVES or not is_begun:
            yield instruction


def _offloaded(
    steps: tuple[Instruction, ...], computations: dict[str, tuple[Instruction, ...]]
) -> Iterator[Instruction]:
    """Yields a computation's instructions; collectives of a SparseCore as such.

    They start where the operand is given.
    """
    woken: dict[str, Instruction] = {}
    for step in steps:
        if step.kind != "call" or not step.phase:
            yield step
            continue
        if step.phase == "start":
            for called in step.called:
                for instruction in computations[called]:
                    if instruction.kind in COLLECTIVES:
                        woken[step.name] = instruction
        elif collective := woken.get(step.first_operand):
            woken[step.name] = collective
            is_start = step.phase == "update"
            yield dataclasses.replace(
                collective,
                name=step.name,
                phase="start" if is_start else "done",
                first_operand=step.first_operand,
                size=step.size,
            )


def _collective(
    result: Instruction, group: int, times: int, hidden_share: float
) -> Collective:
    """Makes a collective from the instruction that has its result."""
    factor = {
        "all-gather": (group - 1) / max(group, 1),
        "all-to-all": (group - 1) / max(group, 1),
        "all-reduce": 2 * (group - 1) / max(group, 1),
        "reduce-scatter": group - 1,  # of what one device keeps
    }.get(result.kind, 1)
    sent = factor * result.size
    is_asynchronous = result.phase != ""
    return Collective(
        result.name, result.kind, sent, group, times, hidden_share, is_asynchronous
    )
