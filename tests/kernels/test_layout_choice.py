"""The choice of a layout: work by lengths of documents, and planned seconds."""

import jax
import numpy as np
import pytest

from kernels import choose_layout, layouts
from kernels.backends.tile_layout import BlockSizes
from kernels.cost.choice import (
    Choice,
    default_granule,
    known_chip,
    layouts_of,
    options,
    ranked,
)
from kernels.cost.exchange import exchanged_share
from kernels.cost.work import Row, RowOnRing
from kernels.devices import chips
from kernels.layouts import Contiguous, Layout, Mirror, Striped, Zigzag
from kernels.masks import Visible
from tests.cases import table
from tools.lib.benchmarks.problems import tiles_per_step

MAGI = dict(table("kernels.txt", "magi"))


def documents(rng, kind: str, tokens: int) -> tuple[int, ...]:
    """Draws lengths of documents that fill a row.

    kind: "log MEAN", log-normal with sigma 1.2; or "magi MOST", of MAGI up to a length.
    """
    name, number = kind.split()
    found: list[int] = []
    while sum(found) < tokens:
        if name == "log":
            found.append(16 + int(rng.lognormal(np.log(int(number)) - 0.72, 1.2)))
            continue
        spans = [span for span in MAGI if span[1] <= int(number)]
        counts = np.array([MAGI[span] for span in spans], float)
        span = spans[rng.choice(len(spans), p=counts / counts.sum())]
        found.append(int(rng.integers(span[0], span[1] + 1)))
    found[-1] -= sum(found) - tokens
    return tuple(found)


def over_least(layout: Layout, ring: int, rows: list[Row], tile: int) -> float:
    """The slowest devices' tiles of all ring steps, by the pairs of a device."""
    tiles = 0
    for row in rows:
        visible = Visible(row.k_start[None], row.k_end[None])
        work = tiles_per_step(layout, ring, visible, BlockSizes(tile, tile))
        tiles += work.max(axis=0).sum()
    return tiles * tile**2 * ring / sum(row.pairs for row in rows)


@pytest.mark.thorough(quick=2)
@pytest.mark.parametrize(
    "ring, tokens, kind, tile, most, stripes_of_one", table("kernels.txt", "work")
)
def test_stripes_as_wide_as_tiles_are_near_the_least_work(
    ring, tokens, kind, tile, most, stripes_of_one
):
    rng = np.random.default_rng(0)
    rows = [Row.of(documents(rng, kind, tokens), tokens) for _ in range(8)]
    wide, one = (over_least(Striped(m), ring, rows, tile) for m in (tile, 1))
    print(f"stripes of {tile}: {wide:.2f}, of 1: {one:.2f}")
    assert wide <= most and one > stripes_of_one


HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}


@pytest.mark.parametrize(
    "kind, ring, device, layout, counts, one_way",
    table("kernels.txt", "choice", **vars(layouts)),
)
def test_documents_and_chips_choose_the_layout(
    kind, ring, device, layout, counts, one_way
):
    rng, tokens = np.random.default_rng(1), 2**20
    rows = [(tokens,) if kind == "one" else documents(rng, kind, tokens)] * 2
    found = choose_layout(rows, ring, **HEADS, device=device)
    assert found[:3] == (layout, counts, one_way)
    assert found.seconds > 0


@pytest.mark.parametrize(
    "kind, ring, tokens, layout",
    [
        ("one", 8, 2**17, Mirror()),
        ("one", 64, 2**20, Mirror()),
        ("log 1024", 64, 2**20, Contiguous()),
    ],
)
def test_in_natural_order_what_is_exchanged_counts(kind, ring, tokens, layout):
    rng = np.random.default_rng(1)
    rows = [(tokens,) if kind == "one" else documents(rng, kind, tokens)]
    options = HEADS | {"device": "TPU v5e", "layouts": [layout]}
    natural = choose_layout(rows, ring, **HEADS, device="TPU v5e", natural_order=True)
    assert natural.layout == layout
    before = choose_layout(rows, ring, **options)
    # 5 arrays of 32 heads and 6 of 8, in bfloat16, of which half moves in Mirror.
    moved = 208 * 128 * 2 * tokens / ring / 2 if layout == Mirror() else 0
    rate = known_chip("TPU v5e").interconnect_bytes_per_second
    assert natural.seconds - before.seconds == pytest.approx(moved / rate, rel=0.1)


def test_shares_that_are_exchanged_are_those_of_the_layouts():
    shares = [exchanged_share(kind, 8) for kind in (Contiguous(), Mirror(), Zigzag())]
    assert shares == [0, 1 / 2, 7 / 8]
    assert exchanged_share(Striped(4), 8) == 7 / 8
    # Stripes that natural order cannot be exchanged into are not tried.
    assert Striped() not in layouts_of(8, 16 * 5, natural_order=True)
    assert Mirror() in layouts_of(8, 16 * 5, natural_order=True)


@pytest.mark.parametrize("device", ["TPU v5p", "TPU v6 lite"])
def test_wide_stripes_lose_little_on_one_document(device):
    """In shards of 16 Ki; the last device of a step has one stripe more than half."""
    wide, zigzag = (
        choose_layout([(2**20,)], 64, **HEADS, device=device, layouts=[layout]).seconds
        for layout in (Striped(256), Zigzag())
    )
    assert zigzag < wide < 1.03 * zigzag


def test_a_ring_goes_both_ways_where_slower_links_would_be_waited_for():
    chip, limit = chips.find("TPU v5p"), 1.5

    def seconds(one: Choice, slower: float) -> float:
        return 2.0 if one.one_way and slower > limit else 1.0

    (found,) = ranked(options([Zigzag()], may_count=False), seconds, chip)
    assert found == Choice(Zigzag(), one_way=False, seconds=1.0)
    limit = 2.0
    (found,) = ranked(options([Zigzag()], may_count=False), seconds, chip)
    assert found.one_way


def test_large_rings_are_sampled():
    row = Row.of((), 2**17)
    few, every = (RowOnRing(row, Striped(), n, 2**17 // n).work() for n in (256, 64))
    assert few.pairs.shape == (64, 256) and every.pairs.shape == (64, 64)


@pytest.mark.parametrize(
    "rows, said",
    [
        ([], r"rows of \[\] tokens"),
        ([(3, 4), (8,)], r"rows of \[7, 8\] tokens"),
        ([(0, 4)], "of 1 or more"),
    ],
)
def test_rows_that_are_not_alike_are_refused(rows, said):
    with pytest.raises(ValueError, match=said):
        choose_layout(rows, 2, **HEADS)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"device": jax.devices()[0]}, r"device must be a kind .* got .*CpuDevice"),
        ({"num_heads": 0}, "num_heads=0 must be at least 1"),
        ({"num_kv_heads": -8}, "num_kv_heads=-8 must be at least 1"),
        ({"num_kv_heads": 12}, "num_heads=32 must be a multiple of num_kv_heads=12"),
        ({"head_dim": 64.5}, r"head_dim must be a whole number.* got 64\.5"),
        ({"layouts": [Striped]}, r"as Striped\(\).* got <class"),
    ],
)
def test_arguments_of_a_choice_that_cannot_be_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        choose_layout([(64,)], 2, **HEADS | arguments)


@pytest.mark.parametrize("row, granule", table("kernels.txt", "granule"))
def test_stripes_of_cpus_are_tiles(row, granule):
    assert default_granule(*row) == granule


def test_stripes_of_tiles_compute_no_more_of_these_than_contiguous_shards():
    """Stripes of a token compute a tenth more of 128 x 128, on one document."""
    row, tile = Row.of((), 8192), BlockSizes(128, 128)
    visible = Visible(row.k_start[None], row.k_end[None])
    wide = Striped(default_granule(8, 8192, "cpu"))
    kinds = Contiguous(), wide, Striped()
    work = [tiles_per_step(one, 8, visible, tile).sum() for one in kinds]
    assert work == [2080, 2080, 2304]
