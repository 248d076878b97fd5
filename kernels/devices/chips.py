"""Lists the accelerators' peaks: the one table that this project divides by."""

from dataclasses import dataclass, replace

GIB = 2**30
GB = 10**9
UNIT_FLOPS = 2 * 128**2
"""FLOPs of a unit of 128 x 128 in a cycle."""


@dataclass(frozen=True)
class Chip:
    """Published peaks of one JAX *device*.

    A device is a chip, except on TPU v3 and TPU7x, where a chip holds two devices and
    every number of the device is half of the chip's.

    Attributes:
      name: the name used in tables and plots.
      device_kinds: the values of `jax.Device.device_kind` that mean this chip.
      peak_flops: dense bfloat16 FLOP/s (NVIDIA's sheets also print twice as much, with
        sparsity; that number is not here).
      hbm_bytes: memory. TPU: the vendor's figure read as GiB, which is what the
        hardware has. NVIDIA: the printed figure in 10^9 bytes, a little less than what
        the driver reports.
      hbm_bytes_per_second: peak memory bandwidth.
      interconnect_bytes_per_second: one way. TPU: one ICI link of the chip (a chip has
        4 links in a 2D torus, 6 in a 3D torus; a ring uses one link per direction).
        NVIDIA: all NVLinks of the GPU together, since the switch gives every pair of
        GPUs the full rate.
      matrix_units: of a core, units of 128 x 128 bfloat16 products a cycle; 0 where no
        schedule is read. v4 and v5p have two cores. A v6e has 2 units of 256 x 256 and
        counts 16: they take two rows a cycle, as heads of 256 fill as many slots as
        those of 128, and with one row the peak would need a clock of 3.5 GHz. A core
        of TPU7x is counted alike, for a clock of 2.2 GHz.
      link_latency: seconds before the first byte of a transfer; 0 if not published.
      sparse_cores: whether the compiler lets SparseCores run collectives; it does not
        on v4 and earlier chips.
      stalls: rows of STALLS, by direction; () for kernels that never wait.
    """

    name: str
    device_kinds: tuple[str, ...]
    peak_flops: float
    hbm_bytes: int
    hbm_bytes_per_second: float
    interconnect_bytes_per_second: float
    matrix_units: int = 0
    sparse_cores: bool = False
    link_latency: float = 0.0
    stalls: tuple[tuple[str, tuple[float, int, int]], ...] = ()

    @property
    def bundles_per_second(self) -> float:
        """Bundles that all cores start in a second where matrix units reach the peak.

        Raises:
          ValueError: the units of this chip are not in the table.
        """
        if not self.matrix_units:
            raise ValueError(f"matrix_units of {self.name} must be known, got 0")
        return self.peak_flops / (self.matrix_units * UNIT_FLOPS)


CHIPS = (
    # docs.cloud.google.com/tpu/docs/v3, per chip 123 TFLOP/s, 32 GiB, 900 GB/s; the
    # link from the scaling book.
    Chip("TPU v3", ("TPU v3",), 61.5e12, 16 * GIB, 450e9, 100e9, 2),
    # docs.cloud.google.com/tpu/docs/v4; the link from the scaling book.
    Chip("TPU v4", ("TPU v4",), 275e12, 32 * GIB, 1200e9, 45e9, 4),
    # docs.cloud.google.com/tpu/docs/v5e: 400 GB/s both ways over 4 links.
    Chip("TPU v5e", ("TPU v5 lite", "TPU v5e"), 197e12, 16 * GIB, 819e9, 50e9, 4),
    # docs.cloud.google.com/tpu/docs/v5p: 1200 GB/s both ways over 6 links.
    Chip("TPU v5p", ("TPU v5", "TPU v5p"), 459e12, 95 * GIB, 2765e9, 100e9, 4, True),
    # docs.cloud.google.com/tpu/docs/tpu7x, v6e column: 800 GB/s both ways over 4 links.
    Chip(
        "TPU v6e", ("TPU v6 lite", "TPU v6e"), 918e12, 32 * GIB, 1638e9, 100e9, 16, True
    ),
    # docs.cloud.google.com/tpu/docs/tpu7x, per chip 2307 TFLOP/s, 192 GiB, 7380 GB/s,
    # 1200 GB/s both ways over 6 links.
    Chip("TPU7x", ("TPU7x",), 1153.5e12, 96 * GIB, 3690e9, 100e9, 16, True),
    # torchtitan's table of peaks; NVLink 3: 600 GB/s both ways. Only the SXM board: the
    # PCIe board has slower memory and no switch.
    Chip("A100 80GB", ("NVIDIA A100-SXM4-80GB",), 312e12, 80 * GB, 2039e9, 300e9),
    # torchtitan's table of peaks; NVLink 4: 900 GB/s both ways. Not the NVL (835
    # TFLOP/s) and PCIe (756 TFLOP/s) boards, which report other kinds.
    Chip("H100 SXM", ("NVIDIA H100 80GB HBM3",), 989e12, 80 * GB, 3350e9, 450e9),
    # torchtitan's table of peaks, MLPerf system descriptions; NVLink 4.
    Chip("H200", ("NVIDIA H200",), 989e12, 141 * GB, 4800e9, 450e9),
    # torchtitan's table of peaks, ml-engineering; NVLink 5: 1800 GB/s both ways. The
    # smaller of the two memory sizes sold.
    Chip("B200", ("NVIDIA B200",), 2250e12, 180 * GB, 8000e9, 900e9),
    # NVIDIA's sheet of the GB200 NVL72 by 72: 180 PFLOP/s (torchtitan's table has the
    # same), 13.4 TB, 576 TB/s; 130 TB/s of NVLink 5 both ways.
    Chip("GB200", ("NVIDIA GB200",), 2500e12, 186 * GB, 8000e9, 900e9),
)


def find(device_kind: str) -> Chip | None:
    """Returns the chip that reports this `jax.Device.device_kind`, or None.

    Only exact names count: an unknown device has no MFU rather than a guessed one.
    """
    return next((chip for chip in CHIPS if device_kind in chip.device_kinds), None)


LINKS = {"TPU v5p": (4.55e-6, 86.3e9), "TPU v6e": (2.29e-6, 86.8e9)}
"""Seconds before the first byte, and bytes a second of a link: `lax.ppermute` as others
measured it on v5p-8 and v6e-8 (marin-community/marin#6736, June 2026)."""


def measured(chip: Chip) -> Chip:
    """Returns a chip with links as they were measured, if they were."""
    latency, rate = LINKS.get(chip.name, (0.0, chip.interconnect_bytes_per_second))
    return replace(chip, link_latency=latency, interconnect_bytes_per_second=rate)


STALLS = {
    "TPU v5p": {"forward": (1.04, 3200, 1900)},
    "TPU v6e": {"forward": (1.09, 2700, 900)},
    "TPU7x": {"forward": (1.14, 2100, 1500), "backward": (1.28, 4700, 1900)},
}
"""Cycles of kernels that wait: of a full tile, over its bundles; of a program, beside
its tiles; and extra for a diagonal tile.

Fitted to what tokamax measured of its own kernels, full and causal, 1 to 16 Ki keys
(results/2026-11-29-stalls.md). Ours have not run on a TPU."""


def stalled(chip: Chip) -> Chip | None:
    """Returns a chip whose kernels wait as others' do; None if nobody measured it.

    A backward that nobody measured waits as a forward.
    """
    if chip.name not in STALLS:
        return None
    return replace(chip, stalls=tuple(STALLS[chip.name].items()))
