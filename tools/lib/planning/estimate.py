"""Estimates the time of a planned step from its instructions, schedules and peaks.

Nothing here is measured on the device. An estimate by peaks is a bound: what no figure
is known of (stalls, arithmetic but products, latencies) takes time that is missing. One
by XLA's own cycles has some of that.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kernels.chips import Chip
from kernels.cost.clock import PRODUCTS, source
from kernels.device import kernel_cores
from tasks.layout_choice import ring_passes
from tasks.run import Run
from tools.lib.compiled.hlo import TRANSFER, Collective, Program
from tools.lib.planning.roofline import Roofline

PARTS = {
    "attention": "attention kernels",
    "products": "matrix products",
    "recomputed": "matrix products, recomputed",
    "elementwise": "element-wise work and copies",
    "small": "small instructions",
    "ring_waits": "waits: the ring's transfers",
    "other_waits": "waits: other collectives",
}
"""Fields of an estimate that add up to a step, and their names."""


def cycles_per_second(chip: Chip) -> float:
    """Returns the clock of a core, in which XLA counts; inf where that is unknown."""
    if not chip.matrix_units:
        return math.inf
    return chip.bundles_per_second / kernel_cores(chip.device_kinds[0])


@dataclass(frozen=True)
class Attention:
    """Seconds of the attention kernels in a step, and of the ring around them.

    kernels: by direction; empty where XLA computes attention, among its instructions.
    outlasting: of ring transfers that start before a kernel and end after it, after
      their kernels have ended, if all of them do.
    by_name: the mean of a run of each kernel of the program, of the kind of layers in
      which it is the shortest.
    ways: links of a device that the rings' transfers share, the fewest of any ring.
    """

    kernels: dict[str, float]
    outlasting: float
    by_name: dict[str, float]
    assumption: str
    ways: int = 1

    @classmethod
    def of(cls, run: Run, chip: Chip, program: Program) -> "Attention":
        """Estimates both for a run on a mesh of this chip."""
        config, counts = run.config, program.kernels()
        if not counts:
            return cls({}, 0.0, {}, "attention is among the other instructions")
        outlasting = 0.0
        spent, areas, layers = Counter(), Counter(), Counter()
        passes = ring_passes(run, chip)
        for times, ring, direction, found in passes:
            window = ring.sequence.row.window
            spent[direction, window] += times * found.kernels
            areas[direction] += times * ring.area
            layers[window] += times * (direction == "backward")
            outlasting += times * found.outlasting
        seconds = {name: sum(spent[name, size] for size in layers) for name in PRODUCTS}
        shortest = {
            name: layers.total() * min(spent[name, n] / layers[n] for n in layers)
            for name in PRODUCTS
        }
        again = areas["forward"] / areas["backward"]
        is_bfloat16 = config.compute_dtype == "bfloat16"
        return cls(
            seconds,
            outlasting,
            {
                one.name: shortest[one.kernel] / counts[one.kernel]
                for instructions in program.computations.values()
                for one in instructions
                if one.kind == "kernel" and counts[one.kernel]
            },
            f"attention: {source(chip)}; the slowest device of each ring step; "
            f"remat {config.remat} runs the ring forward {again:.3g} x for each "
            "backward"
            + ("" if is_bfloat16 else f"; {config.compute_dtype} as fast as bfloat16")
            + ("; soft caps take no time" if config.model.attention_soft_cap else ""),
            ways=min(one.ring.ways for one in passes),
        )


@dataclass(frozen=True)
class Estimate:
    """Estimated seconds of one step, by part.

    attention: the kernels. products: other matrix products; recomputed: of those, the
      ones that rematerialisation computes again. small: instructions that move a few
      bytes; instructions: how many. elementwise: all others, copies included.
    ring_waits: exposed ring transfers, and what outlasts kernels of hidden ones.
    other_waits: other exposed collectives.
    mfu: model FLOPs over the peak of all devices in that time.
    assumption: of the attention kernels.
    """

    attention: float
    products: float
    recomputed: float
    elementwise: float
    small: float
    ring_waits: float
    other_waits: float
    instructions: int
    mfu: float
    assumption: str

    @property
    def step(self) -> float:
        """Seconds of the whole step."""
        return sum(getattr(self, part) for part in PARTS)


def bytes_per_second(chip: Chip, kind: str, ways: int = 1) -> float:
    """Returns the bandwidth of a device for collectives of one kind.

    Those but the ring's use both directions of a TPU's links.
    ways: links that a ring's transfers share, on TPUs.
    """
    is_tpu = chip.name.startswith("TPU")
    links = (ways if kind == TRANSFER else 2) if is_tpu else 1
    return chip.interconnect_bytes_per_second * links


def collective_seconds(one: Collective, chip: Chip, ways: int = 1) -> float:
    """Returns the seconds of a run of a collective; ways: of `bytes_per_second`."""
    return chip.link_latency + one.bytes_sent / bytes_per_second(chip, one.kind, ways)


def synchronous_seconds(
    collectives: Iterable[Collective], chip: Chip
) -> dict[str, float]:
    """Returns the seconds of collectives that nothing runs beside, by name."""
    return {
        one.name: collective_seconds(one, chip)
        for one in collectives
        if not one.is_asynchronous
    }


def exposed_seconds(
    one: Collective, beside: Mapping[str, float], chip: Chip, ways: int = 1
) -> float:
    """Returns the seconds of a run of a collective in which devices wait for it.

    beside: seconds of what runs during an asynchronous one, by its name. A ring's
      transfer is timed with its kernels, and exposed as far as it misses them.
    """
    seconds = collective_seconds(one, chip, ways)
    if one.hidden_share and (one.kind == TRANSFER or one.name not in beside):
        return (1 - one.hidden_share) * seconds
    return max(0.0, seconds - beside.get(one.name, 0.0))


def estimate(
    chip: Chip,
    attention: Attention,
    roofline: Roofline,
    collectives: Sequence[Collective],
    peak_seconds: float,
) -> Estimate:
    """Estimates a step on devices of this chip.

    roofline: times of the program's other instructions on one of them.
    peak_seconds: of the model's FLOPs at the peak of all devices.
    """
    rings = [one for one in collectives if one.kind == TRANSFER]
    sent = sum(one.total_bytes for one in rings)
    hidden = sum(one.hidden_share * one.total_bytes for one in rings)
    ways = attention.ways

    def waited(found: Iterable[Collective]) -> float:
        beside = roofline.beside
        return sum(c.times * exposed_seconds(c, beside, chip, ways) for c in found)

    work = roofline.total
    parts = (
        sum(attention.kernels.values()),
        *(work.products, work.recomputed, work.elementwise, work.small),
        waited(rings) + attention.outlasting * (hidden / sent if sent else 1.0),
        waited([one for one in collectives if one.kind != TRANSFER]),
    )
    return Estimate(
        *parts,
        instructions=round(work.instructions),
        mfu=peak_seconds / sum(parts),
        assumption=attention.assumption,
    )
