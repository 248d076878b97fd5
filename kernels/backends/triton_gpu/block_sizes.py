"""Block sizes of the Triton kernels, and the choices for each kind of GPU."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class TritonBlocks(NamedTuple):
    """Block sizes of a Triton kernel.

    block_q, block_k: query rows and key slots of a tile, powers of 2 from 16 on.
    warps: warps that compute a tile.
    stages: depth of the software pipeline: tiles in shared memory or on their way.
    """

    block_q: int
    block_k: int
    warps: int
    stages: int


class KernelBlocks(NamedTuple):
    """Block sizes of the forward, dkv and dq kernels."""

    forward: TritonBlocks
    backward_dkv: TritonBlocks
    backward_dq: TritonBlocks


Cut = tuple[int, int, int, int]
"""block_q, block_k, warps and stages."""


def _blocks(forward: Cut, dkv: Cut, dq: Cut) -> KernelBlocks:
    return KernelBlocks(TritonBlocks(*forward), TritonBlocks(*dkv), TritonBlocks(*dq))


# By the padded head size. Among what triton 3.8.0 compiles without spilling registers,
# for any shape, the tiles that reuse most; no GPU has timed them. All but the last are
# for 16-bit numbers, with 163, 99 and (Hopper, Blackwell) 227 KiB of shared memory.
# float32 is exact, so it does without tensor cores, and fits everywhere. (Triton 3.6.0
# spills 8 bytes of two of them.)
AMPERE = {
    64: _blocks((128, 64, 4, 3), (32, 128, 8, 3), (128, 64, 8, 3)),
    128: _blocks((128, 64, 8, 3), (64, 64, 8, 2), (128, 32, 8, 3)),
    256: _blocks((64, 32, 8, 2), (32, 64, 8, 2), (64, 32, 8, 2)),
}

ADA = {
    64: _blocks((128, 64, 8, 3), (32, 128, 8, 3), (128, 64, 8, 2)),
    128: _blocks((128, 64, 8, 2), (64, 64, 8, 2), (128, 32, 8, 2)),
    256: _blocks((64, 32, 8, 2), (16, 64, 8, 1), (64, 16, 8, 2)),
}

HOPPER = {
    64: _blocks((128, 128, 8, 3), (64, 128, 8, 2), (128, 128, 8, 2)),
    128: _blocks((128, 128, 8, 2), (32, 128, 8, 2), (128, 64, 8, 2)),
    256: _blocks((64, 64, 8, 2), (64, 32, 8, 1), (64, 32, 8, 2)),
}

BLACKWELL = HOPPER | {
    64: _blocks((128, 128, 8, 3), (64, 64, 8, 2), (128, 128, 8, 2)),
    128: _blocks((128, 64, 8, 3), (64, 64, 8, 1), (128, 64, 8, 2)),
}

FLOAT32 = {
    64: _blocks((32, 32, 4, 2), (32, 32, 8, 1), (32, 32, 8, 1)),
    128: _blocks((16, 16, 8, 1), (16, 32, 8, 1), (32, 16, 8, 2)),
    256: _blocks((16, 16, 8, 2), (16, 16, 8, 1), (32, 16, 8, 2)),
}


FLOAT32_CAPPED = FLOAT32 | {
    64: _blocks((32, 32, 8, 2), (32, 32, 8, 1), (32, 32, 8, 1)),
}
"""With a soft cap; 16-bit numbers have the same blocks with and without."""


def padded_depth(depth: int) -> int:
    """Returns the power of 2 that rows of `depth` numbers are padded to."""
    return max(16, 1 << (depth - 1).bit_length())


def chosen_blocks(capability: int, q: jax.Array, is_capped: bool) -> KernelBlocks:
    """Returns the table's choice for this chip, or for the one most like it."""
    if q.dtype == jnp.float32:
        table = FLOAT32_CAPPED if is_capped else FLOAT32
    elif capability in (86, 89) or capability >= 120:  # for desktops: little memory
        table = ADA
    elif capability >= 100:
        table = BLACKWELL
    else:
        table = HOPPER if capability >= 90 else AMPERE
    return table[max(64, padded_depth(q.shape[-1]))]
