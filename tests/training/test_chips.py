"""The table of chips against JAX's own, and what each is asked to do."""

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

from training import chips
from training.chips import CHIPS
from training.overlap import OFFLOADS, parameter_options

PEAKS = {
    "NVIDIA A100-SXM4-80GB": ("A100 80GB", 312e12),
    "NVIDIA H100 80GB HBM3": ("H100 SXM", 989e12),
    "NVIDIA H200": ("H200", 989e12),
    "NVIDIA B200": ("B200", 2250e12),
}


def test_known_kinds_have_their_published_peak_and_others_nothing():
    found = {kind: chips.find(kind) for kind in PEAKS}
    assert {k: (chip.name, chip.peak_flops) for k, chip in found.items()} == PEAKS
    with pytest.raises(ValueError, match="matrix_units of H200 must be known, got 0"):
        _ = found["NVIDIA H200"].bundles_per_second
    unknown = ["", "TPU v4 lite", "TPU v9", "NVIDIA H100 PCIe", "NVIDIA H200 NVL", "v4"]
    for kind in [*unknown, jax.devices("cpu")[0].device_kind]:
        assert chips.find(kind) is None


def test_options_are_those_that_the_chip_can_follow():
    """Collectives of parameters run beside the compute, where they can."""
    assert parameter_options(None) == {}
    for chip in CHIPS:
        options, wanted = parameter_options(chip), set()
        if chip.name in ("TPU v5p", "TPU v6e", "TPU7x"):
            wanted = set(OFFLOADS)
        elif chip.name == "TPU v4":
            wanted = {"xla_enable_async_all_gather"}
        assert options == dict.fromkeys(wanted, "true") and len(OFFLOADS) == 3


@pytest.mark.parametrize(
    ("kind", "version", "cores", "hertz"),
    [
        ("TPU v3", "v3", 1, 0.94e9),
        ("TPU v4", "v4", 2, 1.05e9),
        ("TPU v5 lite", "v5e", 1, 1.5e9),
        ("TPU v5", "v5p", 2, 1.75e9),
        ("TPU v6 lite", "v6e", 1, 1.75e9),
        ("TPU7x", "7x", 1, None),
    ],
)
def test_tpu_rows_are_per_device_and_near_the_compilers_own(
    kind, version, cores, hertz
):
    """JAX's rounded table differs by up to 14 %; half a chip would differ by 100 %."""
    chip = chips.find(kind)
    assert chip.name == f"TPU {version}".replace("TPU 7x", "TPU7x")
    if hertz is not None:  # a core starts a bundle a cycle
        assert chip.bundles_per_second == pytest.approx(cores * hertz, rel=3e-3)
    # JAX's numbers are those of one TensorCore.
    info = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion(version), cores)
    for ours, theirs, tolerance in (
        (chip.peak_flops, info.bf16_ops_per_second, 0.15),
        (chip.hbm_bytes, info.hbm_capacity_bytes, 0.02),
        (chip.hbm_bytes_per_second, info.mem_bw_bytes_per_second, 0.15),
    ):
        assert ours == pytest.approx(cores * theirs, rel=tolerance)
