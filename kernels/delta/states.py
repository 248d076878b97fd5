"""Estimates the seconds and bytes of Gated DeltaNet's states; nothing is measured."""

from dataclasses import dataclass

import numpy as np

from ..cost.clock import FLOAT32
from ..devices.chips import Chip
from .rule import CHUNK
from .runs import Runs

TPU_SLOWER = 6
"""Times that a float32 product takes as long as one of bfloat16: a TPU's passes."""

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

    def forward(self, chip: Chip) -> tuple[float, float]:
        """Returns the seconds of a forward's products, and of transfers after them.

        A backward has twice the products, and the same transfers the other way.
        """
        is_tpu = chip.name.startswith("TPU")
        slower = TPU_SLOWER if is_tpu else GPU_SLOWER
        sent = self.sent(is_tpu) / chip.interconnect_bytes_per_second
        sent += len(self.runs.shifts) * chip.link_latency
        return slower * self.flops / chip.peak_flops, sent
