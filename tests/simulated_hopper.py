"""The Hopper kernels where there is no Hopper GPU: Pallas interprets them on a CPU.

Shared memory holds nan until it is written. Products of an operand in registers and
additions by TMA are emulated (see `mosaic_gpu`).
"""

from dataclasses import dataclass

from kernels import hopper
from kernels import mosaic_gpu as gpu
from kernels.hopper import HopperBlocks, Launch

# Finding races takes half of the time: the kernels' own tests do.
INTERPRETED = gpu.Interpreter(uninitialized_memory="nan")


@dataclass(frozen=True)
class SimulatedHopper:
    """The backend `hopper`, its kernels launched as told: in several tiles."""

    launch: Launch = Launch(HopperBlocks(64, 2), interpret=INTERPRETED)

    def forward(self, *operands, **options):
        return hopper.forward(*operands, **options, launch=self.launch)

    def backward(self, *operands, **options):
        return hopper.backward(*operands, **options, launch=self.launch)


DETERMINISTIC = SimulatedHopper(
    Launch(HopperBlocks(64, 2), interpret=INTERPRETED, is_deterministic=True)
)
