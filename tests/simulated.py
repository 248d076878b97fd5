"""Every backend by name; kernels of a chip that is not there are interpreted."""

from kernels import backends
from kernels.backends.hopper import launch as hopper
from kernels.device import device_kind
from tests.simulated_hopper import DETERMINISTIC, SimulatedHopper
from tests.simulated_tpu import SimulatedTpu
from tests.simulated_triton import SimulatedGpu

KIND = device_kind()

BACKENDS = dict(backends.IMPLEMENTATIONS)
if not KIND.startswith("TPU"):
    BACKENDS["pallas_tpu"] = SimulatedTpu()
if not KIND.startswith("NVIDIA"):
    BACKENDS["triton"] = SimulatedGpu()
if not hopper.HOPPER.match(KIND):
    BACKENDS["hopper"] = SimulatedHopper()
    BACKENDS["hopper_deterministic"] = DETERMINISTIC
