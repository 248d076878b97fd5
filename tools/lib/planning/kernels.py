"""Times of the attention kernels and transfers of a ring step, for the planner.

Nothing here is measured on the device: bundles are those of static schedules.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import ml_collections
import numpy as np

from kernels.layouts import Layout
from kernels.tile_ranges import key_ranges
from tasks import base
from tools.lib.benchmarks.rows import ROOT
from tools.lib.planning.memory import local_tokens
from training.chips import Chip
from training.mesh import Partition

SCHEDULES = ROOT / "results" / "tpu"
"""Rows of tools/tpu_schedule.py: bundles of a tile, by chip and direction."""

ATTENTION_SHARE = {"forward": 0.6, "backward": 0.5}
"""Share of the peak assumed for kernels without a schedule in SCHEDULES."""

TILE = 1024
"""Rows and keys of the tile that the schedules are of; its head size is LANES."""

LANES = 128
SUB_TILE = 256
"""Rows and keys of the sub-tiles that a partial tile is computed in."""

PRODUCTS = {"forward": 2, "backward": 5}
"""Matrix products of a tile."""

SAMPLED_STEPS = 8

COUNTED = (
    f"one causal document a row, live sub-tiles of {SUB_TILE} x {SUB_TILE}, the "
    "slowest device of each ring step"
)
"""What the area of a ring step counts."""


@dataclass(frozen=True)
class Kernels:
    """Speed of the attention kernels on a device.

    seconds: time of one query-key pair of a head of LANES numbers, by direction.
    source: where that comes from.
    """

    seconds: dict[str, float]
    source: str

    @classmethod
    def of(cls, chip: Chip, schedules: Path = SCHEDULES) -> "Kernels":
        """Reads the kernels' schedules where there are any, else assumes a share."""
        bundles = {name: _bundles(chip, name, schedules) for name in PRODUCTS}
        flops = {name: 2.0 * LANES * count for name, count in PRODUCTS.items()}
        if None in bundles.values():
            shares = ", ".join(f"{n} {s:.0%}" for n, s in ATTENTION_SHARE.items())
            return cls(
                {n: flops[n] / (ATTENTION_SHARE[n] * chip.peak_flops) for n in flops},
                f"assumed shares of the peak: {shares}",
            )
        least = {name: flops[name] / chip.peak_flops for name in flops}
        pairs = chip.bundles_per_second * TILE**2
        return cls(
            {n: max(least[n], bundles[n] / pairs) for n in flops},
            "static schedules, bundles of a full tile of 1024 x 1024: "
            + ", ".join(f"{name} {count:.0f}" for name, count in bundles.items()),
        )


def _bundles(chip: Chip, direction: str, schedules: Path) -> float | None:
    path = schedules / f"schedule_{direction}.json"
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    for row in rows:
        tile = row["block_q"], row["block_k"], row["head_dim"], row["dtype"]
        ours = row["kernel"] == "ours" and row["device_kind"] in chip.device_kinds
        if ours and tile == (TILE, TILE, LANES, "bfloat16") and row["group"] == 1:
            return row["bundles"]
    return None


@dataclass(frozen=True)
class Ring:
    """Work and communication of a device in one step of one layer's ring.

    area: query-key pairs that the slowest device of a ring step computes, the mean
      over the steps; steps: devices in the ring.
    heads: query heads of the device, in units of LANES numbers.
    keys_bytes: bytes of the keys and values sent; gradients_bytes: of their gradients.
      TPUs send heads in whole LANES.
    """

    area: float
    steps: int
    heads: float
    keys_bytes: int
    gradients_bytes: int

    @classmethod
    def of(
        cls, config: ml_collections.ConfigDict, partition: Partition, chip: Chip
    ) -> "Ring":
        """Computes both for a config on a mesh of this chip."""
        model, shape = config.model, partition.mesh.shape
        steps, columns = partition.ring_size, config.data.context_tokens
        tokens = local_tokens(config, partition)
        rows = tokens // (columns // steps)
        layout = base.attention_system(config).layout
        depth = -(-model.head_dim // LANES) * LANES
        sent = depth if chip.name.startswith("TPU") else model.head_dim
        numbers = 2 * tokens * (model.num_kv_heads // shape["tensor"]) * sent
        return cls(
            area=rows * mean_area(layout, steps, columns // steps),
            steps=steps,
            heads=model.num_heads // shape["tensor"] * depth / LANES,
            keys_bytes=numbers * jnp.dtype(config.compute_dtype).itemsize,
            gradients_bytes=numbers * 4,
        )

    def kernel_seconds(self, kernels: Kernels, direction: str) -> float:
        """Returns the time of a ring step's kernel."""
        return self.area * self.heads * kernels.seconds[direction]

    def transfer_seconds(self, chip: Chip, direction: str) -> float:
        """Returns the time of the transfer that overlaps it."""
        size = self.keys_bytes
        if direction == "backward":
            size += self.gradients_bytes
        return size / chip.interconnect_bytes_per_second if self.steps > 1 else 0.0

    def is_covered(self, chip: Chip, kernels: Kernels) -> bool:
        """Returns whether kernels last as long as their transfers."""
        return all(
            self.kernel_seconds(kernels, direction)
            >= self.transfer_seconds(chip, direction)
            for direction in PRODUCTS
        )


def mean_area(layout: Layout, ring_size: int, length: int) -> float:
    """Returns the query-key pairs of the slowest device, the mean over ring steps.

    For one causal sequence of ring_size · length tokens. Samples the first, the middle
    and the last device, and SAMPLED_STEPS steps.
    """
    sub = min(SUB_TILE, length)
    devices = {0, ring_size // 2, ring_size - 1}

    def slowest(step: int) -> float:
        return max(area(device, (device - step) % ring_size) for device in devices)

    def area(device: int, source: int) -> float:
        last = np.asarray(layout.index(device, ring_size, length))[None]
        stop = layout.count(source, last + 1, ring_size, length)
        tiles = key_ranges(np.zeros_like(stop), stop, sub, sub).work().sum()
        return float(min(tiles * sub**2, length**2))

    others = np.unique(np.linspace(1, ring_size - 1, SAMPLED_STEPS).astype(int))
    if ring_size == 1:
        return slowest(0)
    later = np.mean([slowest(int(step)) for step in others])
    return (slowest(0) + (ring_size - 1) * float(later)) / ring_size
