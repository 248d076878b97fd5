"""Tile sizes of the kernels, and the choices among them for each chip."""

import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace


@dataclass(frozen=True)
class BlockSizes:
    """Query rows and key slots of one tile of the score matrix."""

    block_q: int
    block_k: int

    def __post_init__(self):
        if not all(type(size) is int and size > 0 for size in astuple(self)):
            raise ValueError(f"{self} must be two integers from 1 on")


LEAST_BLOCK_Q = 16
"""Rows of 16-bit numbers that a tile of a TPU's memory has: less cannot be copied."""


@dataclass(frozen=True)
class TpuBlocks:
    """How a TPU kernel cuts its work; the schedules differ from chip to chip.

    stacked_rows: rows of a query tile, over all query heads of a key/value head.
    block_k: key slots of a tile.
    rows: query rows of a sub-block.
    columns: key slots of a piece of a sub-block's scores.
    ahead: by how many pieces scores are issued before they are needed.
    behind: by how many pieces products with values are issued after they could be.
    exact_rows: query rows of a sub-block of a partial tile.
    live_columns: granule in which it skips keys that none of these rows sees.
    """

    stacked_rows: int
    block_k: int
    rows: int
    columns: int
    ahead: int
    behind: int
    exact_rows: int = 256
    live_columns: int = 256

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
        """Tiles with so many times fewer rows and keys, at least of 256 x 256."""
        return replace(
            self,
            stacked_rows=max(256, self.stacked_rows // times),
            block_k=max(256, self.block_k // times),
        )

    def ever_smaller(self, group: int) -> Iterator[tuple[int, "TpuBlocks"]]:
        """Heads of a group that are stacked, and tiles: the best first."""
        for heads in range(group, 0, -1):
            if group % heads == 0:
                yield from ((heads, self.smaller(times)) for times in (1, 2, 4))

    def fit(
        self, length: int, keys: int, group: int, lanes: int, sizes: BlockSizes | None
    ) -> tuple[BlockSizes, "TpuBlocks"]:
        """Sizes for a problem, those asked for if any, and pieces that divide them.

        length, keys: query rows and key slots. group: query heads of a key/value head.
        lanes: what stacked rows and keys have to be a multiple of.

        Raises:
          ValueError: sizes that are asked for do not fill vector registers.
        """
        # Of block_q, so that R fills registers; all of these are powers of 2.
        unit = max(LEAST_BLOCK_Q, lanes // math.gcd(group, lanes))
        if sizes is None:
            block_q = max(unit, self.stacked_rows // group // unit * unit)
            sizes = BlockSizes(
                min(block_q, -(-length // unit) * unit),
                min(self.block_k, -(-keys // lanes) * lanes),
            )
        if sizes.block_q % unit or sizes.block_k % lanes:
            raise ValueError(
                f"{sizes} with {group} query heads a key/value head: on a TPU block_q "
                f"must be a multiple of {unit} and block_k of {lanes}"
            )
        stacked, block_k = group * sizes.block_q, sizes.block_k
        return sizes, TpuBlocks(
            stacked,
            block_k,
            math.gcd(stacked, self.rows),
            math.gcd(block_k, self.columns),
            self.ahead,
            self.behind,
            math.gcd(stacked, self.exact_rows),
            math.gcd(block_k, self.live_columns),
        )


# Chosen with tools/tune_block_sizes.py and libtpu 0.0.48.1: the fewest bundles, cycles
# of the compiler's schedule, for 1024 x 1024 scores, a head size of 128 and bfloat16.
TPU_FORWARD = {
    "v3": TpuBlocks(512, 512, 512, 128, 1, 2),
    "v4": TpuBlocks(1024, 1024, 512, 256, 0, 0),
    "v5e": TpuBlocks(1024, 1024, 512, 128, 1, 2),
    "v5p": TpuBlocks(1024, 1024, 1024, 128, 2, 2),
    "v6e": TpuBlocks(1024, 1024, 512, 256, 2, 1),
}

TPU_BACKWARD = {
    "v3": TpuBlocks(512, 512, 256, 512, 0, 0),
    "v4": TpuBlocks(1024, 1024, 512, 1024, 0, 0),
    "v5e": TpuBlocks(1024, 1024, 1024, 1024, 0, 0),
    "v5p": TpuBlocks(1024, 1024, 1024, 1024, 0, 0),
    "v6e": TpuBlocks(1024, 1024, 1024, 1024, 0, 0),
}
