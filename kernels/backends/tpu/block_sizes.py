"""Block sizes of the TPU kernels, and the best ones for each chip."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..tile_layout import BlockSizes

MIN_BLOCK_Q = 16
"""Sublanes of a packed 16-bit VMEM tile: a DMA cannot copy fewer rows."""


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
                yield from ((heads, self.smaller(times)) for times in (1, 2, 4))

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
        stacked, block_k = group * sizes.block_q, sizes.block_k
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
}

TPU_BACKWARD = {
    "v3": TpuBlocks(512, 512, 256, 512, 0, 0, 1),
    "v4": TpuBlocks(1024, 1024, 512, 1024, 0, 0, 1),
    "v5e": TpuBlocks(1024, 1024, 1024, 1024, 0, 0, 2),
    "v5p": TpuBlocks(1024, 1024, 1024, 1024, 0, 0, 2),
    "v6e": TpuBlocks(1024, 1024, 512, 1024, 1, 0, 2, has_lp_scheduler=True),
    "7x": TpuBlocks(1024, 1024, 1024, 1024, 0, 0, 2, has_lp_scheduler=True),
}

# The same under a soft cap, found with --soft-cap 50 among a dozen candidates a chip.
TPU_FORWARD_CAPPED = TPU_FORWARD | {
    "v5e": TpuBlocks(1024, 1024, 256, 128, 1, 2),
    "v5p": TpuBlocks(1024, 1024, 512, 128, 1, 2),
    "v6e": TpuBlocks(1024, 1024, 512, 256, 1, 1, diagonal_ahead=3, diagonal_behind=2),
}

TPU_BACKWARD_CAPPED = TPU_BACKWARD | {
    "v4": TpuBlocks(1024, 1024, 128, 1024, 0, 0, 1),
    "v5p": TpuBlocks(1024, 1024, 256, 1024, 1, 0, 2),
    "v6e": TpuBlocks(1024, 1024, 256, 1024, 1, 0, 2),
    "7x": TpuBlocks(1024, 1024, 256, 1024, 1, 0, 2),
}
