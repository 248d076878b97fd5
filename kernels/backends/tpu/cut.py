"""Chooses blocks for a problem: those asked for, or the largest that fit a TPU."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ..tile_layout import BlockSizes, Tiling
from .block_sizes import MIN_BLOCK_Q, TpuBlocks
from .orientation import UPRIGHT, Orientation
from .vector import LANES


class Cut(NamedTuple):
    """Blocks of a problem.

    heads: query heads whose rows are stacked: those of a key/value head, or fewer.
    stacks: stacks for a key/value head; each reads its keys again.
    sizes: tile of one head. blocks: tile of a stack, and its pieces.
    orientation: of what is computed of a tile.
    """

    heads: int
    stacks: int
    sizes: BlockSizes
    blocks: TpuBlocks
    orientation: Orientation

    def repeat_heads(self, x: jax.Array) -> jax.Array:
        """Repeats keys for each stack: (B, S, K, D) -> (B, S, K * stacks, D)."""
        return x if self.stacks == 1 else jnp.repeat(x, self.stacks, axis=2)

    def sum_heads(self, x: jax.Array) -> jax.Array:
        """Sums gradients over stacks: (B, S, K * stacks, D) -> (B, S, K, D)."""
        if self.stacks == 1:
            return x
        return x.reshape(*x.shape[:2], -1, self.stacks, x.shape[-1]).sum(axis=3)

    def packed(self, x: jax.Array) -> jax.Array:
        """Lays out numbers of stacked rows, [..., R], for the forward kernel."""
        return x.reshape(*x.shape[:-1], *self.orientation.packed(x.shape[-1]))

    def tiling(self, q: jax.Array, k: jax.Array, k_start: jax.Array) -> Tiling:
        """Returns the tiling of q (B, T, H, D) and repeated k (B, S, K * stacks, D)."""
        tiling = Tiling.of(q, k, k_start, self.sizes)
        block_q, block_k = self.sizes.block_q, self.sizes.block_k
        return tiling._replace(block_q=block_q, block_k=block_k)


def vmem_limit(chip: pltpu.TpuInfo) -> int:
    """Returns the bytes of VMEM that a kernel may take; the compiler keeps the rest."""
    return chip.vmem_capacity_bytes * 7 // 8


def row_lanes(chip: pltpu.TpuInfo) -> int:
    """Returns what the size of a row of 4-byte numbers in HBM must be a multiple of.

    A v3 addresses HBM in words of 1 KiB.
    """
    return 2 * LANES if chip.generation < 4 else LANES


def choose_cut(
    table: dict[str, TpuBlocks],
    chip: pltpu.TpuInfo,
    q: jax.Array,
    k: jax.Array,
    held_bytes: Callable[[Cut], int],
    blocks: TpuBlocks | None = None,
) -> Cut:
    """Returns given blocks, or the table's, made smaller until they fit.

    Where all query heads of a key/value head are too many to stack, fewer are.

    held_bytes: VMEM that a program takes.

    Raises:
      ValueError: the given blocks do not fit.
      NotImplementedError: nothing does.
    """
    group, limit = q.shape[2] // k.shape[2], vmem_limit(chip)
    depth = -(-q.shape[-1] // LANES) * LANES
    is_free = blocks is None
    blocks = blocks or _table_blocks(table, chip, q)
    choices = blocks.ever_smaller(group) if is_free else [(group, blocks)]
    for number, (heads, blocks) in enumerate(choices):
        # A head's rows must be whole lanes where they lie along the lanes.
        can_swap = q.shape[1] >= LANES and heads * LANES <= blocks.stacked_rows
        orientation = Orientation.of(chip, depth) if can_swap else UPRIGHT
        unit = LANES if orientation.axis else MIN_BLOCK_Q
        lengths = q.shape[1], k.shape[1]
        tile, fitted = blocks.fit(*lengths, heads, (unit, row_lanes(chip)))
        cut = Cut(heads, group // heads, tile, fitted, orientation)
        held = held_bytes(cut)
        # The compiler takes some VMEM for itself, more for wide types; smaller tiles
        # can leave it more.
        least = q.dtype.itemsize * 2**18
        spare = (limit // 8 if number else least) if is_free else 0
        if held + spare <= limit:
            return cut
    memory = (
        f"{held / 2**20:.1f} MiB do not fit into the {limit / 2**20:.1f} MiB of vector "
        f"memory that a kernel has on TPU {chip.chip_version}"
    )
    if is_free:
        raise NotImplementedError(
            f"the smallest tiles of heads of {q.shape[-1]} numbers in {q.dtype} take "
            f"too much: {memory}; use smaller heads, or implementation='blockwise'"
        )
    raise ValueError(f"tiles that take {memory}: make {blocks} smaller")


def _table_blocks(
    table: dict[str, TpuBlocks], chip: pltpu.TpuInfo, q: jax.Array
) -> TpuBlocks:
    """Returns the table's blocks, which are for bfloat16 rows of up to 128 numbers.

    A chip newer than the table gets those of v6e. Where VMEM is small, tiles of wider
    rows are smaller.
    """
    blocks = table.get(str(chip.chip_version), table["v6e"])
    width = -(-q.shape[-1] // LANES) * q.dtype.itemsize // 2
    return blocks if chip.vmem_capacity_bytes > 2**25 else blocks.smaller(width)
