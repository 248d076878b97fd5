"""Times of the attention kernels and transfers of a ring step, for the planner.

A TPU kernel takes the bundles of its parts (programs, tiles, sub-blocks of partial
tiles; read from compiled kernels by tools/tpu_kernel_parts.py) as often as the bounds
of a ring step say. To that comes what it waits for: the first copies of a head, and its
last dq on the way out.

Nothing here is measured on the device; latencies of copies are not known.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from kernels.tpu import diagonal, launch
from tools.lib.benchmarks.rows import ROOT
from tools.lib.planning.ring_steps import Blocks, Work
from tools.lib.tpu_compiler.bundles import Parts
from training.chips import Chip

PARTS = ROOT / "results" / "tpu" / "kernel_parts.json"
"""Rows of tools/tpu_kernel_parts.py."""

ATTENTION_SHARE = {"forward": 0.6, "backward": 0.5}
"""Share of the peak assumed for kernels without parts in PARTS."""

TILE = 1024
"""Rows and keys of the tile that the parts are of; its head size is LANES."""

LANES = 128
SUB_BLOCK = 256
"""Rows and keys of the granules of a partial tile that the parts are of."""

ON_DIAGONAL = 10
"""Live granules of the diagonal tile that the parts are of."""

PRODUCTS = {"forward": 2, "backward": 5}
"""Matrix products of a tile."""

FLOAT32 = 4

COUNTED = (
    "with first copies, programs and partial tiles, of the slowest device of each ring "
    "step; copies without latencies"
)
"""What the time of a ring step's kernel counts."""


@dataclass(frozen=True)
class Launched:
    """A kernel as `kernels.tpu.launch` cuts it, for one stack of query heads.

    goes_on: forward, whether there is a carry; backward, whether dq stays in VMEM.
    stacks: of a key/value head. depth: of a head, padded. passes: of it through a
      matrix unit, whose columns it may not fill. shape: queries and keys.
    cores: of the chip. is_in_order: whether the programs of a head run on one core.
    """

    direction: str
    goes_on: bool
    blocks: Blocks
    stacks: int
    depth: int
    passes: int
    itemsize: int
    shape: tuple[int, int]
    cores: int
    is_in_order: bool

    @classmethod
    @functools.cache
    def of(
        cls,
        chip: str,
        direction: str,
        has_carry: bool,
        q_shape: tuple[int, ...],
        keys: tuple[int, int],
        dtype: str,
    ) -> "Launched":
        """Cuts it for q (B, T, H, D). chip: as v5e. has_carry: forward. keys: S, K."""
        version = pltpu.ChipVersion(chip)
        info = pltpu.get_tpu_info_for_chip(version, 1)
        q = jax.ShapeDtypeStruct(q_shape, dtype)
        k = jax.ShapeDtypeStruct((q_shape[0], *keys, q_shape[3]), dtype)
        if direction == "forward":
            cut, goes_on = launch.cut_forward(info, q, k, has_carry), has_carry
        else:
            cut, goes_on = launch.cut_backward(info, q, k)
        pieces = cut.blocks.exact_rows, cut.blocks.live_columns
        sizes = cut.sizes.block_q, cut.sizes.block_k
        cores = version.num_physical_tensor_cores_per_chip
        return cls(
            direction,
            goes_on,
            Blocks(cut.heads, *sizes, *pieces, diagonal.granule(cut.blocks)),
            cut.stacks,
            padded(q_shape[3]),
            -(-q_shape[3] // info.mxu_column_size),
            q.dtype.itemsize,
            (q_shape[1], keys[0]),
            cores,
            direction == "backward" or q_shape[0] * keys[1] * cut.stacks % cores == 0,
        )

    def bundles(self, work: Work, parts: Parts) -> float:
        """Returns the bundles of some work of a stack, without waiting.

        Other tiles, sub-blocks and head sizes than those of the parts take as much for
        each number; products, for each pass.
        """
        blocks, width = self.blocks, self.depth / LANES
        stacked = blocks.heads * blocks.block_q
        lines = stacked if self.direction == "forward" else blocks.block_k
        full = parts.full * stacked * blocks.block_k / TILE**2
        columns = np.arange(len(work.granules)) * blocks.live_columns
        known = np.arange(len(parts.live) + 1) * SUB_BLOCK
        live = np.interp(columns, known, (0, *parts.live))
        sub_blocks = parts.first * work.first + float(live @ work.granules)
        tiles = full * work.full_tiles + blocks.exact_rows / SUB_BLOCK * sub_blocks
        granule = blocks.exact_rows * blocks.live_columns / SUB_BLOCK**2
        tiles += parts.diagonal / ON_DIAGONAL * granule * work.diagonal_granules
        programs = (parts.begin + parts.end) * work.programs
        programs += parts.init * (work.programs - work.diagonal)
        return (
            programs * width * lines / TILE
            + parts.masks * stacked / TILE * work.partial
            + parts.tile * work.tiles
            + self.passes * tiles
            + parts.partial * work.partial_tiles
            + parts.turn * sum(work.granules)
        )

    def waited_bytes(self, work: Work) -> float:
        """Returns the bytes that a stack waits for: first copies, and the last dq."""
        if self.direction == "forward":
            return (work.cold if self.is_in_order else work.live) * self._tile_bytes
        dq = self.blocks.heads * self.blocks.block_q * self.depth * FLOAT32
        if self.goes_on:
            first = self._tile_bytes + dq
            return work.cold * first + bool(work.live) * self._calls(work) * dq
        return (work.cold + work.broken) * self._tile_bytes

    def _calls(self, work: Work) -> float:
        return work.programs / -(-self.shape[1] // self.blocks.block_k)

    def moved_bytes(self, work: Work) -> float:
        """Returns the bytes of all copies that may overlap the work of a stack."""
        if self.direction == "forward":
            rows = self.blocks.heads * self.blocks.block_q
            sizes = self.itemsize + FLOAT32 * (1 + self.goes_on)  # q, out, carry
        else:
            rows = self.blocks.block_k
            sizes = 2 * (self.itemsize + 2 * FLOAT32)  # k, v; dk, dv in and out
        moved = (
            work.tiles * self._tile_bytes + work.programs * rows * sizes * self.depth
        )
        if self.direction == "backward" and self.goes_on:  # dq, in and out
            queries = -(-self.shape[0] // self.blocks.block_q) * self.blocks.block_q
            dq = 2 * FLOAT32 * queries * self.blocks.heads * self.depth
            moved += self._calls(work) * dq
        return moved

    @property
    def _tile_bytes(self) -> int:
        """Bytes that a tile copies: k and v; q, do and a streamed dq."""
        if self.direction == "forward":
            return 2 * self.blocks.block_k * self.depth * self.itemsize
        dq = 0 if self.goes_on else 2 * FLOAT32
        rows = self.blocks.heads * self.blocks.block_q
        return rows * self.depth * (2 * self.itemsize + dq)


def padded(head_dim: int) -> int:
    """Returns the size of a head in whole LANES."""
    return -(-head_dim // LANES) * LANES


@dataclass(frozen=True)
class Kernels:
    """Speed of the attention kernels on a chip.

    seconds: time of one query-key pair of a head of LANES numbers, by direction; of a
      full tile, where there are parts.
    parts: by direction, and whether there is a carry, or dq stays in VMEM.
    source: where that comes from.
    """

    chip: Chip
    seconds: dict[str, float]
    parts: dict[tuple[str, bool], Parts]
    source: str

    @classmethod
    def of(cls, chip: Chip, path: Path = PARTS) -> "Kernels":
        """Reads the kernels' parts where there are any, else assumes a share."""
        found = read_kernel_parts(path)
        parts = {
            (direction, flag): at_peak(part, direction, chip)
            for (kind, direction, flag), part in found.items()
            if kind in chip.device_kinds
        }
        flops = {name: 2.0 * LANES * count for name, count in PRODUCTS.items()}
        if not parts:
            shares = ", ".join(f"{n} {s:.0%}" for n, s in ATTENTION_SHARE.items())
            seconds = {
                n: flops[n] / (ATTENTION_SHARE[n] * chip.peak_flops) for n in flops
            }
            return cls(chip, seconds, {}, f"assumed shares of the peak: {shares}")
        full = {name: parts[name, True].full for name in PRODUCTS}
        pairs = chip.bundles_per_second * TILE**2
        return cls(
            chip,
            {name: bundles / pairs for name, bundles in full.items()},
            parts,
            "static schedules, bundles of a full tile of 1024 x 1024: "
            + ", ".join(f"{name} {count:.0f}" for name, count in full.items()),
        )

    def call_seconds(self, kernel: Launched, work: Work) -> float:
        """Returns the time of some work of a stack of query heads."""
        bundles = kernel.bundles(work, self.parts[kernel.direction, kernel.goes_on])
        computed = bundles / self.chip.bundles_per_second
        moved = kernel.moved_bytes(work) / self.chip.hbm_bytes_per_second
        waited = kernel.waited_bytes(work) / self.chip.hbm_bytes_per_second
        return max(computed, moved) + waited


@functools.cache
def read_kernel_parts(path: Path = PARTS) -> Mapping[tuple[str, str, bool], Parts]:
    """Reads parts by device kind, direction, and carry or dq in VMEM."""
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []

    def part(row: dict[str, Any]) -> Parts:
        values = {field.name: row[field.name] for field in fields(Parts)}
        return Parts(**values | {"live": tuple(row["live"])})

    return {
        (row["device_kind"], row["direction"], row["goes_on"]): part(row)
        for row in rows
    }


def at_peak(parts: Parts, direction: str, chip: Chip) -> Parts:
    """Returns parts with no fewer bundles than their products take at the peak."""
    flops = 2.0 * PRODUCTS[direction] * TILE**2 * LANES
    least = flops / chip.peak_flops * chip.bundles_per_second
    granule = least * (SUB_BLOCK / TILE) ** 2
    live = enumerate(parts.live, 1)
    return replace(
        parts,
        full=max(parts.full, least),
        live=tuple(max(bundles, n * granule) for n, bundles in live),
    )
