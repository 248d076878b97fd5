"""Every test runs on 8 simulated CPU devices with strict numeric promotion."""

import jax

from kernels import backend
from tests.simulated_tpu import SimulatedTpu

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

backend.IMPLEMENTATIONS["pallas_tpu"] = SimulatedTpu()
