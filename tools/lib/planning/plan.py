"""Reads memory, communication and time of a training step from its compiled program."""

import dataclasses
import resource
import time
from dataclasses import dataclass
from typing import Any

from tasks import base
from tools.lib.benchmarks.rows import Environment
from tools.lib.planning.estimate import Estimate, Exposed, estimate
from tools.lib.planning.memory import Memory
from tools.lib.planning.step import Step
from training.hlo import TRANSFER, Collective, Program
from training.metrics import StepWork


@dataclass(frozen=True)
class Transfers:
    """The ring's transfers from neighbour to neighbour in a step, of one device.

    Those in a loop count once an iteration.

    hidden, exposed: transfers that overlap a kernel, and those that do not.
    hidden_bytes, exposed_bytes: bytes that the device sends with them.
    kernels: runs of attention kernels in a step.
    """

    hidden: int
    exposed: int
    hidden_bytes: float
    exposed_bytes: float
    kernels: int

    @property
    def exposed_share(self) -> float:
        """Exposed share of all bytes."""
        total = self.hidden_bytes + self.exposed_bytes
        return self.exposed_bytes / total if total else 0.0


@dataclass(frozen=True)
class Kind:
    """The collectives of one kind in a step; those in loops count once an iteration.

    bytes_sent: bytes that each device sends (see `hlo.Collective`).
    exposed_bytes: those of them that overlap no kernel; synchronous_bytes: and that
      cannot, because their collectives are not asynchronous.
    """

    name: str
    count: int
    bytes_sent: float
    exposed_bytes: float
    synchronous_bytes: float


@dataclass(frozen=True)
class Plan:
    """Memory, communication and estimated time of a step.

    unknown_loops: loops with collectives and unknown trip count, counted once.
    compile_seconds, planner_bytes: wall-clock time and peak memory on this machine.
    """

    topology: str
    device_kind: str
    devices: int
    mesh: dict[str, int]
    rows: int
    context_tokens: int
    remat: str
    attention_parts: int
    implementation: str
    memory: Memory
    transfers: Transfers
    collectives: tuple[Kind, ...]
    unknown_loops: int
    work: StepWork
    estimate: Estimate
    compile_seconds: float
    planner_bytes: int

    @classmethod
    def of(cls, step: Step) -> "Plan":
        """Compiles the step.

        Raises:
          TooLarge: it does not fit.
        """
        start = time.perf_counter()
        compiled = step.compile()
        seconds = time.perf_counter() - start
        rows, columns = base.batch_shape(step.config)
        devices = step.pod.devices
        program = Program.parse(compiled.as_text(), len(devices))
        moved, work = program.collectives(), step.work()
        ring, found = transfers(program), kinds(moved)
        return cls(
            topology=step.pod.topology,
            device_kind=devices[0].device_kind,
            devices=len(devices),
            mesh=step.partition.sizes,
            rows=rows,
            context_tokens=columns,
            remat=step.config.remat,
            attention_parts=step.config.attention_parts,
            implementation=step.implementation,
            memory=Memory.of(step, compiled),
            transfers=ring,
            collectives=found,
            unknown_loops=program.unknown_loops,
            work=work,
            estimate=estimate(
                step.config,
                step.partition,
                step.pod.chip,
                work.model_flops,
                Exposed(
                    ring.exposed_bytes,
                    ring.exposed_share,
                    sum(k.exposed_bytes for k in found if k.name != TRANSFER),
                ),
            ),
            compile_seconds=seconds,
            planner_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )

    def row(self) -> dict[str, Any]:
        """Returns JSON values, with the environment."""
        row = dataclasses.asdict(self)
        here = Environment.now(self.device_kind, self.devices)
        row["environment"] = dataclasses.asdict(here)
        row["memory"]["spare_share"] = self.memory.spare_share
        exposed = self.estimate.exposed
        row["estimate"] |= {"exposed": exposed, "step": self.estimate.step}
        return row


def transfers(program: Program) -> Transfers:
    """Sums the transfers of all rings of the program."""
    found = [c for c in program.collectives() if c.kind == TRANSFER]
    hidden = [c for c in found if c.is_hidden]
    exposed = [c for c in found if not c.is_hidden]
    return Transfers(
        hidden=sum(c.times for c in hidden),
        exposed=sum(c.times for c in exposed),
        hidden_bytes=sum(c.total_bytes for c in hidden),
        exposed_bytes=sum(c.total_bytes for c in exposed),
        kernels=program.kernels().total(),
    )


def kinds(collectives: list[Collective]) -> tuple[Kind, ...]:
    """Sums collectives by kind, those with the most bytes first."""

    def of(name: str) -> Kind:
        mine = [c for c in collectives if c.kind == name]
        return Kind(
            name,
            sum(c.times for c in mine),
            sum(c.total_bytes for c in mine),
            sum(c.total_bytes for c in mine if not c.is_hidden),
            sum(c.total_bytes for c in mine if not c.is_asynchronous),
        )

    found = map(of, {c.kind for c in collectives})
    return tuple(sorted(found, key=lambda kind: (-kind.bytes_sent, kind.name)))
