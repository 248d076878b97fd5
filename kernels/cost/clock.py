"""Estimates the seconds of a layer's ring: its kernels, and what outlasts them.

A kernel lasts as long as its visible pairs at the rate of a full tile, and a little for
each row of tiles and each partial tile (bundles of compiled kernels: CYCLES). Of each
ring step the slowest device stands against its fullest link. Nothing here is measured.
"""

import functools
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..chips import Chip
from ..layouts import Layout, order
from ..masks import Visible
from ..ring.routes import (
    ONE_WAY,
    Chunk,
    Counted,
    Neighbours,
    Route,
    Schedule,
    all_shards,
    reads_of,
    route_within,
)
from .work import TILE, Row, Sequence

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
"""From results/tpu/kernel_parts.json, made at 43b984f: full; begin + end; what a tile
on the diagonal takes beyond its 10 live sub-tiles of 16; what other partial tiles do,
with masks and (forward) the sums that their programs begin with."""

ATTENTION_SHARE = {"forward": 0.6, "backward": 0.5}
"""Share of the peak of kernels of other chips: those of results/2026-11-27-h100.md, of
16 Ki tokens and more."""

WAITED = {"forward": 2**19, "backward": 3 * 2**19}
"""Bytes that a head of a TPU kernel waits for: first copies, and the last dq out."""

SMALL = {"forward": 9e-6, "backward": 11e-6}
"""Seconds of a TPU's ring step in instructions that move a few bytes, by XLA's cycles:
8 forward and 14 backward on v5p, between keys that go both ways."""

MOST_STEPS = 64
"""Ring steps that are looked at."""

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
    have ended. small: of the steps' other instructions.
    """

    kernels: float
    outlasting: float
    small: float


class Heads(NamedTuple):
    """Heads of a device, and how they are sent.

    query, key_value: how many. size: numbers of each. itemsize: bytes of a number.
    """

    query: int
    key_value: int
    size: int
    itemsize: int = 2


@dataclass(frozen=True)
class Ring:
    """Work and communication of a device in one layer's ring.

    sequence: what the ring is of; rows: of the batch, on this device.
    sent: numbers of a head that travel: TPUs send whole LANES.
    route: ways that keys and values take. count: steps after the first, if the ring
      counts them.
    """

    sequence: Sequence
    rows: int
    heads: Heads
    sent: int
    route: Route = ONE_WAY
    count: int | None = None

    @classmethod
    def of(
        cls,
        sequence: Sequence,
        rows: int,
        heads: Heads,
        chip: Chip,
        *,
        counts: bool = False,
        one_way: bool = False,
    ) -> "Ring":
        """Computes it for devices of a chip.

        counts: whether the ring may end where the documents do.
        one_way: as of `make_ring_attention`.
        """
        route = _route(sequence, chip, counts, one_way)
        sent = padded(heads.size) if chip.name.startswith("TPU") else heads.size
        count = None
        if isinstance(route, Counted):
            shape = sequence.layout, sequence.ring_size, sequence.length
            count = _most_steps(sequence.row, *shape, route.both_ways)
        return cls(sequence, rows, heads, sent, route, count)

    @property
    def keys_bytes(self) -> float:
        """Bytes of a shard's keys and values."""
        numbers = (
            2 * self.rows * self.sequence.length * self.heads.key_value * self.sent
        )
        return numbers * self.heads.itemsize

    @property
    def gradients_bytes(self) -> float:
        """Bytes of their gradients."""
        return self.keys_bytes / self.heads.itemsize * FLOAT32

    @property
    def area(self) -> float:
        """Query-key pairs of all rows: see `Sequence.area`."""
        return self.rows * self.sequence.area

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The chunks that the ring sends; counted ones as far as the count."""
        size = self.sequence.ring_size
        found = self.route.schedule(size, self.heads.key_value, self.sequence.length)
        if size == 1 or self.count is None:
            return found
        return Schedule(
            tuple(
                replace(x, stops=range(x.stops.start, x.way * (self.count + 1), x.way))
                for x in found.chunks
                if self.count or x.first == 0
            )
        )

    @property
    def ways(self) -> int:
        """Links of a device that the ring's transfers share."""
        size = self.sequence.ring_size
        return max(1, len({c.way % size for c in self.schedule.chunks if c.last}))

    def describe(self) -> str:
        """Names the ring's route in a few words."""
        size, ways = self.sequence.ring_size, ("one way", "both ways")
        if size == 1:
            return "no ring"
        if isinstance(self.route, Counted):
            return f"{self.count}/{size - 1} steps"
        if isinstance(self.route, Neighbours):
            return "neighbours"
        return ways[min(self.ways, 2) - 1]

    def times(self, chip: Chip, direction: str) -> Times:
        """Returns the seconds of a pass."""
        last, spent = self.schedule.last, self._chunk_seconds(chip, direction)
        total = outlasting = 0.0
        for step, weight in sampled(last + 1):
            computed = self._kernels(step, spent)
            total += weight * computed
            # Half of the local block waits for the last gradients to come home.
            is_first_back = direction == "backward" and step == 0
            beside = computed * (0.5 if is_first_back else 1)
            sent = self._sent(step, chip, direction)
            outlasting += weight * max(0.0, sent - beside)
            if is_first_back and last:
                home = self._home(chip)
                # A ring that counts its steps brings them home with nothing beside.
                outlasting += max(0.0, home - beside * (self.count is None))
        small = SMALL[direction] * last if chip.name.startswith("TPU") else 0.0
        return Times(total, outlasting, small)

    def _chunk_seconds(self, chip: Chip, direction: str) -> list[np.ndarray]:
        """Returns the seconds of each chunk's kernel: (devices, shards)."""
        each = speed(chip, direction)
        width = padded(self.heads.size) / LANES
        heads, passes, waited = self.rows * self.heads.query, width, 0.0
        if chip.name in CYCLES:
            passes = -(-self.heads.size // COLUMNS.get(chip.name, LANES))
            waited = self.rows * self.heads.key_value * WAITED[direction] * width
            waited /= chip.hbm_bytes_per_second
        found = []
        for chunk in self.schedule.chunks:
            work = self.sequence.work(chunk.slots)
            others = (work.partial - work.rows).clip(0)
            tiles = passes * work.pairs / TILE**2 * each.full
            tiles += passes * (work.partial - others) * each.diagonal
            tiles += passes * others * each.partial
            tiles += width * work.rows * each.row
            share = (chunk.heads[1] - chunk.heads[0]) / self.heads.key_value
            found.append(share * (heads * tiles + waited))
        return found

    def _kernels(self, step: int, spent: list[np.ndarray]) -> float:
        """Returns the seconds of the slowest device in a step."""
        devices, half = self.sequence.devices, self.sequence.ring_size / 2
        is_both = isinstance(self.route, Counted) and self.route.both_ways
        seconds = np.zeros(devices.size)
        for chunk, of in zip(self.schedule.chunks, spent, strict=True):
            if not chunk.first <= step <= chunk.last:
                continue
            shifts = chunk.shifts(step)
            # Opposite shards come both ways, and count once.
            if not (is_both and chunk.first and abs(shifts) >= half):
                sources = (devices - shifts) % self.sequence.ring_size
                seconds += of[np.arange(devices.size), sources]
        return float(seconds.max())

    def _sent(self, step: int, chip: Chip, direction: str) -> float:
        """Returns the seconds of the transfers beside a step, on the fullest link."""
        moves, is_back = [], direction == "backward"
        for chunk in self.schedule.chunks:
            if step < chunk.last:
                moves.append((chunk, chunk.shifts_after(step), self.keys_bytes))
            if is_back and chunk.first < step <= chunk.last:
                shifts = chunk.shifts_after(step - 1)
                moves.append((chunk, shifts, self.gradients_bytes))
        return self._seconds(moves, chip)

    def _home(self, chip: Chip) -> float:
        """Returns the seconds in which gradients reach their own devices at last."""
        size = self.gradients_bytes
        moves = [(c, -c.stops[-1], size) for c in self.schedule.chunks if c.last]
        return self._seconds(moves, chip)

    def _seconds(self, moves: list[tuple[Chunk, int, float]], chip: Chip) -> float:
        """Returns the seconds of chunks' moves, the shorter way round, at a time.

        moves: chunks, their shifts, and the bytes of a whole shard.
        """
        links: dict[int, float] = defaultdict(float)  # by the next device's place
        devices = self.sequence.ring_size
        for chunk, shifts, size in moves:
            way = chunk.way
            shifts = shifts * way % devices
            if 2 * shifts > devices:
                shifts, way = devices - shifts, -way
            heads = (chunk.heads[1] - chunk.heads[0]) / self.heads.key_value
            slots = (chunk.slots[1] - chunk.slots[0]) / self.sequence.length
            links[way % devices] += shifts * heads * slots * size
        sizes = list(links.values())
        if not chip.name.startswith("TPU"):
            sizes = [sum(sizes)]  # a switch joins GPUs
        latency = chip.link_latency if any(sizes) else 0.0
        return latency + max(sizes, default=0.0) / chip.interconnect_bytes_per_second


def sampled(steps: int) -> list[tuple[int, float]]:
    """Samples a ring's steps, each with the number that it stands for.

    All of them up to MOST_STEPS; else the first, the last, and others evenly.
    """
    if steps <= MOST_STEPS:
        return [(step, 1.0) for step in range(steps)]
    others = np.linspace(1, steps - 2, MOST_STEPS - 2).astype(int).tolist()
    weight = (steps - 2) / len(others)
    return [(0, 1.0), *((step, weight) for step in others), (steps - 1, 1.0)]


def _route(sequence: Sequence, chip: Chip, counts: bool, one_way: bool) -> Route:
    """Returns the route that `make_ring_attention` chooses on these chips."""
    size, row = sequence.ring_size, sequence.row
    whole = all_shards(one_way, chip.device_kinds[0])
    if size == 1 or not (row.window or counts):
        return whole
    short = _short_route(row, sequence.layout, size, sequence.length, counts, one_way)
    return short or whole


@functools.lru_cache(maxsize=256)
def _short_route(
    row: Row, layout: Layout, size: int, length: int, counts: bool, one_way: bool
) -> Route | None:
    index = order(layout, size, size * length)
    outline = row.within(index, size * length)
    return route_within(outline, layout, size, counts, one_way)


@functools.lru_cache(maxsize=256)
def _most_steps(
    row: Row, layout: Layout, size: int, length: int, both_ways: bool
) -> int:
    """Counts the steps after the first that documents need."""
    bounds = row.at(order(layout, size, size * length))
    visible = Visible(*(bound[..., None, :] for bound in bounds))
    offsets = [read.offset for read in reads_of(visible, layout, size)]
    if both_ways:
        offsets = [min(offset, size - offset) for offset in offsets]
    return max(offsets, default=0)
