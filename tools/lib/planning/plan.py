"""Reads memory, communication and time of a training step from its compiled program."""

import dataclasses
import math
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax

from kernels.devices.chips import Chip, measured, stalled
from tools.lib.benchmarks.rows import Environment
from tools.lib.compiled.hlo import TRANSFER, Collective, Program
from tools.lib.planning.estimate import (
    Attention,
    Estimate,
    bytes_per_second,
    collective_seconds,
    cycles_per_second,
    estimate,
    exposed_seconds,
    synchronous_seconds,
)
from tools.lib.planning.roofline import Roofline
from tools.lib.planning.step import Memory, Step
from training.reports.metrics import StepWork


@dataclass(frozen=True)
class Kind:
    """The collectives of one kind in a step; those in loops count once an iteration.

    bytes_sent: bytes that each device sends (see `hlo.Collective`).
    exposed_bytes: those of them that overlap no kernel and no product, by their times,
      or by the kernels of a ring step that a transfer misses; synchronous_bytes: and
      that cannot, because their collectives are not asynchronous.
    """

    name: str
    count: int
    bytes_sent: float
    exposed_bytes: float
    synchronous_bytes: float


@dataclass(frozen=True)
class Plan:
    """Memory, communication and estimated time of a step.

    execution: remat and chunks as they were chosen.
    kernels: runs of attention kernels in a step. ways: links of a device that the
      ring's transfers share.
    unknown_loops: loops with collectives and unknown trip count, counted once.
    documents: those packed in a row (see `typical_rows`); none for one document.
    estimate: the least that it takes. at_cycles: at XLA's own cycles, and on links as
      they were measured. with_stalls: and kernels that wait as others' were measured
      to; None where nobody measured the chip's.
    compile_seconds, planner_bytes: wall-clock time and peak memory on this machine.
    """

    topology: str
    device_kind: str
    devices: int
    mesh: dict[str, int]
    rows: int
    context_tokens: int
    remat: str
    execution: str
    attention_parts: int
    implementation: str
    memory: Memory
    kernels: int
    ways: int
    collectives: tuple[Kind, ...]
    unknown_loops: int
    work: StepWork
    estimate: Estimate
    at_cycles: Estimate
    compile_seconds: float
    planner_bytes: int
    documents: tuple[int | str, ...] = ()
    with_stalls: Estimate | None = None

    @classmethod
    def of(
        cls,
        step: Step,
        phase: Callable[[str], AbstractContextManager] = nullcontext,
    ) -> "Plan":
        """Compiles the step.

        phase: in which a part of the work is done, by its name; may show how far it is.

        Raises:
          TooLarge: it does not fit.
        """
        start = time.perf_counter()
        with phase("compiling"):
            compiled = step.compile()
        seconds = time.perf_counter() - start
        with phase("reading the program"):
            return cls._read(step, compiled, seconds)

    @classmethod
    def _read(cls, step: Step, compiled: jax.stages.Compiled, seconds: float) -> "Plan":
        """Reads the plan of a step from its program, compiled in these seconds."""
        devices = step.pod.devices
        program = Program.parse(compiled.as_text(), len(devices))
        chip = step.pod.chip
        moved = program.collectives()
        work = step.work()
        peak_seconds = work.model_flops / (len(devices) * chip.peak_flops)
        run = step.run
        config = run.config

        def timed(chip: Chip, rate: float) -> tuple[Attention, Roofline, Estimate]:
            attention = Attention.of(run, chip, program)
            known = attention.by_name | synchronous_seconds(moved, chip)
            links = {}
            for collective in moved:
                if collective.kind != TRANSFER:
                    links[collective.name] = collective_seconds(collective, chip)
            roofline = Roofline(program, chip, known, rate, links)
            estimated = estimate(chip, attention, roofline, moved, peak_seconds)
            return attention, roofline, estimated

        attention, roofline, bound = timed(chip, math.inf)
        rate = cycles_per_second(chip)
        *_, at_cycles = timed(measured(chip), rate)
        with_stalls = None
        if slower := stalled(measured(chip)):
            *_, with_stalls = timed(slower, rate)
        return cls(
            topology=step.pod.topology,
            device_kind=devices[0].device_kind,
            devices=len(devices),
            mesh=run.partition.sizes,
            rows=config.data.batch_rows,
            context_tokens=config.data.context_tokens,
            remat=config.remat,
            execution=str(run.execution),
            attention_parts=config.attention_parts,
            implementation=step.implementation,
            memory=Memory.of(step, compiled),
            kernels=program.kernels().total(),
            ways=attention.ways,
            collectives=kinds(moved, roofline.beside, chip),
            unknown_loops=program.unknown_loops,
            work=work,
            estimate=bound,
            at_cycles=at_cycles,
            with_stalls=with_stalls,
            compile_seconds=seconds,
            planner_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            documents=step.documents,
        )

    @property
    def hidden_share(self) -> float:
        """Share of the bytes of the ring's transfers that kernels hide."""
        for kind in self.collectives:
            if kind.name == TRANSFER:
                return max(0.0, 1 - kind.exposed_bytes / kind.bytes_sent)
        return 1.0

    def row(self) -> dict[str, Any]:
        """Returns JSON values, with the environment."""
        row = dataclasses.asdict(self)
        here = Environment.now(self.device_kind, self.devices)
        row["environment"] = dataclasses.asdict(here)
        row["memory"]["spare_share"] = self.memory.spare_share
        for name in ("estimate", "at_cycles", "with_stalls"):
            if row[name] is not None:
                row[name]["step"] = getattr(self, name).step
        return row


def kinds(
    collectives: list[Collective], beside: Mapping[str, float], chip: Chip
) -> tuple[Kind, ...]:
    """Sums collectives by kind, those with the most bytes first.

    beside: seconds of what runs during an asynchronous one, by its name.
    """
    by_kind: dict[str, list[Collective]] = defaultdict(list)
    for collective in collectives:
        by_kind[collective.kind].append(collective)
    kinds = []
    for name, alike in by_kind.items():
        rate = bytes_per_second(chip, name)
        kind = Kind(
            name,
            sum(c.times for c in alike),
            sum(c.total_bytes for c in alike),
            sum(c.times * rate * exposed_seconds(c, beside, chip) for c in alike),
            sum(c.total_bytes for c in alike if not c.is_asynchronous),
        )
        kinds.append(kind)
    return tuple(sorted(kinds, key=lambda kind: (-kind.bytes_sent, kind.name)))
