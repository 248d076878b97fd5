"""Runs the Pallas TPU kernels without a TPU: Pallas interprets them on a CPU."""

import dataclasses
from dataclasses import dataclass
from types import ModuleType

from jax.experimental.pallas import tpu as pltpu

from kernels.backends.steps import Launched
from kernels.backends.tpu import launch as pallas_tpu
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


@dataclass(frozen=True)
class SimulatedTpu(Launched):
    """Backend `pallas_tpu` with a launch of its own."""

    launch: Launch = Launch(CHIP, SMALL_BLOCKS, interpret=True)
    kernels: ModuleType = pallas_tpu

    def with_vmem(self, capacity: int) -> "SimulatedTpu":
        """Returns the same on a chip with `capacity` bytes of vector memory."""
        chip = dataclasses.replace(self.launch.chip, vmem_capacity_bytes=capacity)
        return SimulatedTpu(dataclasses.replace(self.launch, chip=chip))


def on_chip(version: pltpu.ChipVersion) -> SimulatedTpu:
    """Returns the backend with the block sizes of that chip."""
    chip = pltpu.get_tpu_info_for_chip(version, 1)
    return SimulatedTpu(Launch(chip, interpret=True))
