"""Tile sizes that no kernel has are refused where they are named."""

import dataclasses

import pytest

from kernels.backends.block_sizes import BlockSizes
from kernels.backends.hopper.launch import HopperBlocks
from kernels.backends.tpu.block_sizes import TPU_FORWARD
from kernels.backends.triton_gpu.block_sizes import TritonBlocks

TPU, TRITON = TPU_FORWARD["v5e"], TritonBlocks(64, 64, 4, 2)


@pytest.mark.parametrize(
    "blocks, changes, words",
    [
        (BlockSizes(64, 64), {"block_q": 0}, "block_q=0.* integers from 1 on"),
        (BlockSizes(64, 64), {"block_k": -1}, "block_k=-1.* integers from 1 on"),
        (BlockSizes(64, 64), {"block_q": 64.0}, r"64\.0.* integers from 1 on"),
        (BlockSizes(64, 64), {"block_k": True}, "True.* integers from 1 on"),
        (TPU, {"rows": 100}, "powers of 2 from 128 on, got .*rows=100"),
        (TPU, {"columns": 64}, "powers of 2 from 128 on, got .*columns=64"),
        (TPU, {"live_columns": 0}, "from 128 on, got .*live_columns=0"),
        (TPU, {"ahead": -1}, "ahead and behind must be at least 0, .*ahead=-1"),
        (TPU, {"block_k": 0}, "block_k at least 1, got .*block_k=0"),
        (
            HopperBlocks(64, 2),
            {"block_k": -64},
            "multiple of 64, got .*=-64.*next is 64",
        ),
        (HopperBlocks(64, 2), {"stages": 1}, "at least 2, got .*stages=1"),
        (TRITON, {"block_k": 48}, "powers of 2 from 16 on, got block_q=.*block_k=48"),
        (TRITON, {"warps": 3}, "a power of 2 up to 32.*warps=3"),
        (TRITON, {"stages": 0}, "stages at least 1.*stages=0"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else None,
)
def test_sizes_that_no_kernel_has_are_refused(blocks, changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(blocks, **changes)
