"""Estimates the seconds and bytes of Gated DeltaNet's states; nothing is measured."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..cost.clock import FLOAT32
from ..devices.chips import Chip
from .rule import CHUNK
from .runs import Runs
from .tpu import SIZES

TPU_SLOWER = 6
"""Times that a float32 product takes as long as one of bfloat16: a TPU's passes."""

TPU_SHARE = 0.2
"""Of the rate of these that XLA's program reaches on a TPU, without the kernels."""

GPU_SLOWER = 15
"""The same on an H100 or H200: its float32 units beside its tensor cores."""


@dataclass(frozen=True)
class States:
    """States of a device in a layer with Gated DeltaNet.

    rows: of the batch. heads: of values. depth, values: sizes of a head's state.
    tail: bytes of a row's tokens that the convolution reads before a run.
    """

    runs: Runs
    rows: int
    heads: int
    depth: int
    values: int
    tail: int

    @property
    def columns(self) -> int:
        """Columns of a state: of a map where what is before a run is not known."""
        return self.values + self.depth * (self.runs.devices > 1)

    @property
    def flops(self) -> float:
        """FLOPs of a forward: products of chunks, and of composed maps."""
        runs = self.runs
        depth = self.depth
        columns = self.columns
        chunk = min(CHUNK, runs.length)
        token = 2 * chunk * depth + chunk * (self.values + depth) / 2  # and a solve
        token += chunk**2  # sums of decays
        token += (3 * depth + chunk) * columns  # what the state gives, reads and gets
        token += depth * (columns - depth) * (runs.devices > 1)
        composed = len(runs.shifts[1:]) * depth**2 * columns
        of_head = runs.slots * (runs.length * token + composed)
        return 2 * self.rows * self.heads * of_head

    def sent(self, around: bool = False) -> float:
        """Returns the most bytes that a device sends in a pass; around: over links."""
        runs = self.runs
        total = 0.0
        shape = self.rows * self.heads * self.depth * self.columns
        for number, steps in enumerate(runs.shifts):
            # The tokens before a run are those of one other run: the first shift's.
            size = FLOAT32 * shape + self.rows * self.tail * (not number)
            by_device = np.zeros(runs.devices)
            for pairs, slots, _ in runs.moves(steps):
                for sender, receiver in pairs:
                    far = abs(sender - receiver)
                    far = min(far, runs.devices - far)
                    part = slots.stop - slots.start
                    by_device[sender] += size * part * (far if around else far > 0)
            total += float(by_device.max())
        return total

    def sending(self, chip: Chip) -> float:
        """Returns the seconds of a pass's transfers, which nothing hides."""
        sent = (
            self.sent(chip.name.startswith("TPU")) / chip.interconnect_bytes_per_second
        )
        return sent + len(self.runs.shifts) * chip.link_latency

    def computing(self, chip: Chip) -> tuple[float, float]:
        """Returns the seconds of the rule's forward and of its backward."""
        if chip.name in CYCLES and {self.depth, self.values} <= set(SIZES):
            cycles = CYCLES[chip.name]
            # Of other sizes by their products, beside those of the row.
            chunks = self.flops / PART.flops / chip.bundles_per_second
            forward = chunks * cycles.forward
            backward = chunks * cycles.backward
            if stalls := dict(chip.stalls):  # of full tiles of attention
                forward *= stalls["forward"][0]
                backward *= stalls.get("backward", stalls["forward"])[0]
            return forward, backward
        is_tpu = chip.name.startswith("TPU")
        slower = TPU_SLOWER / TPU_SHARE if is_tpu else GPU_SLOWER
        products = slower * self.flops / chip.peak_flops
        return products, 2 * products


class Cycles(NamedTuple):
    """Bundles of a core for PART: a chunk of a head of 128, with its map.

    forward: where gradients follow. backward: without the forward before it.
    """

    forward: float
    backward: float


PART = States(Runs((), CHUNK, 1, ((0, 0), (1, 0))), 1, 1, 128, 128, 0)
"""What `Cycles` are of: one head's chunk, with a run on another device."""

CYCLES = {
    "TPU v5e": Cycles(2511, 4451),
    "TPU v5p": Cycles(2535, 4406),
    "TPU v6e": Cycles(1665, 2349),
    "TPU7x": Cycles(1638, 2266),
}
"""Of the kernels, half of what two heads take: results/2026-11-29-delta-kernel.md."""
