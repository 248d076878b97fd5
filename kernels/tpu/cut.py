"""How a problem is cut on a TPU: what is asked for, or the largest tiles that fit."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ..block_sizes import BlockSizes
from ..tile_layout import Tiling
from .block_sizes import TpuBlocks
from .tile import LANES, vmem_limit


class Cut(NamedTuple):
    """Tiles of a problem.

    heads: query heads whose rows are stacked: those of a key/value head, or some.
    stacks: how many such stacks there are for a key/value head.
    """

    heads: int
    stacks: int
    sizes: BlockSizes
    blocks: TpuBlocks

    def repeated(self, x: jax.Array) -> jax.Array:
        """(B, S, K, D) -> (B, S, K · stacks, D): keys or values of each stack."""
        return x if self.stacks == 1 else jnp.repeat(x, self.stacks, axis=2)

    def summed(self, x: jax.Array) -> jax.Array:
        """(B, S, K · stacks, D) -> (B, S, K, D): the gradient of `repeated`."""
        if self.stacks == 1:
            return x
        return x.reshape(*x.shape[:2], -1, self.stacks, x.shape[-1]).sum(axis=3)

    def tiling(self, q: jax.Array, repeated: jax.Array, start: jax.Array) -> Tiling:
        tiling = Tiling.of(q, repeated, start, self.sizes)
        block_q, block_k = self.sizes.block_q, self.sizes.block_k
        return tiling._replace(block_q=block_q, block_k=block_k)


def choose_cut(
    table: dict[str, TpuBlocks],
    chip: pltpu.TpuInfo,
    q: jax.Array,
    k: jax.Array,
    asked: tuple[TpuBlocks | None, BlockSizes | None],
    held_bytes: Callable[[Cut], int],
) -> Cut:
    """What is asked for, or else the table's choice, made smaller until it fits.

    Where all heads of a key/value head are too many to stack, fewer are.

    held_bytes: vector memory that a program takes.

    Raises:
      ValueError: what is asked for does not fit.
      NotImplementedError: nothing does.
    """
    group, limit = q.shape[2] // k.shape[2], vmem_limit(chip)
    blocks, sizes = asked[0] or _table_blocks(table, chip, q), asked[1]
    is_free = asked == (None, None)
    choices = blocks.ever_smaller(group) if is_free else [(group, blocks)]
    for number, (heads, blocks) in enumerate(choices):
        fit = blocks.fit(q.shape[1], k.shape[1], heads, row_lanes(chip), sizes)
        cut = Cut(heads, group // heads, *fit)
        held = held_bytes(cut)
        # The compiler takes some for itself, more for wide types; smaller tiles can
        # leave it more.
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
    raise ValueError(f"tiles that take {memory}: make block_q or block_k smaller")


def row_lanes(chip: pltpu.TpuInfo) -> int:
    """What rows of 4-byte numbers in HBM have to be a multiple of.

    A v3 addresses HBM in words of 1 KiB.
    """
    return 2 * LANES if chip.generation < 4 else LANES


def _table_blocks(
    table: dict[str, TpuBlocks], chip: pltpu.TpuInfo, q: jax.Array
) -> TpuBlocks:
    """The table's choice, which is for bfloat16 rows of up to 128 numbers.

    A chip newer than the table is cut for like v6e. Where vector memory is small, tiles
    of wider rows are smaller.
    """
    blocks = table.get(str(chip.chip_version), table["v6e"])
    width = -(-q.shape[-1] // LANES) * q.dtype.itemsize // 2
    return blocks if chip.vmem_capacity_bytes > 2**25 else blocks.smaller(width)
