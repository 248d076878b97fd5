"""A B200 as an AOT topology, made of the H200's description."""

import jax
from jax.experimental import topologies

from tools.lib.compiled.pods import GPUS

DIFFERENT = {
    "major: 9 minor: 0": "major: 10 minor: 0",
    "Capability 9.0a": "Capability 10.0a",
    "core_count: 132": "core_count: 148",
    "NVIDIA H200": "NVIDIA B200",
}


def b200_devices(gpus: int = 1) -> list[jax.Device]:
    """Returns the GPUs of a host, whose code is compiled for sm_100a."""
    config = GPUS["h200"]
    for of_h200, of_b200 in DIFFERENT.items():
        assert of_h200 in config
        config = config.replace(of_h200, of_b200)
    return topologies.get_topology_desc(
        "", "cuda", topology=f"1x1x{gpus}", target_config=config
    ).devices
