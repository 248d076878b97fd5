"""The Pallas TPU kernels where there is no TPU: Pallas runs their steps on the CPU."""

import dataclasses
from dataclasses import dataclass

from jax.experimental.pallas import tpu as pltpu

from kernels.tpu import launch as pallas_tpu
from kernels.tpu.block_sizes import TpuBlocks
from kernels.tpu.launch import Launch

CHIP = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V5E, 1)

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


@dataclass(frozen=True)
class SimulatedTpu:
    """The backend `pallas_tpu`, its kernels launched as told."""

    launch: Launch = Launch(CHIP, SMALL_BLOCKS, interpret=True)

    def forward(self, *operands, **options):
        return pallas_tpu.forward(*operands, **options, launch=self.launch)

    def backward(self, *operands, **options):
        return pallas_tpu.backward(*operands, **options, launch=self.launch)

    def with_vmem(self, capacity: int) -> "SimulatedTpu":
        """The same on a chip with so many bytes of vector memory."""
        chip = dataclasses.replace(self.launch.chip, vmem_capacity_bytes=capacity)
        return SimulatedTpu(dataclasses.replace(self.launch, chip=chip))
