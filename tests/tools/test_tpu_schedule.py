"""Schedules of the TPU's compiler: as they are read, measured and compared."""

import dataclasses

import pytest

from kernels.backends.tpu.block_sizes import TpuBlocks
from tools import tpu_schedule
from tools.lib.compiled.bundles import Body, Span, bodies, read_schedule, tile_body
from tools.lib.compiled.pods import PODS
from tools.lib.compiled.tile_program import Tile
from tools.tpu_schedule import Measurement, measure


@pytest.mark.parametrize("cap", [None, 50.0])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_table_has_blocks_of_every_chip(direction, cap):
    for chip in PODS:
        tile = Tile(chip, direction, 1024, 1024, 128, "bfloat16", 1, 4096, cap)
        assert tile.own_blocks().block_k >= 512


UTILIZATION = """== CAPACTIY:
MXU, XLU, VALU, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL
    4     3     4     3     3     1     1
== UTILIZATION:
"""


def make_texts(*bundles):
    """The two texts of a schedule, of (label, loops, instructions, MXU slots)."""
    text, table = "= control target key start\nLB: loop body\n= end\n", UTILIZATION
    for place, (label, depth, instructions, mxu) in enumerate(bundles):
        address = f"{place:#x}" if place else "0"
        label = f"{label}:" if label else "  :"
        text += f"\n{address:>6} {label} {'>' * depth} {{ {instructions} }}"
        table += f"{mxu} 0 {place} 3 1 4 2\n"
    return text, table


def read(*bundles):
    return read_schedule(*make_texts(*bundles))


def branch(target):
    return f"%7 = sbr.rel (%p3) target = $region{target}"


def test_regions_lie_between_branches_and_labels():
    schedule = read(
        ("", 0, "%s1 = smov 0", 0),
        ("LB", 1, "%2 = sld } /* Start region 2", 0),
        ("", 1, f"{branch(4)} ;; %s3 = sadd", 0),
        ("", 1, "%4 = vmatmul", 3),
        ("", 1, "%5 = vmatmul", 4),
        ("PF", 1, "%6 = vpop } /* Start/End empty region 4 :: Start region 5", 0),
        ("", 1, branch(2), 0),
        ("", 0, "%8 = sfence", 0),
    )
    whole, loop, skipped = Span(0, 8), Span(1, 6), Span(2, 5)
    regions = schedule.regions
    assert [(r.begin, r.end, r.used["MXU"], r.inside) for r in regions] == [
        (0, 1, 0, whole),
        (1, 2, 0, loop),
        (2, 5, 7, skipped),
        (5, 6, 0, loop),
        (6, 8, 0, whole),
    ]
    units = "MXU", "XLU", "VALU", "VLOAD", "VLOAD:FILL", "VSTORE", "VSTORE:SPILL"
    used = dict(zip(units, (7, 0, 9, 9, 3, 12, 6), strict=True))
    assert regions[2].used == used
    assert tile_body(schedule) == Body(3, used, 7 / 4)


def test_full_tile_is_the_plainest_body_with_the_most_work():
    schedule = read(
        ("LB", 1, "} /* Start region 1", 0),
        ("", 1, branch(2), 8),  # a part of a tile, with the least vector work
        ("PF", 1, f"{branch(3)} }} /* Start/End empty region 2", 40),  # a full tile
        ("", 1, "%1 = vpop", 0),
        ("", 1, "%2 = vpop", 0),
        ("PF", 1, f"{branch(4)} }} /* Start/End empty region 3", 41),  # a masked tile
        ("", 1, "%3 = vsel", 0),
        ("PF", 1, "} /* Start/End empty region 4", 0),
        ("", 1, branch(1), 0),
    )
    found = [(body.bundles, body.used["VALU"]) for body in bodies(schedule)]
    assert found == [(1, 1), (3, 2 + 3 + 4), (2, 5 + 6)]
    assert tile_body(schedule).used["MXU"] == 40


def make_tile(direction="forward", chip="v5e", block=1024, group=1, **options):
    shape = block, block, 128, "bfloat16", group, 4096
    return Tile(chip, direction, *shape, **options)


BUNDLES, USED = make_texts(("", 0, "%1 = vadd", 0), ("", 0, "%2 = vadd", 0))
REFUSED = [
    (lambda: make_tile(block=1536), "self.length=4096 is not a multiple"),
    (lambda: make_tile(group=3), "self.block_q=1024 is not a multiple of"),
    (
        lambda: read_schedule(BUNDLES, USED.removesuffix("0 0 1 3 1 4 2\n")),
        "2 bundles, but utilization of 1",
    ),
    (lambda: tile_body(read_schedule(BUNDLES, USED)), "no work for the MXU"),
]


@pytest.mark.parametrize(("call", "said"), REFUSED)
def test_what_cannot_be_read_or_compiled_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def make_measurement(tile, way=None, pieces=2):
    """Of a made-up kernel, whose body has 3 of 4 MXU slots used in each bundle."""
    body = [("", 0, "%1 = vmatmul", 3)] * pieces
    return Measurement(tile, way, 3 * 2**20, read(*body))


@pytest.mark.thorough
def test_soft_cap_costs_the_known_bundles_and_nothing_where_it_is_off():
    tiles = (make_tile(block=512, soft_cap=cap) for cap in (None, 50.0))
    off, on = (measure(tile, None).row() for tile in tiles)
    assert off["bundles"] == pytest.approx(1060, rel=0.02)
    assert (off["used_eup"], off["soft_cap"]) == (256, None)
    assert on["bundles"] == pytest.approx(1362, rel=0.02)
    assert (on["used_eup"], on["soft_cap"]) == (768, 50)  # exp2, 1 / x and exp2


@pytest.mark.thorough
def test_blocks_asked_for_are_those_that_are_compiled():
    row = measure(make_tile(), TpuBlocks(256, 512, 128, 128, 0, 0)).row()
    # Eight bodies of 754 bundles: 423 filled by the MXU, without spills. Bodies that
    # hide scores or take their maximum are as long, as they have all of the rows too.
    assert (row["bodies"], row["used_vstore_spill"]) == (8, 0)
    assert row["bundles"] == pytest.approx(6032, rel=0.02)
    assert row["mxu_bound"] == pytest.approx(3384, rel=0.02)
    assert row["vmem_bytes"] == pytest.approx(1740800, rel=0.02)
    too_large = TpuBlocks(4096, 4096, 4096, 4096, 0, 0)
    said = r"4096.* does not compile: ValueError: tiles that take"
    with pytest.raises(ValueError, match=said):
        measure(make_tile(), too_large)


def test_a_chip_without_a_result_makes_the_status_1(monkeypatch, capsys):
    def pretend(tile, blocks):
        if tile.chip == "v4":
            raise ValueError("it does not compile: VMEM")
        return make_measurement(tile, blocks)

    monkeypatch.setattr(tpu_schedule, "measure", pretend)
    assert tpu_schedule.main(["--chips", "v5e", "v4"]) == 1
    shown = capsys.readouterr()
    assert shown.err == "error: v4: it does not compile: VMEM\n"
    assert " v5e  1024 x 1024 " in shown.out and "75.0%" in shown.out


# Block sizes that are searched for.

BLOCKS = TpuBlocks(1024, 1024, 512, 256, 1, 0)


def test_the_best_is_shown_and_every_row_that_compiles_is_written(
    rows_of, monkeypatch, capsys
):
    def refuse_wide(tile, blocks):
        if blocks.rows == 1024:
            raise ValueError("VMEM")
        return make_measurement(tile, blocks, 32 if blocks.rows == 128 else 16)

    tables = {"v4": dataclasses.replace(BLOCKS, rows=1024), "v5e": BLOCKS}
    monkeypatch.setitem(tpu_schedule.TPU_BLOCKS, "backward", (tables, {}))
    monkeypatch.setattr(tpu_schedule, "measure", refuse_wide)
    arguments = "--chips v5e v4 --direction backward --try rows=128,256,1024,2048"
    rows = rows_of(tpu_schedule, *arguments.split())
    assert {row["kernel"] for row in rows} == {"flash_backward"}
    names = "chip", "blocks_rows", "bundles"
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("v5e", 512, 16),
        ("v5e", 256, 16),
        ("v5e", 128, 32),
        ("v4", 256, 16),
        ("v4", 128, 32),
    ]
    shown = capsys.readouterr()
    assert "v4: VMEM" in shown.err and "v5e: VMEM" in shown.err
    best = dataclasses.replace(BLOCKS, rows=256)
    assert shown.out.endswith(f"v4: {best}\nv5e: {BLOCKS}\n")
