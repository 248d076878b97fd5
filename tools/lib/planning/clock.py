"""Estimates the seconds of a layer's ring: its kernels, and what outlasts them.

A kernel lasts as long as its visible pairs at the rate of a full tile, and a little for
each row of tiles and each partial tile (bundles of compiled kernels: CYCLES). Of each
ring step the slowest device stands against its fullest link. Nothing here is measured.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

from data.document_mask import DocumentMask
from kernels.device import kernel_cores, rings_both_ways
from kernels.layouts import order as layout_order
from kernels.masks import Visible
from kernels.ring.routes import (
    ONE_WAY,
    AllShards,
    Counted,
    Neighbours,
    Route,
    Schedule,
    both_ways,
    reads_of,
    route_within,
)
from kernels.ring.ulysses import share_heads
from tasks.run import Run
from tools.lib.planning.visible import CAUSAL, TILE, Sequence, sampled
from training.chips import Chip

PRODUCTS = {"forward": 2, "backward": 5}
"""Matrix products of a tile."""

LANES, FLOAT32 = 128, 4


class Speed(NamedTuple):
    """Seconds of a kernel, or its bundles, for 1024 rows of heads of 128 numbers.

    full: of a tile of 1024 keys. row: of a program, whose rows are together 1024.
    diagonal, partial: of a row's first partial tile, and of others, beside their live
    pairs at the rate of full tiles.
    """

    full: float
    row: float
    diagonal: float
    partial: float


CYCLES = {
    "TPU v4": {"forward": (4142, 1281, 324, 3500), "backward": (9522, 393, 1127, 1816)},
    "TPU v5e": {"forward": (3877, 740, 172, 2120), "backward": (8711, 437, 634, 1945)},
    "TPU v5p": {"forward": (3909, 721, 203, 2150), "backward": (8971, 431, 471, 1962)},
    "TPU v6e": {"forward": (1831, 229, 249, 1900), "backward": (4340, 310, 261, 1894)},
}
"""From results/tpu/kernel_parts.json, made at v0.1-wide: full; begin + end; what a tile
on the diagonal takes beyond its 10 live sub-tiles of 16; what other partial tiles do,
with masks and (forward) the sums that their programs begin with."""

ATTENTION_SHARE = {"forward": 0.6, "backward": 0.5}
"""Share of the peak of kernels of other chips: those of results/2026-11-27-h100.md, of
16 Ki tokens and more."""

WAITED = {"forward": 2**19, "backward": 3 * 2**19}
"""Bytes that a head of a TPU kernel waits for: first copies, and the last dq out."""

COLUMNS = {"TPU v6e": 256}
"""Columns of a matrix unit, if not LANES: heads that are wider take several passes."""


def source(chip: Chip) -> str:
    """Says where the speed of a chip's kernels comes from."""
    if chip.name not in CYCLES:
        shares = ", ".join(f"{n} {s:.0%}" for n, s in ATTENTION_SHARE.items())
        return f"shares of the peak, as one H100 reaches them: {shares}"
    return "bundles of a full tile of 1024 x 1024: " + ", ".join(
        f"{name} {count[0]}" for name, count in CYCLES[chip.name].items()
    )


def speed(chip: Chip, direction: str) -> Speed:
    """Returns the speed of a chip's kernels, no more than their products' peak."""
    least = 2.0 * PRODUCTS[direction] * TILE**2 * LANES / chip.peak_flops
    if chip.name not in CYCLES:
        return Speed(least / ATTENTION_SHARE[direction], 0, 0, 0)
    found = (count / chip.bundles_per_second for count in CYCLES[chip.name][direction])
    full, *rest = found
    return Speed(max(full, least), *rest)


def padded(head_dim: int) -> int:
    """Returns the size of a head in whole LANES."""
    return -(-head_dim // LANES) * LANES


class Times(NamedTuple):
    """Seconds of a device in a pass of a ring.

    kernels: of all ring steps. outlasting: of transfers, after the kernels beside them
    have ended.
    """

    kernels: float
    outlasting: float


@dataclass(frozen=True)
class Ring:
    """Work and communication of a device in one layer's ring.

    sequence: what the ring is of; rows: of the batch, on this device.
    heads, kv_heads: query and key/value heads of the device; head_dim: of each.
    keys_bytes: bytes of a shard's keys and values; gradients_bytes: of their gradients.
      TPUs send heads in whole LANES.
    route: ways that they take. count: steps after the first, if the ring counts them.
    """

    sequence: Sequence
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    keys_bytes: float
    gradients_bytes: float
    route: Route = ONE_WAY
    count: int | None = None

    @classmethod
    def of(
        cls,
        run: Run,
        chip: Chip,
        documents: tuple[int, ...] = (),
        mask: DocumentMask = CAUSAL,
    ) -> "Ring":
        """Computes it for a run on a mesh of this chip.

        documents: lengths of those packed in a row, repeated; none for one document.
        mask: of the layer: see `layer_masks`.
        """
        config, partition = run.config, run.partition
        model, shape = config.model, partition.mesh.shape
        size = partition.ring_size
        length = run.token_shape[1] // size
        # Devices of a Ulysses axis have whole shards in the ring, of some of the heads.
        tokens, devices = run.local_tokens, partition.slices
        tokens *= devices
        way = share_heads(
            model.num_heads // shape["tensor"],
            model.num_kv_heads // shape["tensor"],
            devices,
        )
        sequence = Sequence(run.layout, size, length, documents, mask)
        longest = max(documents, default=None)
        counts = config.remat != "tail" and run.counts_steps(longest)
        route = _route(sequence, chip, counts, config.remat != "tail")
        is_tpu = chip.name.startswith("TPU")
        sent = padded(model.head_dim) if is_tpu else model.head_dim
        numbers = 2 * tokens * (way.kv_heads // devices) * sent
        return cls(
            sequence=sequence,
            rows=tokens // length,
            heads=way.heads // devices,
            kv_heads=way.kv_heads // devices,
            head_dim=model.head_dim,
            keys_bytes=numbers * run.compute_dtype.itemsize,
            gradients_bytes=numbers * FLOAT32,
            route=route,
            count=_counted_steps(route, sequence),
        )

    @property
    def area(self) -> float:
        """Query-key pairs of all rows: see `Sequence.area`."""
        return self.rows * self.sequence.area

    def part(self, name: str) -> "Ring":
        """Returns the ring of the "front" or the "tail" of the queries."""
        sequence = replace(self.sequence, part=name)
        keys_bytes = self.keys_bytes * sequence.keys / sequence.length
        return replace(self, sequence=sequence, keys_bytes=keys_bytes)

    @property
    def schedule(self) -> Schedule:
        """The chunks that the ring sends; counted ones as far as the count."""
        size = self.sequence.ring_size
        found = self.route.schedule(size, self.kv_heads, self.sequence.keys)
        if size == 1 or self.count is None:
            return found
        return Schedule(
            tuple(
                replace(chunk, stops=range(chunk.stops.start, self.count + 1))
                for chunk in found.chunks
                if self.count or chunk.first == 0
            )
        )

    @property
    def ways(self) -> int:
        """Links of a device that the ring's transfers share."""
        return max(1, len({c.order for c in self.schedule.chunks if c.last}))

    def describe(self) -> str:
        """Names the ring's route in a few words."""
        size, ways = self.sequence.ring_size, ("one way", "both ways")
        if size == 1:
            return "devices have whole rows"
        if isinstance(self.route, Counted):
            way = ways[self.route.both_ways]
            return f"{self.count} of {size - 1} steps, {way}: the longest document"
        if isinstance(self.route, Neighbours):
            return "neighbours"
        return ways[min(self.ways, 2) - 1]

    def times(self, chip: Chip, direction: str) -> Times:
        """Returns the seconds of a pass."""
        schedule = self.schedule
        steps = sampled(schedule.last + 1, sorted({0, schedule.last}))
        total = outlasting = 0.0
        for step, weight in steps:
            computed = self._kernels(schedule, step, chip, direction)
            total += weight * computed
            # Half of the local block waits for the last gradients to come home.
            is_first_back = direction == "backward" and step == 0
            beside = computed * (0.5 if is_first_back else 1)
            sent = self._sent(schedule, step, chip, direction)
            outlasting += weight * max(0.0, sent - beside)
            if is_first_back and schedule.last:
                home = self._home(schedule, chip)
                # A ring that counts its steps brings them home with nothing beside.
                outlasting += max(0.0, home - beside * (self.count is None))
        return Times(total, outlasting)

    def _kernels(
        self, schedule: Schedule, step: int, chip: Chip, direction: str
    ) -> float:
        """Returns the seconds of the slowest sampled device in a step."""
        each = speed(chip, direction)
        width = padded(self.head_dim) / LANES
        heads, passes, waited = self.rows * self.heads, width, 0.0
        if chip.name in CYCLES:
            passes = -(-self.head_dim // COLUMNS.get(chip.name, LANES))
            waited = self.rows * self.kv_heads * WAITED[direction] * width
            waited /= chip.hbm_bytes_per_second
        spent = []
        for device in self.sequence.devices:
            seconds = 0.0
            for chunk in schedule.chunks:
                if not chunk.first <= step <= chunk.last:
                    continue
                shifts = int(chunk.shifts(step))
                if self._meets(chunk.first, shifts):
                    continue  # of opposite shards, which come both ways
                share = (chunk.heads[1] - chunk.heads[0]) / self.kv_heads
                begin = self.sequence.slots[0]
                span = tuple(begin + slot for slot in chunk.slots)
                sequence = self.sequence
                if span != sequence.slots:
                    sequence = replace(sequence, span=span)
                source = int(chunk.order.owners(shifts)[device])
                count = sequence.count(device, source)
                tiles = passes * count.pairs / TILE**2 * each.full
                others = max(0, count.partial - count.rows)
                tiles += passes * (count.partial - others) * each.diagonal
                tiles += passes * others * each.partial
                tiles += width * count.rows * each.row
                seconds += share * (heads * tiles + waited)
            spent.append(seconds)
        return max(spent)

    def _meets(self, first: int, shifts: int) -> bool:
        """Whether a counted chunk that goes both ways was here from the other side."""
        is_both = isinstance(self.route, Counted) and self.route.both_ways
        return bool(is_both and first and 2 * shifts >= self.sequence.ring_size)

    def _sent(self, schedule: Schedule, step: int, chip: Chip, direction: str) -> float:
        """Returns the seconds of the transfers beside a step, on the fullest link."""
        links: Counter = Counter()
        for number, chunk in enumerate(schedule.chunks):
            if step < chunk.last:
                self._add(
                    links, schedule, number, chunk.shifts_after(step), self.keys_bytes
                )
            if direction == "backward" and chunk.first < step <= chunk.last:
                shifts = chunk.shifts_after(step - 1)
                self._add(links, schedule, number, shifts, self.gradients_bytes)
        return self._seconds(links, chip)

    def _home(self, schedule: Schedule, chip: Chip) -> float:
        """Returns the seconds in which gradients reach their own devices at last."""
        links: Counter = Counter()
        for number, chunk in enumerate(schedule.chunks):
            if chunk.last:
                shifts = -int(chunk.stops[-1])
                self._add(links, schedule, number, shifts, self.gradients_bytes)
        return self._seconds(links, chip)

    def _add(
        self, links: Counter, schedule: Schedule, number: int, shifts: int, size: float
    ) -> None:
        """Adds a chunk's way, the shorter one round, to the bytes of its links."""
        chunk = schedule.chunks[number]
        shifts, order = shifts % chunk.order.length, chunk.order
        if 2 * shifts > order.length:
            shifts, order = order.length - shifts, order.reversed()
        heads = (chunk.heads[1] - chunk.heads[0]) / self.kv_heads
        slots = (chunk.slots[1] - chunk.slots[0]) / self.sequence.keys
        links[order] += shifts * heads * slots * size

    def _seconds(self, links: Counter, chip: Chip) -> float:
        sizes = list(links.values())
        if not chip.name.startswith("TPU"):
            sizes = [sum(sizes)]  # a switch joins GPUs
        latency = chip.link_latency if any(sizes) else 0.0
        return latency + max(sizes, default=0.0) / chip.interconnect_bytes_per_second


def _route(sequence: Sequence, chip: Chip, is_counted: bool, reads_less: bool) -> Route:
    """Returns the route that `make_ring_attention` chooses on these chips."""
    kind, size = chip.device_kinds[0], sequence.ring_size
    orders = both_ways(size) if rings_both_ways(kind) else ()
    whole = AllShards(orders, cores=kernel_cores(kind))
    if size == 1 or not reads_less or not (sequence.mask.window or is_counted):
        return whole
    length = size * sequence.length
    outline = sequence.mask.within()(
        layout_order(sequence.layout, size, length), length
    )
    return route_within(outline, sequence.layout, size, is_counted) or whole


def _counted_steps(route: Route, sequence: Sequence) -> int | None:
    """Counts the steps after the first that documents need; None if nothing counts."""
    if not isinstance(route, Counted):
        return None
    size = sequence.ring_size
    tokens = layout_order(sequence.layout, size, size * sequence.length)
    visible = Visible(*(bound[None] for bound in sequence.visible(tokens)))
    offsets = [read.offset for read in reads_of(visible, sequence.layout, size)]
    if route.both_ways:
        offsets = [min(offset, size - offset) for offset in offsets]
    return max(offsets, default=0)


def layer_masks(run: Run) -> list[DocumentMask]:
    """Returns what the queries of each layer see: of the run's mask, its window."""
    mask = run.mask

    def within(window: int) -> DocumentMask:
        return DocumentMask(window=min(window, mask.window or window))

    kinds = run.sizes.layer_kinds
    return [within(kind.window) if kind.window else mask for kind in kinds]
