"""Runs the Pallas TPU kernels without a TPU: Pallas interprets them on a CPU."""

import dataclasses

from jax.experimental.pallas import tpu as pltpu

from kernels.backends.tpu.block_sizes import TpuBlocks
from kernels.backends.tpu.launch import Launch

CHIP = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V5E, 1)
V6E = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V6E, 1)

# Short problems have several tiles, and each of these sub-blocks, pieces and granules.
SMALL_BLOCKS = TpuBlocks(
    stacked_rows=256,
    block_k=256,
    rows=128,
    columns=128,
    ahead=1,
    behind=1,
    exact_rows=128,
    live_columns=128,
)

SMALL_VMEM = 3 * 2**20
"""Bytes that hold a step in these blocks, but no dq of several tiles."""


SIMULATED_TPU = Launch(CHIP, SMALL_BLOCKS, interpret=True)


def with_vmem(capacity: int) -> Launch:
    """Returns the same on a chip with `capacity` bytes of vector memory."""
    chip = dataclasses.replace(CHIP, vmem_capacity_bytes=capacity)
    return Launch(chip, SMALL_BLOCKS, interpret=True)


def on_chip(version: pltpu.ChipVersion) -> Launch:
    """Returns the backend with the block sizes of that chip."""
    return Launch(pltpu.get_tpu_info_for_chip(version, 1), interpret=True)
