"""Every backend by name; kernels of a chip that is not there are interpreted.

With the jax that these were tested with: under another one they are left out.
"""

import dataclasses

import jax

from kernels import backends
from kernels.backends import tokamax_gpu
from kernels.devices.device import device_kind, is_blackwell, is_hopper

KIND = device_kind()

BACKENDS = dict(backends.IMPLEMENTATIONS.anywhere)
LONG: dict[str, backends.Backend] = {}
"""In place of these for long problems: with fewer programs to interpret."""
if jax.__version__ == backends.TESTED_JAX:
    from tests.support.simulated_hopper import DETERMINISTIC, SIMULATED_HOPPER
    from tests.support.simulated_tokamax import SIMULATED_TOKAMAX
    from tests.support.simulated_tpu import SIMULATED_TPU
    from tests.support.simulated_triton import LARGE_BLOCKS, SIMULATED_GPU

    BACKENDS = dict(backends.IMPLEMENTATIONS)
    if not KIND.startswith("TPU"):
        BACKENDS["pallas_tpu"] = SIMULATED_TPU
    if not KIND.startswith("NVIDIA"):
        BACKENDS["triton"] = SIMULATED_GPU
        LONG["triton"] = dataclasses.replace(SIMULATED_GPU, blocks=LARGE_BLOCKS)
    has_tokamax = tokamax_gpu.installed_version() == tokamax_gpu.TESTED
    if not (has_tokamax and (is_hopper(KIND) or is_blackwell(KIND))):
        BACKENDS["tokamax"] = SIMULATED_TOKAMAX
    if not is_hopper(KIND):
        BACKENDS["hopper"] = SIMULATED_HOPPER
        BACKENDS["hopper_deterministic"] = DETERMINISTIC
