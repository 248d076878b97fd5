import json
from pathlib import Path

import jax
import pytest

from kernels.backends.tpu.block_sizes import TpuBlocks
from tests.tools.test_bundles import make_texts
from tools import tpu_schedule
from tools.lib.compiled.bundles import read_schedule, tile_body
from tools.lib.compiled.tile_program import Compiled, Tile
from tools.tpu_schedule import Measurement, measure


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
def test_soft_cap_costs_the_known_bundles_and_nothing_where_it_is_off():
    off, on = (measure(make_tile(soft_cap=cap), None).row() for cap in (None, 50.0))
    assert (off["bundles"], off["used_eup"], off["soft_cap"]) == (3872, 1024, None)
    assert on["bundles"] == pytest.approx(4430, rel=0.02)
    assert (on["used_eup"], on["soft_cap"]) == (3072, 50)  # exp2, 1 / x and exp2


@pytest.mark.thorough
def test_what_does_not_compile_says_why():
    too_large = TpuBlocks(4096, 4096, 4096, 4096, 0, 0)
    with pytest.raises(
        ValueError, match=r"4096.* does not compile: ValueError: tiles that take"
    ):
        measure(make_tile(), too_large)


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
    def pretend(tile, blocks):
        if tile.chip == "v4":
            raise ValueError("it does not compile: VMEM")
        return make_measurement(tile, blocks)

    monkeypatch.setattr(tpu_schedule, "measure", pretend)
    path = tmp_path / "rows.json"
    arguments = "--chips", "v5e", "v4", "--regions", "2", "--output", str(path)
    assert tpu_schedule.main(arguments) == 1
    (row,) = json.loads(path.read_text())
    assert (row["chip"], row["kernel"], row["bundles"]) == ("v5e", "ours", 2)
    assert row["device_kind"] == "TPU v5 lite"
    assert row["jax"] == jax.__version__ and "commit" in row
    shown = capsys.readouterr()
    assert shown.err == "error: it does not compile: VMEM\n"
    assert "0x0 to     0x2:      2 bundles, 0 loops; MXU 6, XLU 0, VALU 1" in shown.out
    assert "v5e    1024 x 1024" in shown.out and "75.0%" in shown.out
