"""Block sizes of the Hopper kernels, by head size."""

from dataclasses import dataclass

from .forward import smem_bytes
from .shared import SHARED_BYTES

KEY_MULTIPLE = 64
"""Divisor of block_k of the forward kernel."""


@dataclass(frozen=True)
class HopperBlocks:
    """Block sizes of the forward kernel.

    block_k: keys of a tile, a multiple of 64.
    stages: key and value tiles that shared memory holds, at least 2.
    """

    block_k: int
    stages: int

    def __post_init__(self):
        if self.block_k < KEY_MULTIPLE or self.block_k % KEY_MULTIPLE:
            valid = -(-max(self.block_k, 1) // KEY_MULTIPLE) * KEY_MULTIPLE
            raise ValueError(
                f"block_k of hopper must be a multiple of {KEY_MULTIPLE}, got {self}: "
                f"the next is {valid}"
            )
        if self.stages < 2:  # V(n) must arrive while V(n-1) is in use
            raise ValueError(f"stages must be at least 2, got {self}")


FORWARD = {
    64: HopperBlocks(block_k=128, stages=4),
    128: HopperBlocks(block_k=128, stages=2),
    256: HopperBlocks(block_k=64, stages=2),
}
"""By head size, others being padded to the next: the largest tiles without spills."""

BACKWARD = {
    64: {"block_q": 128, "q_stages": 2, "do_stages": 2},
    128: {"block_q": 64, "q_stages": 2, "do_stages": 2},
    256: {"block_q": 64, "q_stages": 2, "do_stages": 2},
}
"""Likewise for the kernel of `backward`."""

BACKWARD_DQ = {
    64: {"block_k": 128, "k_stages": 4, "v_stages": 4},
    128: {"block_k": 128, "k_stages": 2, "v_stages": 2},
    256: {"block_k": 64, "k_stages": 2, "v_stages": 1},
}
"""Likewise for the kernel of `backward_dq`."""


def checked_blocks(blocks: HopperBlocks, d: int) -> HopperBlocks:
    """Returns blocks of `forward`, which must fit for heads of d numbers.

    Raises:
      ValueError: they do not.
    """
    needed = smem_bytes(blocks.block_k, blocks.stages, d)
    if needed > SHARED_BYTES:
        raise ValueError(
            f"shared memory of hopper must be at most {SHARED_BYTES} bytes, got "
            f"{needed} of {blocks} at head size {d}: make block_k or stages smaller"
        )
    return blocks
