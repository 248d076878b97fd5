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
import itertools
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
    """Places of a transfer in the order of a computation's instructions.

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

    kernels: their places, ascending. loops: those of them that are loops of kernels.
    """

    def gap(place: int) -> int:
        """Counts the kernels up to a place."""
        return bisect.bisect(kernels, place)

    crossing = [one for one in transfers if gap(one.start) < gap(one.done)]
    ends = _ends_of_steps([(gap(t.start), gap(t.done), t) for t in crossing])
    ends = sorted({*ends, *map(gap, loops)})
    windows: dict[Transfer, int] = {}
    first: set[Transfer] = set()
    for one in crossing:
        end, available = gap(one.done), gap(one.available)
        begin = max(ends[: bisect.bisect_left(ends, end)], default=0)
        if available < begin or one.available < 0:
            first.add(one)
        windows[one] = end - max(begin, available)
    # What the first transfers of a ring send may have been there for long: kernels
    # before them may be those of another ring's last step.
    shortest = min(windows.values(), default=0)
    windows |= dict.fromkeys(first, shortest)
    return [
        min(1.0, (gap(one.done) - gap(one.start)) / windows.get(one, 1))
        for one in transfers
    ]


def _ends_of_steps(crossing: Sequence[tuple[int, int, Transfer]]) -> list[int]:
    """Returns the numbers of kernels after which transfers end a step.

    crossing: kernels before the start and before the done of each transfer.
    """
    starts: dict[int, int] = {}
    dones: dict[int, int] = {}
    for start, done, one in crossing:
        starts[start] = min(one.start, starts.get(start, one.start))
        dones[done] = max(one.done, dones.get(done, one.done))
    return [g for g, last in dones.items() if last < starts.get(g, math.inf)]


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
        found = {
            name: tuple(_fused_once(name, computation, devices))
            for name, computation in computations.items()
        }
        found = {name: tuple(_offloaded(one, found)) for name, one in found.items()}
        return cls(entry, found, computations)

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
        found: Counter[str] = Counter()

        def visit(name: str, times: int) -> None:
            found[name] += times
            for instruction in self.computations.get(name, ()):
                for called in instruction.called:
                    visit(called, times * self.times(instruction))

        visit(self.entry, 1)
        return dict(found)

    @functools.cached_property
    def unknown_loops(self) -> int:
        """Number of loops with collectives or kernels whose trip count is unknown."""
        return sum(
            self.trips(instruction) is None and self._is_busy(instruction)
            for name in self.runs
            for instruction in self.computations.get(name, ())
            if instruction.kind == "loop"
        )

    def collectives(self) -> list[Collective]:
        """Returns those that move anything, in the order of the computations."""
        return [
            collective
            for name, times in self.runs.items()
            if times
            for collective in self._in_computation(name, times)
            if collective.group > 1
        ]

    def kernels(self) -> Counter[str]:
        """Counts the runs of the "forward" and the "backward" kernel."""
        found: Counter[str] = Counter()
        for name, times in self.runs.items():
            for instruction in self.computations.get(name, ()):
                if instruction.kind == "kernel":
                    found[instruction.kernel] += times
        return found

    def orders(self) -> list[str]:
        """Returns the order of transfers and kernels in computations with transfers.

        s and d: start and done of a transfer. S: a synchronous one. F and B: a forward
        and a backward kernel, by itself or fused with what takes its result.
        """
        found = ("".join(self._letters(name)) for name in self.computations)
        return [order for order in found if set(order) & set("sS")]

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
        kernels = [n for n, one in enumerate(instructions) if self._has_kernel(one)]
        loops = [place for place in kernels if instructions[place].kind == "loop"]
        started: dict[str, tuple[int, Instruction]] = {}
        found: list[tuple[Instruction, int, Transfer]] = []
        available = self._available(name)
        for place, one in enumerate(instructions):
            if one.kind in ("loop", "call", "kernel"):
                continue
            if one.phase == "start":
                started[one.name] = place, one
                continue
            begin, start = place, one
            if one.phase == "done":
                begin, start = started.get(one.first_operand, (place, one))
            transfer = Transfer(begin, place, available.get(start.name, -1))
            found.append(
                (dataclasses.replace(one, kind=start.kind), start.group, transfer)
            )
        rings = [moved for result, _, moved in found if result.kind == TRANSFER]
        shares = hidden_shares(kernels, loops, rings)
        share_of = dict(zip(rings, shares, strict=True))
        for result, group, moved in found:
            is_beside = any(moved.start < place < moved.done for place in kernels)
            share = share_of.get(moved, float(is_beside or result.phase == "fused"))
            yield _collective(result, group, times, share)

    def _available(self, name: str) -> dict[str, int]:
        """Returns the last kernel or done that each instruction depends on.

        By names of instructions; the places of what they depend on, -1 for nothing.
        """
        events = {
            one.name: place
            for place, one in enumerate(self.computations.get(name, ()))
            if one.phase == "done" or self._has_kernel(one)
        }
        found: dict[str, int] = {}
        for result, operation in self.text[name].operations.items():
            last = max((found.get(one, -1) for one in operation.operands), default=-1)
            found[result] = events.get(result, last)
        return found

    def _has_kernel(self, instruction: Instruction) -> bool:
        return instruction.kind == "kernel" or any(
            self._has_kernel(inner)
            for called in instruction.called
            for inner in self.computations.get(called, ())
        )

    def _is_busy(self, instruction: Instruction) -> bool:
        return any(
            inner.kind not in ("loop", "call") or self._is_busy(inner)
            for called in instruction.called
            for inner in self.computations.get(called, ())
        )


def _fused_once(
    name: str, computation: Computation, devices: int
) -> Iterator[Instruction]:
    """Yields a computation's instructions; a fused collective only where it is done."""
    operations = computation.operations.values()
    is_done = any(_FUSED_DONE in one.rest for one in operations)
    is_begun = name.startswith(_FUSED_PRODUCT) or any(
        _FUSED_START in one.rest for one in operations
    )
    for instruction in (read_instruction(one, devices) for one in operations):
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
    found: tuple[Instruction, ...], computations: dict[str, tuple[Instruction, ...]]
) -> Iterator[Instruction]:
    """Yields a computation's instructions; collectives of a SparseCore as such.

    They start where the operand is given.
    """
    woken: dict[str, Instruction] = {}
    for step in found:
        if step.kind != "call" or not step.phase:
            yield step
            continue
        if step.phase == "start":
            for one in itertools.chain(*(computations[c] for c in step.called)):
                if one.kind in COLLECTIVES:
                    woken[step.name] = one
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
    sent, is_asynchronous = factor * result.size, result.phase != ""
    return Collective(
        result.name, result.kind, sent, group, times, hidden_share, is_asynchronous
    )
