"""The Hopper kernels where there is no Hopper GPU: Pallas interprets them on a CPU.

Shared memory holds nan until it is written. Products of an operand in registers and
additions by TMA are emulated (see `kernels.backends.hopper.emulation`).
"""

from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import (
    reset_gpu_interpret_mode_state,
)
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.backends.hopper.launch import Launch

# Finding races takes half of the time: the kernels' own tests do.
INTERPRETED = plgpu.InterpretGPUParams(uninitialized_memory="nan")


SIMULATED_HOPPER = Launch((64, 2, 2), INTERPRETED)
"""The backend `hopper`, interpreted, its keys in several tiles."""

DETERMINISTIC = Launch((64, 2, 2), INTERPRETED, is_deterministic=True)

RACES = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")


def run_without_wait(
    kernel: ModuleType, barrier: str, number: int, run: Callable, monkeypatch: Any
) -> tuple[Counter[str], str]:
    """Interprets a kernel without one of its waits.

    barrier, number: which of the waits for this barrier, as they are traced.

    Returns:
      The number of waits for each barrier, and the interpreter's error, if any.
    """
    waits, names = Counter(), {}
    trace, barrier_wait = kernel._kernel, plgpu.barrier_wait

    def named(*arguments) -> None:
        smem = arguments[-1]
        names.update((id(ref), name) for name, ref in smem._asdict().items())
        trace(*arguments)

    def wait(ref: jax.Ref) -> None:
        name = names.get(id(getattr(ref, "ref", ref)))
        if name is None:  # of another kernel
            return barrier_wait(ref)
        if (name, waits[name]) != (barrier, number):
            barrier_wait(ref)
        waits[name] += 1

    monkeypatch.setattr(kernel, "_kernel", named)
    monkeypatch.setattr(plgpu, "barrier_wait", wait)
    try:
        run()
    except jax.errors.JaxRuntimeError as error:
        reset_gpu_interpret_mode_state()
        return waits, str(error)
    return waits, ""
