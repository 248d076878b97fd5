"""Estimates the time of a planned step from its instructions, schedules and peaks.

Nothing here is measured on the device. An estimate by peaks is a bound: what no figure
is known of (stalls, arithmetic but products, latencies) takes time that is missing. One
by XLA's own cycles has some of that.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kernels.cost.speed import PRODUCTS, source
from kernels.devices.chips import Chip
from kernels.devices.device import kernel_cores
from tasks.layout_choice import ring_passes, state_times
from tasks.run import Run
from tools.lib.compiled.hlo import TRANSFER, Collective, Program
from tools.lib.compiled.hlo_text import DELTA
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

    kernels: by direction, and DELTA for both directions of Gated DeltaNet's; empty
      where XLA computes attention, among its instructions.
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
        config = run.config
        counts = program.kernels()
        if not counts:
            return cls({}, 0.0, {}, "attention is among the other instructions")
        outlasting = 0.0
        spent = Counter()  # by direction and window
        areas = Counter()
        layers = Counter()  # by window, times microbatches
        passes = ring_passes(run, chip)
        for times, ring, direction, each in passes:
            window = ring.sequence.row.window
            spent[direction, window] += times * each.kernels
            areas[direction] += times * ring.area
            layers[window] += times * (direction == "backward")
            outlasting += times * each.outlasting
        seconds: dict[str, float] = {}
        shortest: dict[str, float] = {}
        for direction in PRODUCTS:
            by_window = {window: spent[direction, window] for window in layers}
            seconds[direction] = sum(by_window.values())
            of_layer = min(by_window[window] / layers[window] for window in layers)
            shortest[direction] = layers.total() * of_layer
        if counts[DELTA]:
            seconds[DELTA] = state_times(run, chip)[0]
            shortest[DELTA] = seconds[DELTA]
        by_name: dict[str, float] = {}
        for instruction in itertools.chain.from_iterable(program.computations.values()):
            kernel = instruction.kernel
            if instruction.kind == "kernel" and counts[kernel]:
                by_name[instruction.name] = shortest[kernel] / counts[kernel]
        again = areas["forward"] / areas["backward"]
        is_bfloat16 = config.compute_dtype == "bfloat16"
        return cls(
            seconds,
            outlasting,
            by_name,
            f"attention: {source(chip)}; the slowest device of each ring step; "
            f"remat {config.remat} runs the ring forward {again:.3g} x for each "
            "backward"
            + ("" if is_bfloat16 else f"; {config.compute_dtype} as fast as bfloat16")
            + ("; soft caps take no time" if config.model.attention_soft_cap else ""),
            ways=min(ring_pass.ring.ways for ring_pass in passes),
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


def collective_seconds(collective: Collective, chip: Chip, ways: int = 1) -> float:
    """Returns the seconds of a run of a collective; ways: of `bytes_per_second`."""
    rate = bytes_per_second(chip, collective.kind, ways)
    return chip.link_latency + collective.bytes_sent / rate


def synchronous_seconds(
    collectives: Iterable[Collective], chip: Chip
) -> dict[str, float]:
    """Returns the seconds of collectives that nothing runs beside, by name."""
    seconds = {}
    for collective in collectives:
        if not collective.is_asynchronous:
            seconds[collective.name] = collective_seconds(collective, chip)
    return seconds


def exposed_seconds(
    collective: Collective, beside: Mapping[str, float], chip: Chip, ways: int = 1
) -> float:
    """Returns the seconds of a run of a collective in which devices wait for it.

    beside: seconds of what runs during an asynchronous one, by its name. A ring's
      transfer is timed with its kernels, and exposed as far as it misses them.
    """
    name = collective.name
    seconds = collective_seconds(collective, chip, ways)
    if collective.hidden_share and (collective.kind == TRANSFER or name not in beside):
        return (1 - collective.hidden_share) * seconds
    return max(0.0, seconds - beside.get(name, 0.0))


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
    transfers = [each for each in collectives if each.kind == TRANSFER]
    others = [each for each in collectives if each.kind != TRANSFER]
    sent = sum(each.total_bytes for each in transfers)
    hidden = sum(each.hidden_share * each.total_bytes for each in transfers)
    ways = attention.ways

    def waited(moved: Iterable[Collective]) -> float:
        beside = roofline.beside
        return sum(c.times * exposed_seconds(c, beside, chip, ways) for c in moved)

    # Kernels hide `hidden` of the ring's bytes: only these can outlast them.
    outlasting = attention.outlasting * (hidden / sent if sent else 1.0)
    work = roofline.total
    seconds = {
        "attention": sum(attention.kernels.values()),
        "products": work.products,
        "recomputed": work.recomputed,
        "elementwise": work.elementwise,
        "small": work.small,
        "ring_waits": waited(transfers) + outlasting,
        "other_waits": waited(others),
    }
    return Estimate(
        **seconds,
        instructions=round(work.instructions),
        mfu=peak_seconds / sum(seconds.values()),
        assumption=attention.assumption,
    )
