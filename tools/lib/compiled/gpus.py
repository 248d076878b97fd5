"""GPUs as XLA's compiler knows them, made of their rows in the table of chips."""

from dataclasses import dataclass
from pathlib import Path

from kernels.devices import chips

SHARED_BYTES = 232448
"""Largest shared memory of a thread block (227 KiB) from Hopper on."""

_FORM = (Path(__file__).parent / "gpu.pbtxt").read_text("utf-8")


@dataclass(frozen=True)
class Gpu:
    """A GPU that is not attached: what the table of chips does not have of it.

    name: in the table of chips.
    memory_bytes: as the driver reports them.
    cores, clock_ghz, l2_bytes: multiprocessors, their clock, the cache of all.
    capability: the compute capability.
    float32_units: of a core.
    block_bytes: largest shared memory of a thread block; a core has 1 KiB more.
    of_host: GPUs of a host.
    joined_hosts: hosts whose GPUs NVLink joins.
    network: bytes a second of a GPU to other hosts, by InfiniBand.
    """

    name: str
    memory_bytes: int
    cores: int = 132
    clock_ghz: float = 1.98
    l2_bytes: int = 52_428_800
    capability: str = "9.0"
    float32_units: int = 128
    block_bytes: int = SHARED_BYTES
    of_host: int = 8
    joined_hosts: int = 1
    network: float = 50e9

    def target_config(self) -> str:
        """Returns a `stream_executor.GpuTargetConfigProto`, as text."""
        (chip,) = (chip for chip in chips.CHIPS if chip.name == self.name)
        major, minor = self.capability.split(".")
        is_accelerated = int(major) >= 9  # has instructions of its generation alone
        return _FORM % {
            "major": major,
            "minor": minor,
            "extension": "ACCELERATED_FEATURES" if is_accelerated else "NONE",
            "version": self.capability + "a" * is_accelerated,
            "cores": self.cores,
            "float32_units": self.float32_units,
            "clock": self.clock_ghz,
            "l2": self.l2_bytes,
            "bandwidth": int(chip.hbm_bytes_per_second),
            "memory": self.memory_bytes,
            "shared_of_core": self.block_bytes + 1024,
            "shared_of_block": self.block_bytes,
            "kind": chip.device_kinds[0],
        }


# openxla/xla, xla/backends/gpu/target_config/specs. The network is that of DGX: 400
# Gb/s a GPU, of A100 200. A rack of GB200 (NVL72) joins 18 hosts.
GPUS = {
    "h200": Gpu("H200", 151_397_597_184),
    "h100": Gpu("H100 SXM", 85_520_809_984),
    "b200": Gpu("B200", 191_514_411_008, 148, 1.965, 132_644_864, "10.0"),
    "gb200": Gpu(
        name="GB200",
        memory_bytes=197_897_748_480,
        cores=152,
        clock_ghz=2.062,
        l2_bytes=135_528_448,
        capability="10.0",
        of_host=4,
        joined_hosts=18,
    ),
    "a100": Gpu(
        name="A100 80GB",
        memory_bytes=85_100_068_864,
        cores=108,
        clock_ghz=1.41,
        l2_bytes=41_943_040,
        capability="8.0",
        float32_units=64,
        block_bytes=166_912,
        network=25e9,
    ),
}
