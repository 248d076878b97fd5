"""Tile sizes of the kernels."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockSizes:
    """Query rows and key slots of one tile of the score matrix."""

    block_q: int
    block_k: int

    def __post_init__(self):
        if self.block_q < 1 or self.block_k < 1:
            raise ValueError(f"{self} must be at least 1 x 1")
