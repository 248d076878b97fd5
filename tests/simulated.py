"""Every backend by name; kernels of a chip that is not there are interpreted."""

from kernels import backends
from kernels.backends.hopper import launch as hopper
from kernels.device import device_kind
from tests.simulated_hopper import DETERMINISTIC, SIMULATED_HOPPER
from tests.simulated_tpu import SIMULATED_TPU
from tests.simulated_triton import SIMULATED_GPU

KIND = device_kind()

BACKENDS = dict(backends.IMPLEMENTATIONS)
if not KIND.startswith("TPU"):
    BACKENDS["pallas_tpu"] = SIMULATED_TPU
if not KIND.startswith("NVIDIA"):
    BACKENDS["triton"] = SIMULATED_GPU
if not hopper.HOPPER.match(KIND):
    BACKENDS["hopper"] = SIMULATED_HOPPER
    BACKENDS["hopper_deterministic"] = DETERMINISTIC
