"""Estimates the seconds of a layer's ring: its kernels, and what outlasts them.

A kernel takes the time of its visible pairs at the rate of a full tile, and an overhead
for each row of tiles and each partial tile (bundles of compiled kernels: CYCLES). In
each ring step the slowest device is compared with its fullest link. Nothing here is
measured.
"""

import functools
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..devices.chips import Chip
from ..layouts import order
from ..masks import Visible
from ..ring.routes import (
    ONE_WAY,
    AllShards,
    Chunk,
    Counted,
    Neighbours,
    Route,
    Schedule,
    all_shards,
    backward_route,
    reads_of,
    route_within,
)
from .speed import COLUMNS, CYCLES, LANES, padded, speed
from .work import TILE, RowOnRing

FLOAT32 = 4
"""Bytes of a number of a gradient, or of a state."""


WAITED = {"forward": 2**19, "backward": 3 * 2**19}
"""Bytes that a head of a TPU kernel waits for: first copies, and the last dq out."""

SMALL = {"forward": 9e-6, "backward": 11e-6}
"""Seconds of a TPU's ring step in instructions that move a few bytes, by XLA's cycles:
8 forward and 14 backward on v5p, between keys that go both ways."""

MOST_STEPS = 64
"""Ring steps that are looked at."""


class Times(NamedTuple):
    """Seconds of a device in a pass of a ring.

    kernels: of all ring steps. outlasting: of transfers, after the kernels beside them
    have ended. small: of the steps' other instructions.
    """

    kernels: float
    outlasting: float
    small: float


class Move(NamedTuple):
    """A transfer of a chunk by some devices. size: bytes of a whole shard."""

    chunk: Chunk
    shifts: int
    size: float


class Part(NamedTuple):
    """What a ring step does at a time: kernels for some seconds, and moves."""

    computed: float
    moves: list[Move]


class Heads(NamedTuple):
    """Heads of a device, and how they are sent.

    query, key_value: how many. size: numbers of each. itemsize: bytes of a number.
    """

    query: int
    key_value: int
    size: int
    itemsize: int = 2


@dataclass(frozen=True)
class RingCost:
    """Work and communication of a device in one layer's ring.

    sequence: a row, and its layout on the ring. rows: of the batch, on this device.
    sent: numbers of a head that travel: TPUs send whole LANES.
    route: ways that keys and values take. count: steps after the first, if the ring
      counts them.
    """

    sequence: RowOnRing
    rows: int
    heads: Heads
    sent: int
    route: Route = ONE_WAY
    count: int | None = None

    @classmethod
    def of(
        cls,
        sequence: RowOnRing,
        rows: int,
        heads: Heads,
        chip: Chip,
        *,
        counts: bool = False,
        one_way: bool = False,
    ) -> "RingCost":
        """Computes it for devices of a chip.

        counts: whether the ring may end where the documents do.
        one_way: as of `make_ring_attention`.
        """
        route = _route(sequence, chip, counts, one_way)
        sent = padded(heads.size) if chip.name.startswith("TPU") else heads.size
        count = None
        if isinstance(route, Counted):
            count = _most_steps(sequence, route.both_ways)
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
        # In float32 until the ring is done, whatever the type of the keys.
        return self.keys_bytes / self.heads.itemsize * FLOAT32

    @property
    def area(self) -> float:
        """Query-key pairs of all rows: see `RowOnRing.area`."""
        return self.rows * self.sequence.area

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The chunks that the ring sends; counted ones as far as the count."""
        size = self.sequence.ring_size
        whole = self.route.schedule(size, self.heads.key_value, self.sequence.length)
        if size == 1 or self.count is None:
            return whole
        chunks = []
        for chunk in whole.chunks:
            # With a count of 0 a chunk that only visits others stays at home.
            if self.count or chunk.first == 0:
                end = chunk.way * (self.count + 1)
                stops = range(chunk.stops.start, end, chunk.way)
                chunks.append(replace(chunk, stops=stops))
        return Schedule(tuple(chunks))

    @property
    def ways(self) -> int:
        """Links of a device that the ring's transfers share."""
        size = self.sequence.ring_size
        moving = [chunk for chunk in self.schedule.chunks if chunk.last]
        # Modulo the ring: between two devices both ways are one link.
        return max(1, len({chunk.way % size for chunk in moving}))

    def describe(self) -> str:
        """Names the ring's route in a few words."""
        size = self.sequence.ring_size
        if size == 1:
            return "no ring"
        if isinstance(self.route, Counted):
            return f"{self.count}/{size - 1} steps"
        if isinstance(self.route, Neighbours):
            return "neighbours"
        return "one way" if self.ways == 1 else "both ways"

    def times(self, chip: Chip, direction: str) -> Times:
        """Returns the seconds of a pass."""
        if direction == "backward":
            rows = self.sequence.length * self.heads.query // self.heads.key_value
            route = backward_route(self.route, rows, chip.device_kinds[0])
            if route != self.route:
                return replace(self, route=route).times(chip, direction)
        last = self.schedule.last
        is_tpu = chip.name.startswith("TPU")
        chunk_seconds = self._chunk_seconds(chip, direction)
        total = outlasting = 0.0
        for step, weight in sampled(last + 1):
            for part in self._parts(step, direction, chunk_seconds):
                total += weight * part.computed
                sent = self._seconds(part.moves, chip)
                outlasting += weight * max(0.0, sent - part.computed)
        small = SMALL[direction] * last if is_tpu else 0.0
        return Times(total, outlasting, small)

    def _chunk_seconds(self, chip: Chip, direction: str) -> list[np.ndarray]:
        """Returns the seconds of each chunk's kernel: (devices, shards)."""
        cost = speed(chip, direction)
        width = padded(self.heads.size) / LANES
        passes = width
        waited = 0.0
        if chip.name in CYCLES:
            # Products of a wide head fill the matrix unit several times; what else a
            # program does grows with the width.
            passes = -(-self.heads.size // COLUMNS.get(chip.name, LANES))
            waited = self.rows * self.heads.key_value * WAITED[direction] * width
            waited /= chip.hbm_bytes_per_second
        heads = self.rows * self.heads.query
        seconds = []
        for chunk in self.schedule.chunks:
            work = self.sequence.work(chunk.slots)
            # The first partial tile of each row is taken for one on the diagonal.
            others = (work.partial - work.rows).clip(0)
            tiles = passes * work.pairs / TILE**2 * cost.full
            tiles += passes * (work.partial - others) * cost.diagonal
            tiles += passes * others * cost.partial
            tiles += width * work.rows * cost.row
            share = (chunk.heads[1] - chunk.heads[0]) / self.heads.key_value
            seconds.append(share * (heads * tiles + waited))
        return seconds

    def _parts(
        self, step: int, direction: str, chunk_seconds: list[np.ndarray]
    ) -> list[Part]:
        """Returns what a step does at a time. chunk_seconds: of `_chunk_seconds`."""
        chunks = self.schedule.chunks
        takes_turns = isinstance(self.route, AllShards) and self.route.takes_turns
        if takes_turns and len(chunks) == 2:
            return self._turns(step, chunk_seconds)
        computed = self._kernels(step, chunk_seconds)
        moves = []
        for chunk in chunks:
            moves += self._key_moves(chunk, step)
        if direction == "forward":
            return [Part(computed, moves)]
        for chunk in chunks:
            if step <= chunk.last:
                moves += self._gradient_moves(chunk, step - 1)
        if step or not self.schedule.last:
            return [Part(computed, moves)]
        # Half of the local block waits for the last gradients to come home.
        home = []
        for chunk in chunks:
            home += self._gradient_moves(chunk, chunk.last)
        if self.count is None:
            return [Part(computed / 2, moves), Part(computed / 2, home)]
        # A ring that counts its steps brings them home with nothing beside.
        return [Part(computed / 2, moves), Part(computed / 2, []), Part(0.0, home)]

    def _turns(self, step: int, chunk_seconds: list[np.ndarray]) -> list[Part]:
        """Does the same for the backward of two chunks that take turns."""
        first, second = self.schedule.chunks
        seconds_of_first, seconds_of_second = chunk_seconds
        of_first = self._kernels(step, [seconds_of_first, 0 * seconds_of_second])
        of_second = self._kernels(step, [0 * seconds_of_first, seconds_of_second])
        beside_first = self._key_moves(first, step)
        beside_first += self._gradient_moves(second, step - 1)
        beside_second = self._key_moves(second, step)
        beside_second += self._gradient_moves(first, step)
        if step:
            return [Part(of_first, beside_first), Part(of_second, beside_second)]
        # Half of the first chunk's local block waits for the second's gradients.
        beside_last = self._gradient_moves(second, second.last)
        if self.schedule.comes_home:
            beside_last += self._key_moves(first, first.last)
        return [
            Part(of_first / 2, beside_first),
            Part(of_second, beside_second),
            Part(of_first / 2, beside_last),
        ]

    def _kernels(self, step: int, chunk_seconds: list[np.ndarray]) -> float:
        """Returns the seconds of the slowest device in a step: all wait for it."""
        devices = self.sequence.devices
        half = self.sequence.ring_size / 2
        is_both = isinstance(self.route, Counted) and self.route.both_ways
        seconds = np.zeros(devices.size)
        # of_shards: (devices, N), by whose keys visit.
        for chunk, of_shards in zip(self.schedule.chunks, chunk_seconds, strict=True):
            if not chunk.first <= step <= chunk.last:
                continue
            shifts = chunk.shifts(step)
            # Opposite shards come both ways, and count once.
            if not (is_both and chunk.first and abs(shifts) >= half):
                sources = (devices - shifts) % self.sequence.ring_size
                seconds += of_shards[np.arange(devices.size), sources]
        return float(seconds.max())

    def _key_moves(self, chunk: Chunk, step: int) -> list[Move]:
        """Returns how a chunk's keys go on beside a step."""
        if step < chunk.last:
            return [Move(chunk, chunk.shifts_after(step), self.keys_bytes)]
        if self.schedule.comes_home:
            return [Move(chunk, chunk.way, self.keys_bytes)]
        return []

    def _gradient_moves(self, chunk: Chunk, step: int) -> list[Move]:
        """Returns how the gradients that a step added to follow the keys."""
        if step < chunk.first or not chunk.last:
            return []
        is_last = step == chunk.last
        # From the last stop they go home at once.
        shifts = -chunk.stops[-1] if is_last else chunk.shifts_after(step)
        return [Move(chunk, shifts, self.gradients_bytes)]

    def _seconds(self, moves: list[Move], chip: Chip) -> float:
        """Returns the seconds of moves on the fullest link, each the shorter way."""
        devices = self.sequence.ring_size
        # Bytes by link, which is named by how far after this device the next one is.
        links: dict[int, float] = defaultdict(float)
        for chunk, shifts, size in moves:
            way = chunk.way
            shifts = shifts * way % devices
            if 2 * shifts > devices:
                shifts = devices - shifts
                way = -way
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


def _route(sequence: RowOnRing, chip: Chip, counts: bool, one_way: bool) -> Route:
    """Returns the route that `make_ring_attention` chooses on these chips."""
    whole = all_shards(one_way, chip.device_kinds[0])
    # Of causal and full rows every device's shard is read by most of the others.
    if sequence.ring_size == 1 or not (sequence.row.window or counts):
        return whole
    return _short_route(sequence, counts, one_way) or whole


@functools.lru_cache(maxsize=256)
def _short_route(sequence: RowOnRing, counts: bool, one_way: bool) -> Route | None:
    size = sequence.ring_size
    tokens = size * sequence.length
    outline = sequence.row.within(order(sequence.layout, size, tokens), tokens)
    return route_within(outline, sequence.layout, size, counts, one_way)


@functools.lru_cache(maxsize=256)
def _most_steps(sequence: RowOnRing, both_ways: bool) -> int:
    """Counts the steps after the first that documents need."""
    size = sequence.ring_size
    token = order(sequence.layout, size, size * sequence.length)
    k_start, k_end = sequence.row.at(token)  # (T,) or (m, T)
    visible = Visible(k_start[..., None, :], k_end[..., None, :])
    offsets = [read.offset for read in reads_of(visible, sequence.layout, size)]
    if both_ways:
        offsets = [min(offset, size - offset) for offset in offsets]
    return max(offsets, default=0)
