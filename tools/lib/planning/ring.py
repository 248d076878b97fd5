"""Times of a layer's ring: its kernels, and the transfers beside each of them.

What travels beside which kernel, and over which links, is in `routes`, from the
schedule that the ring runs. Of each part of a step the kernels of the slowest device
stand against the fullest link. Between GPUs, which a switch joins, a device's links are
one, whatever the way.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp
import ml_collections

from data.document_mask import DocumentMask
from kernels.device import kernel_cores, rings_both_ways
from kernels.layouts import order
from kernels.masks import Visible
from kernels.schedule import ONE_WAY, Route, checked_walks, default_walks
from kernels.ulysses import share_heads
from tasks import base, batch_rows
from tasks.execution import local_tokens
from tasks.mask import document_mask
from tasks.task import TASKS
from tools.lib.planning.kernels import (
    FLOAT32,
    LANES,
    PRODUCTS,
    TILE,
    Kernels,
    Launched,
    padded,
)
from tools.lib.planning.ring_steps import CAUSAL, Sequence, pairs, sampled, work_on
from tools.lib.planning.routes import (
    Attended,
    Part,
    Pass,
    counted_steps,
    describe,
    route_of,
)
from training.chips import Chip
from training.mesh import Partition

LONGEST = 2**18
"""Tokens of a shard up to which `Ring.hides_from` looks."""

FAR = 2.0
"""How much longer than transfers kernels are where longer shards need no look."""


class Times(NamedTuple):
    """Seconds of a device in a pass of a ring.

    kernels: of all ring steps. transfers: on the fullest link beside each.
    outlasting: transfers, after the kernels beside them have ended.
    hiding: the least that kernels last over the transfers beside them, in steps with
      shards of other devices; None where nothing is sent.
    """

    kernels: float
    transfers: float
    outlasting: float
    hiding: float | None


@dataclass(frozen=True)
class Ring:
    """Work and communication of a device in one layer's ring.

    sequence: what the ring is of; rows: of the batch, on this device.
    heads, kv_heads: query and key/value heads of the device; head_dim: of each.
    keys_bytes: bytes of a shard's keys and values; gradients_bytes: of their gradients.
      TPUs send heads in whole LANES.
    route: ways that they take. turns: in which a device computes a step backward.
    count: steps after the first, where the ring counts them.
    """

    sequence: Sequence
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    keys_bytes: float
    gradients_bytes: float
    route: Route = ONE_WAY
    turns: int = 1
    count: int | None = None

    @classmethod
    def of(
        cls,
        config: ml_collections.ConfigDict,
        partition: Partition,
        chip: Chip,
        documents: tuple[int, ...] = (),
        mask: DocumentMask = CAUSAL,
    ) -> "Ring":
        """Computes it for a config on a mesh of this chip.

        documents: lengths of those packed in a row, repeated; none for one document.
        mask: of the layer: see `layer_masks`.
        """
        model, shape = config.model, partition.mesh.shape
        length = batch_rows.batch_shape(config, partition)[1] // partition.ring_size
        # Devices of a Ulysses axis have whole shards in the ring, of some of the heads.
        tokens, devices = local_tokens(config, partition), partition.slices
        tokens *= devices
        way = share_heads(
            model.num_heads // shape["tensor"],
            model.num_kv_heads // shape["tensor"],
            devices,
        )
        layout, size = base.attention_system(config).layout, partition.ring_size
        is_tpu = chip.name.startswith("TPU")
        walks = checked_walks(base.walks(config, partition), size)
        kind = chip.device_kinds[0]
        walks = walks or (default_walks(size) if rings_both_ways(kind) else ())
        route = Route(walks)
        if config.remat != "tail":
            longest = max(documents, default=None)
            counts = base.counts_steps(config, partition, longest)
            route = route_of(layout, size, length, mask, walks, counts)
        route = replace(route, cores=kernel_cores(kind))
        sequence = Sequence(layout, size, length, documents, mask)
        sent = padded(model.head_dim) if is_tpu else model.head_dim
        numbers = 2 * tokens * (way.kv_heads // devices) * sent
        return cls(
            sequence=sequence,
            rows=tokens // length,
            heads=way.heads // devices,
            kv_heads=way.kv_heads // devices,
            head_dim=model.head_dim,
            dtype=config.compute_dtype,
            keys_bytes=numbers * jnp.dtype(config.compute_dtype).itemsize,
            gradients_bytes=numbers * FLOAT32,
            route=route,
            turns=1 + is_tpu,
            count=_count(route, sequence),
        )

    @property
    def steps(self) -> int:
        """Devices in the ring."""
        return self.sequence.ring_size

    @property
    def area(self) -> float:
        """Query-key pairs of all rows: see `Sequence.area`."""
        return self.rows * self.sequence.area

    def part(self, name: str) -> "Ring":
        """Returns the ring of the "front" or the "tail" of the queries."""
        sequence = replace(self.sequence, part=name)
        keys_bytes = self.keys_bytes * sequence.keys / sequence.length
        return replace(self, sequence=sequence, keys_bytes=keys_bytes)

    def at(self, length: int) -> "Ring":
        """Returns the ring of shards of another length, without documents."""
        more = length / self.sequence.length
        return replace(
            self,
            sequence=replace(self.sequence, length=length, documents=()),
            keys_bytes=self.keys_bytes * more,
            gradients_bytes=self.gradients_bytes * more,
        )

    def once(self, direction: str) -> Pass:
        """Returns the ring's kernels and transfers, forward or backward."""
        shape = self.kv_heads, self.sequence.keys
        options = {"turns": self.turns, "count": self.count}
        return Pass.of(self.route, self.steps, shape, direction, **options)

    def describe(self) -> str:
        """Names the ring's route."""
        return describe(self.route, self.steps, self.once("forward"), self.count)

    def times(self, kernels: Kernels, direction: str) -> Times:
        """Returns the seconds of a pass."""
        found, spent = self.once(direction), _Calls(self, kernels, direction)
        visiting, local = [], []
        total = transfers = outlasting = 0.0
        for step, weight in self._sampled(found):
            for part in found.parts(step):
                computed = spent.seconds(found, part)
                sent = self._transfer_seconds(kernels.chip, found, part)
                total += weight * computed
                transfers += weight * sent
                outlasting += weight * max(0.0, sent - computed)
                if sent:
                    is_other = 0 < step <= found.schedule.last
                    (visiting if is_other else local).append(computed / sent)
        hiding = min(visiting or local, default=None)
        return Times(total, transfers, outlasting, hiding)

    def hiding(self, kernels: Kernels) -> float | None:
        """Returns that of `Times`, of the worse direction."""
        found = (self.times(kernels, direction).hiding for direction in PRODUCTS)
        return min((one for one in found if one is not None), default=None)

    def hides_from(self, kernels: Kernels) -> float | None:
        """Finds from which length of shards on, in tokens, transfers are hidden.

        Between whole tiles, of which longer kernels consist, it is interpolated.

        Returns:
          0 for any length; None if not up to LONGEST.
        """

        def hiding(length: int) -> float:
            found = self.at(length).hiding(kernels)
            return math.inf if found is None else found

        # Short shards may hide theirs too, as their kernels hardly get any shorter.
        begin, end, found = 0, LANES, 0.0
        while end <= LONGEST and (found := hiding(end)) < FAR:
            begin = end if found < 1 else begin
            end *= 2
        if found < FAR:
            return None
        if not begin:
            return 0
        end = 2 * begin
        while end - begin > TILE:
            middle = (begin + end) // 2 // TILE * TILE
            is_hidden = hiding(middle) >= 1
            begin, end = (begin, middle) if is_hidden else (middle, end)
        least, most = hiding(begin), hiding(end)
        return begin + (end - begin) * (1 - least) / (most - least)

    def _sampled(self, found: Pass) -> list[tuple[int, float]]:
        last = found.schedule.last
        return sampled(found.steps, sorted({0, last, found.steps - 1}))

    def _transfer_seconds(self, chip: Chip, found: Pass, part: Part) -> float:
        is_tpu = chip.name.startswith("TPU")
        loads = found.loads(part).values() if is_tpu else [found.total(part)]
        sizes = (
            one.keys * self.keys_bytes + one.gradients * self.gradients_bytes
            for one in loads
        )
        return max(sizes, default=0.0) / chip.interconnect_bytes_per_second


@dataclass
class _Calls:
    """Seconds of the kernels of a pass."""

    ring: Ring
    kernels: Kernels
    direction: str

    def seconds(self, found: Pass, part: Part) -> float:
        """Returns those of a part, of the slowest sampled device."""
        return max(
            sum(self._call(found, one, device) for one in part.attended)
            for device in self.ring.sequence.devices
        )

    def _call(self, found: Pass, one: Attended, device: int) -> float:
        ring, piece = self.ring, found.schedule.pieces[one.piece]
        if ring.route.counts_both_ways and piece.first and 2 * one.hops >= ring.steps:
            return 0.0  # of opposite shards, which come both ways
        begin = ring.sequence.slots[0]
        span = tuple(begin + slot for slot in piece.slots)
        sequence = ring.sequence
        if span != sequence.slots:
            sequence = replace(sequence, span=span)
        ends = device, int(piece.walk.sources(one.hops)[device])
        kv_heads = piece.heads[1] - piece.heads[0]
        heads = kv_heads * ring.heads // ring.kv_heads
        if not self.kernels.parts:
            each = padded(ring.head_dim) / LANES * self.kernels.seconds[self.direction]
            half = 1 if one.half is None else 0.5
            return half * ring.rows * heads * each * pairs(sequence, *ends)
        kernel = Launched.of(
            self.kernels.chip.name.removeprefix("TPU "),
            self.direction,
            one.hops > 0 or piece.first > 0,
            (ring.rows, len(sequence.queries), heads, ring.head_dim),
            (sequence.keys, kv_heads),
            ring.dtype,
        )
        stacks = ring.rows * kv_heads * kernel.stacks
        if self.direction == "backward":  # whose heads are shared out to the cores
            stacks = -(-stacks // kernel.cores) * kernel.cores
        work = work_on(sequence, kernel.blocks, self.direction, ends, one.half)
        return stacks * self.kernels.call_seconds(kernel, work)


def layer_masks(config: ml_collections.ConfigDict) -> list[DocumentMask]:
    """Returns what the queries of each layer see: of the run's mask, its window."""
    mask = document_mask(config)

    def within(window: int) -> DocumentMask:
        return DocumentMask(window=min(window, mask.window or window))

    kinds = TASKS[config.task].sizes(config).layer_kinds
    return [within(kind.window) if kind.window else mask for kind in kinds]


def _count(route: Route, sequence: Sequence) -> int | None:
    if not route.is_counted:
        return None
    total = sequence.ring_size * sequence.length
    tokens = order(sequence.layout, sequence.ring_size, total)
    bounds = (bound[None] for bound in sequence.visible(tokens))
    return counted_steps(route, Visible(*bounds), sequence.layout, sequence.ring_size)
