"""Block sizes: one tile of the score matrix, as callers may request it."""

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class BlockSizes:
    """Query rows and key slots of one tile of the score matrix."""

    block_q: int
    block_k: int

    def __post_init__(self):
        if not all(type(size) is int and size > 0 for size in astuple(self)):
            raise ValueError(f"{self} must be two integers from 1 on")
