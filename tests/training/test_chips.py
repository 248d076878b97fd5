"""The table of chips against JAX's own, and that unknown chips stay unknown."""

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

from training import chips


@pytest.mark.parametrize(
    ("kind", "name", "peak_flops"),
    [
        ("TPU v5p", "TPU v5p", 459e12),
        ("TPU7x", "TPU7x", 1153.5e12),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 989e12),
        ("NVIDIA H200", "H200", 989e12),
        ("NVIDIA B200", "B200", 2250e12),
    ],
)
def test_known_kind_has_its_published_peak(kind, name, peak_flops):
    chip = chips.find(kind)
    assert (chip.name, chip.peak_flops) == (name, peak_flops)


def test_chips_whose_schedules_are_not_read_have_no_bundles():
    with pytest.raises(ValueError, match="matrix_units of H200 must be known, got 0"):
        _ = chips.find("NVIDIA H200").bundles_per_second


@pytest.mark.parametrize(
    "kind",
    ["", "TPU v4 lite", "TPU v9", "NVIDIA H100 PCIe", "NVIDIA H200 NVL", "v4"]
    + [jax.devices("cpu")[0].device_kind],
)
def test_unknown_kind_has_no_chip(kind):
    assert chips.find(kind) is None


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
