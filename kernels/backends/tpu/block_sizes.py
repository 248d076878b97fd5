"""Block sizes of the TPU kernels: the best ones for each chip, cut to a problem."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ...masks import Array
from ..tile_layout import BlockSizes, Tiling
from .vector import LANES, UPRIGHT, Orientation


@dataclass(frozen=True)
class TpuBlocks:
    """Block sizes of a TPU kernel, from the tile down to what one loop step computes.

    A tile [stacked_rows, block_k] of the scores is worked on in pieces:

        full tile     sub-blocks of `rows` query rows, cut into sub-tiles
                      [rows, columns]
        partial tile  sub-blocks of `exact_rows` query rows; computes only the granules
                      of `live_columns` keys that some of these rows attend to

    stacked_rows: rows of a query tile, over all query heads of a key/value head.
    block_k: keys of a tile.
    ahead: sub-tiles by which S = QKᵀ is issued before its softmax (forward), or
      sub-blocks between the stages of one (backward).
    behind: sub-tiles by which PV is issued after its softmax (forward).
    diagonal_ahead, diagonal_behind: the same in a diagonal tile.
    has_lp_scheduler: whether the compiler schedules by a linear program.
    """

    stacked_rows: int
    block_k: int
    rows: int
    columns: int
    ahead: int
    behind: int
    diagonal_ahead: int = 0
    diagonal_behind: int = 0
    exact_rows: int = 256
    live_columns: int = 256
    has_lp_scheduler: bool = False

    def __post_init__(self):
        pieces = self.rows, self.columns, self.exact_rows, self.live_columns
        if any(size < 128 or size & (size - 1) for size in pieces):
            raise ValueError(
                f"rows, columns, exact_rows and live_columns must be powers of 2 from "
                f"128 on, got {self}"
            )
        if min(self.ahead, self.behind) < 0 or min(self.stacked_rows, self.block_k) < 1:
            raise ValueError(
                "ahead and behind must be at least 0, stacked_rows and block_k at "
                f"least 1, got {self}"
            )

    def smaller(self, times: int) -> "TpuBlocks":
        """Returns blocks with 1 / times the rows and keys, at least 256 x 256."""
        return replace(
            self,
            stacked_rows=max(256, self.stacked_rows // times),
            block_k=max(256, self.block_k // times),
        )

    def ever_smaller(self, group: int) -> Iterator[tuple[int, "TpuBlocks"]]:
        """Yields (query heads stacked in a tile, blocks), the fastest first."""
        for heads in range(group, 0, -1):
            if group % heads == 0:
                for times in (1, 2, 4):
                    yield heads, self.smaller(times)

    def fit(
        self, length: int, keys: int, group: int, units: tuple[int, int]
    ) -> tuple[BlockSizes, "TpuBlocks"]:
        """Returns the tile of a problem and blocks whose pieces divide it.

        length, keys: query rows and keys of the problem.
        group: query heads stacked in a tile.
        units: of which block_q, and stacked rows and keys, must be multiples.
        """
        # block_q must be a multiple of `unit`, so that group * block_q is one of lanes.
        unit, lanes = units
        unit = max(unit, lanes // math.gcd(group, lanes))
        block_q = max(unit, self.stacked_rows // group // unit * unit)
        sizes = BlockSizes(
            min(block_q, -(-length // unit) * unit),
            min(self.block_k, -(-keys // lanes) * lanes),
        )
        if sizes.block_k % lanes:
            raise ValueError(f"block_k must be a multiple of {lanes}, got {self}")
        stacked = group * sizes.block_q
        block_k = sizes.block_k
        # Pieces are powers of 2: the divisor is the largest one that divides the tile.
        return sizes, replace(
            self,
            stacked_rows=stacked,
            block_k=block_k,
            rows=math.gcd(stacked, self.rows),
            columns=math.gcd(block_k, self.columns),
            exact_rows=math.gcd(stacked, self.exact_rows),
            live_columns=math.gcd(block_k, self.live_columns),
        )


# The fewest bundles (cycles of the static schedule) for a full tile, 1024 x 1024 x 128
# in bfloat16, found by `python -m tools.tpu_schedule --try` with libtpu 0.0.48.1.
# Columns: stacked_rows, block_k, rows, columns, ahead, behind, and these two of a
# diagonal tile.
TPU_FORWARD = {
    "v3": TpuBlocks(512, 512, 512, 128, 1, 2, 1, 2),
    "v4": TpuBlocks(1024, 1024, 512, 256, 0, 0, 0, 0),
    "v5e": TpuBlocks(1024, 1024, 512, 128, 1, 2, 1, 2),
    "v5p": TpuBlocks(1024, 1024, 1024, 128, 2, 2, 2, 2),
    "v6e": TpuBlocks(1024, 1024, 512, 256, 1, 1, 3, 2),
    "7x": TpuBlocks(1024, 1024, 1024, 256, 1, 2, 3, 2),
}

TPU_BACKWARD = {
    "v3": TpuBlocks(512, 512, 256, 512, 0, 0, 1),
    "v4": TpuBlocks(1024, 1024, 512, 1024, 0, 0, 1),
    "v5e": TpuBlocks(1024, 1024, 1024, 1024, 0, 0, 2),
    "v5p": TpuBlocks(1024, 1024, 1024, 1024, 0, 0, 2),
    "v6e": TpuBlocks(1024, 1024, 512, 1024, 1, 0, 2, has_lp_scheduler=True),
    "7x": TpuBlocks(1024, 1024, 512, 1024, 0, 0, 2, has_lp_scheduler=True),
}

# The same under a soft cap, found with --soft-cap 50 among a dozen candidates a chip.
TPU_FORWARD_CAPPED = TPU_FORWARD | {
    "v5e": TpuBlocks(1024, 1024, 256, 128, 1, 2),
    "v5p": TpuBlocks(1024, 1024, 512, 128, 1, 2),
    "v6e": TpuBlocks(1024, 1024, 512, 256, 1, 1, diagonal_ahead=3, diagonal_behind=2),
    "7x": TpuBlocks(1024, 1024, 512, 256, 1, 1, diagonal_ahead=3, diagonal_behind=2),
}

TPU_BACKWARD_CAPPED = TPU_BACKWARD | {
    "v4": TpuBlocks(1024, 1024, 128, 1024, 0, 0, 1),
    "v5p": TpuBlocks(1024, 1024, 256, 1024, 1, 0, 2),
    "v6e": TpuBlocks(1024, 1024, 256, 1024, 1, 0, 2),
    "7x": TpuBlocks(1024, 1024, 256, 1024, 1, 0, 2),
}

TPU_BLOCKS = {
    "forward": (TPU_FORWARD, TPU_FORWARD_CAPPED),
    "backward": (TPU_BACKWARD, TPU_BACKWARD_CAPPED),
}
"""Blocks of each kernel by chip, without and with a soft cap."""


TPU_RECORDS: dict[tuple[str, bool, str, int, str], tuple[TpuBlocks, float]] = {}
"""Blocks that a chip has run, with their milliseconds: they win over the tables'.

By kernel, whether there is a soft cap, chip, head size and type. Beside each stands a
comment with what was timed. Empty: our kernels have not run on a TPU.
"""


class Cut(NamedTuple):
    """Blocks of a problem.

    heads: query heads whose rows are stacked: those of a key/value head, or fewer.
    stacks: stacks for a key/value head; each reads its keys again.
    sizes: tile of one head. blocks: tile of a stack, and its pieces.
    orientation: of what is computed of a tile.
    is_dq_resident: whether dq of a head stays in VMEM.
    adds_to_dkv: whether the backward kernel can go on from dk and dv so far.
    """

    heads: int
    stacks: int
    sizes: BlockSizes
    blocks: TpuBlocks
    orientation: Orientation
    is_dq_resident: bool = False
    adds_to_dkv: bool = False

    def repeat_heads(self, x: jax.Array) -> jax.Array:
        """Repeats keys for each stack: (B, S, K, D) -> (B, S, K * stacks, D)."""
        return x if self.stacks == 1 else jnp.repeat(x, self.stacks, axis=2)

    def sum_heads(self, x: jax.Array) -> jax.Array:
        """Sums gradients over stacks: (B, S, K * stacks, D) -> (B, S, K, D)."""
        if self.stacks == 1:
            return x
        batch, keys, _, depth = x.shape
        x = x.reshape(batch, keys, -1, self.stacks, depth)  # (B, S, K, stacks, D)
        return x.sum(axis=3)

    def packed(self, x: jax.Array) -> jax.Array:
        """Lays out numbers of stacked rows, [..., R], for the forward kernel."""
        return x.reshape(*x.shape[:-1], *self.orientation.packed(x.shape[-1]))

    def tiling(self, q: jax.Array, k: jax.Array, k_start: Array) -> Tiling:
        """Returns the tiling of q (B, T, H, D) and repeated k (B, S, K * stacks, D)."""
        tiling = Tiling.of(q, k, k_start, self.sizes)
        # `Tiling.of` cuts tiles to short problems; here problems are padded to tiles.
        return tiling._replace(block_q=self.sizes.block_q, block_k=self.sizes.block_k)


def vmem_limit(chip: pltpu.TpuInfo) -> int:
    """Returns the bytes of VMEM that a kernel may take; the compiler keeps the rest."""
    return chip.vmem_capacity_bytes * 7 // 8


def compiler_bytes(q: jax.Array) -> int:
    """Returns the bytes of VMEM that the compiler takes, more for wide types."""
    return q.dtype.itemsize * 2**18


def row_lanes(chip: pltpu.TpuInfo) -> int:
    """Returns what the size of a row of 4-byte numbers in HBM must be a multiple of.

    A v3 addresses HBM in words of 1 KiB.
    """
    return 2 * LANES if chip.generation < 4 else LANES


def choose_cut(
    kernel: tuple[str, bool],
    chip: pltpu.TpuInfo,
    q: jax.Array,
    k: jax.Array,
    held_bytes: Callable[[Cut], int],
    blocks: TpuBlocks | None = None,
) -> Cut:
    """Returns given blocks, or a record's or the table's, made smaller until they fit.

    Where all query heads of a key/value head are too many to stack, fewer are.

    kernel: of `TPU_BLOCKS`, and whether it has a soft cap. held_bytes: VMEM that a
      program takes.

    Raises:
      ValueError: the given blocks do not fit.
      NotImplementedError: nothing does.
    """
    group = q.shape[2] // k.shape[2]
    limit = vmem_limit(chip)
    depth = -(-q.shape[-1] // LANES) * LANES
    is_free = blocks is None
    blocks = blocks or _known_blocks(kernel, chip, q)
    held = 0
    choices = blocks.ever_smaller(group) if is_free else [(group, blocks)]
    for number, (heads, blocks) in enumerate(choices):
        # A head's rows must be whole lanes where they lie along the lanes.
        can_swap = q.shape[1] >= LANES and heads * LANES <= blocks.stacked_rows
        upright = replace(UPRIGHT, sublanes=chip.num_sublanes)
        orientation = Orientation.of(chip, depth) if can_swap else upright
        # Upright, a DMA copies at least the rows of a packed 16-bit VMEM tile.
        unit = LANES if orientation.axis else 2 * chip.num_sublanes
        units = unit, row_lanes(chip)
        sizes, fitted = blocks.fit(q.shape[1], k.shape[1], heads, units)
        cut = Cut(heads, group // heads, sizes, fitted, orientation)
        held = held_bytes(cut)
        # Smaller tiles can leave the compiler more.
        spare = (limit // 8 if number else compiler_bytes(q)) if is_free else 0
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


def _known_blocks(
    kernel: tuple[str, bool], chip: pltpu.TpuInfo, q: jax.Array
) -> TpuBlocks:
    """Returns a record's blocks, or the table's for bfloat16 rows of up to 128 numbers.

    A chip newer than the table gets those of v6e. Where VMEM is small, tiles of wider
    rows are smaller.
    """
    name, is_capped = kernel
    version = str(chip.chip_version)
    record = TPU_RECORDS.get((name, is_capped, version, q.shape[-1], q.dtype.name))
    if record:
        return record[0]
    table = TPU_BLOCKS[name][is_capped]
    blocks = table.get(version, table["v6e"])
    width = -(-q.shape[-1] // LANES) * q.dtype.itemsize // 2
    return blocks if chip.vmem_capacity_bytes > 2**25 else blocks.smaller(width)
