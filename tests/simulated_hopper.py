"""The Hopper kernels where there is no Hopper GPU: Pallas interprets them on a CPU.

Shared memory holds nan until it is written. Products of an operand in registers and
additions by TMA are emulated (see `mosaic_gpu`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import (
    reset_gpu_interpret_mode_state,
)

from kernels.hopper import launch as hopper
from kernels.hopper import shared as gpu
from kernels.hopper.launch import HopperBlocks, Launch

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


RACES = gpu.Interpreter(detect_races=True, uninitialized_memory="nan")


def run_without_wait(
    left_out: int, run: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str]:
    """Interprets a kernel without one of its waits, by number as they are traced.

    Returns:
      How many waits there are, and what the interpreter failed with, if it did.
    """
    waits = []
    original = gpu.wait

    def wait(barrier: jax.Ref) -> None:
        waits.append(barrier)
        if len(waits) - 1 != left_out:
            original(barrier)

    monkeypatch.setattr(gpu, "wait", wait)
    try:
        run()
    except jax.errors.JaxRuntimeError as error:
        reset_gpu_interpret_mode_state()
        return len(waits), str(error)
    return len(waits), ""
