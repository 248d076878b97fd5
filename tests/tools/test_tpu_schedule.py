import dataclasses
import itertools
import json
import sys
from pathlib import Path

import jax
import pytest

from kernels.tpu.block_sizes import TPU_FORWARD
from tests.tools.test_bundles import make_texts
from tools import tpu_schedule
from tools.lib.tpu_compiler.bundles import read_schedule, tile_body
from tools.lib.tpu_compiler.splash_tiles import BEST, SHAPES, list_splashes
from tools.lib.tpu_compiler.tile_program import Compiled, Splash, Tile
from tools.tpu_schedule import Measurement, measure

SPLASH = Splash("causal", False, 512, 1024, 512)


def make_tile(direction="forward", chip="v5e", block=1024, group=1, **options):
    shape = block, block, 128, "bfloat16", group, 4096
    return Tile(chip, direction, *shape, **options)


TWO_BUNDLES = ("", 0, "%1 = vmatmul", 4), ("", 0, "%2 = vmatmul", 2)


def make_measurement(tile, way=None, body=TWO_BUNDLES):
    """Of a made-up kernel, whose body has by default 6 of 8 MXU slots used."""
    compiled = Compiled("TPU v5 lite", "0.0.48.1", {"kernel": 3 * 2**20})
    schedules = {"kernel": read_schedule(*make_texts(*body))}
    return Measurement(tile, way, compiled, schedules)


@pytest.mark.thorough
def test_splash_forward_on_v5e_takes_the_known_bundles():
    row = measure(make_tile(), SPLASH).row()
    # Two bodies of 2284 bundles: 1954 filled by the MXU, 1026 spills and 1034 fills.
    assert row["bundles"] == pytest.approx(4568, rel=0.02)
    assert row["mxu_bound"] == pytest.approx(3908, rel=0.02)
    assert row["used_vstore_spill"] == pytest.approx(2052, rel=0.02)
    assert row["kernels"].startswith("splash_mha_fwd_no_residuals 45")
    assert (row["bodies"], row["slots_mxu"]) == (2, 4)
    assert 3 * 2**20 < row["vmem_bytes"] < 4 * 2**20


@pytest.mark.thorough
def test_soft_cap_costs_the_known_bundles_and_nothing_where_it_is_off():
    off, on = (measure(make_tile(soft_cap=cap), None).row() for cap in (None, 50.0))
    assert (off["bundles"], off["used_eup"], off["soft_cap"]) == (3872, 1024, None)
    assert on["bundles"] == pytest.approx(4430, rel=0.02)
    assert (on["used_eup"], on["soft_cap"]) == (3072, 50)  # exp2, 1 / x and exp2


@pytest.mark.thorough
def test_what_does_not_compile_says_why():
    too_wide = Splash("full", False, 1024, 1024, 768)
    with pytest.raises(ValueError, match=r"768.* does not compile: ValueError: bkv="):
        measure(make_tile(), too_wide)


def test_row_counts_the_bodies_that_make_up_the_tile():
    row = make_measurement(make_tile(), SPLASH).row()
    assert (row["kernel"], row["splash_block_q"], row["bodies"]) == ("splash", 512, 2)
    assert (row["bundles"], row["mxu_bound"], row["mxu_share"]) == (4, 3, 0.75)
    assert (row["used_mxu"], row["used_vload_fill"]) == (12, 4)
    ours = make_measurement(make_tile(group=4)).row()
    assert (ours["kernel"], ours["splash_block_q"], ours["bodies"]) == ("ours", None, 1)
    assert (ours["bundles"], ours["kernels"]) == (2, "kernel 2")
    blocks = dataclasses.replace(TPU_FORWARD["v5e"], stacked_rows=512, block_k=512)
    cut = make_measurement(make_tile(), blocks).row()
    assert (cut["kernel"], cut["splash_block_q"], cut["bodies"]) == ("ours", None, 4)
    assert (cut["block_q"], cut["bundles"]) == (1024, 8)


@pytest.mark.parametrize(
    ("kernel", "chips"),
    [("splash", ("v4", "v5e", "v5p", "v6e")), ("tokamax", ("v5e", "v5p", "v6e"))],
)
def test_best_tile_is_known_for_every_way_of_running_splash(kernel, chips):
    ways = itertools.product(("forward", "backward"), chips)
    for direction, chip in ways:
        tile = make_tile(direction, chip)
        for splash in list_splashes(tile, [kernel], ("causal", "full"), "best"):
            shape = splash.block_q, splash.block_k, splash.compute_k
            assert BEST[direction][splash.name][chip] == shape in SHAPES[kernel]


def test_splash_is_compiled_with_at_most_twice_the_rows_and_keys():
    def compiled(block, kernel):
        every = list_splashes(make_tile(block=block), [kernel], ["full"], "all")
        return {(one.block_q, one.block_k, one.compute_k) for one in every}

    for kernel, shapes in SHAPES.items():
        assert compiled(1024, kernel) == {*shapes}
        assert compiled(256, kernel) == {(512, 512, 256), (512, 512, 512)}


def test_tokamax_has_one_backward_kernel_and_options_forward():
    def names(direction):
        tile = make_tile(direction)
        return [s.name for s in list_splashes(tile, ["tokamax"], ["full"], "best")]

    assert names("backward") == ["tokamax full, fused"]
    options = "", ", LP", ", no maximum", ", LP, no maximum"
    assert names("forward") == [f"tokamax full{option}" for option in options]


def test_dump_of_exactly_one_kernel_of_the_name_is_read(tmp_path):
    bundles, used = make_texts(("", 0, "%1 = vmatmul", 3))
    for kernel in ("flash_forward.1", "flash_forward_masked", "other"):
        name = f"{tmp_path}/17-{kernel}"
        Path(f"{name}-72-final_bundles.txt").write_text(bundles)
        Path(f"{name}-71-schedule-analysis_final_bundles.txt").touch()
        utilization = Path(f"{name}-70-final_hlo-static-per-bundle-utilization.txt")
        utilization.write_text(used)
    assert tile_body(tpu_schedule.read_dump(tmp_path, "flash_forward")).used["MXU"] == 3
    with pytest.raises(ValueError, match="dumped 0 kernels 'flash', not 1"):
        tpu_schedule.read_dump(tmp_path, "flash")


def test_program_writes_what_compiled_and_tells_what_did_not(
    tmp_path, monkeypatch, capsys
):
    pythons = []

    def pretend(tile, splash, python):
        if splash is None:
            raise ValueError("ours does not compile: VMEM")
        pythons.append((splash.kernel, python))
        return make_measurement(tile, splash)

    monkeypatch.setattr(tpu_schedule, "measure", pretend)
    path = tmp_path / "rows.json"
    arguments = "--chips", "v5e", "v6e", "--regions", "2", "--output", str(path)
    kernels = "--kernels", "ours", "splash", "tokamax", "--python", "other/python"
    assert tpu_schedule.main((*arguments, *kernels)) == 1
    rows = json.loads(path.read_text())
    found = [(row["chip"], row["kernel"], row["splash_mask"]) for row in rows]
    assert found == [
        (chip, kernel, mask)
        for chip in ("v5e", "v6e")
        for kernel, options in (("splash", 1), ("tokamax", 4))
        for mask in ("causal", "full")
        for _ in range(options)
    ]
    apart = ("splash", sys.executable), ("tokamax", "other/python")
    assert set(pythons) == set(apart)
    assert rows[0]["device_kind"] == "TPU v5 lite"
    assert rows[0]["jax"] == jax.__version__ and "commit" in rows[0]
    shown = capsys.readouterr()
    assert shown.err == "error: ours does not compile: VMEM\n" * 2
    assert "0x0 to     0x2:      2 bundles, 0 loops; MXU 6, XLU 0, VALU 1" in shown.out
    assert "v6e   splash full" in shown.out and "75.0%" in shown.out
    assert "v6e   tokamax causal, LP, no maximum" in shown.out
