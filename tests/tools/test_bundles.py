import pytest

from tools.lib.compiled.bundles import Body, Span, bodies, read_schedule, tile_body

UTILIZATION = """== CAPACTIY:
MXU, XLU, VALU, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL
    4     3     4     3     3     1     1
== UTILIZATION:
"""


def make_texts(*bundles):
    """The two texts of a schedule, of (label, loops, instructions, MXU slots)."""
    text, table = "= control target key start\nLB: loop body\n= end\n", UTILIZATION
    for place, (label, depth, instructions, mxu) in enumerate(bundles):
        address, label = (
            f"{place:#x}" if place else "0",
            f"{label}:" if label else "  :",
        )
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
    assert [(r.begin, r.end, r.depth, r.used["MXU"], r.inside) for r in regions] == [
        (0, 1, 0, 0, whole),
        (1, 2, 1, 0, loop),
        (2, 5, 1, 7, skipped),
        (5, 6, 1, 0, loop),
        (6, 8, 1, 0, whole),
    ]
    units = "MXU", "XLU", "VALU", "VLOAD", "VLOAD:FILL", "VSTORE", "VSTORE:SPILL"
    used = dict(zip(units, (7, 0, 9, 9, 3, 12, 6), strict=True))
    assert regions[2].used == used
    assert schedule.slots == dict(zip(units, (4, 3, 4, 3, 3, 1, 1), strict=True))
    body = tile_body(schedule)
    assert body == Body(skipped, 3, used, 7 / 4)
    assert (body.mxu_share, body.spills) == (7 / 12, 9)


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


def test_texts_that_do_not_fit_are_refused():
    bundles, used = make_texts(("", 0, "%1 = vadd", 0), ("", 0, "%2 = vadd", 0))
    for utilization, said in (
        (used.removesuffix("0 0 1 3 1 4 2\n"), "2 bundles, but utilization of 1"),
        (used.replace("1 4 2", "1 4 2 0"), r"do not have columns \['MXU', 'XLU'"),
        ("", "no table of utilization"),
        (used, "no work for the MXU"),
    ):
        with pytest.raises(ValueError, match=said):
            tile_body(read_schedule(bundles, utilization))
