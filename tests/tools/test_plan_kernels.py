"""Times of kernels: sums of parts of compiled kernels, and what they wait for."""

import json

import pytest

from kernels.layouts import Striped
from tools import tpu_kernel_parts
from tools.lib.planning.kernels import (
    PARTS,
    PRODUCTS,
    Kernels,
    Launched,
    read_kernel_parts,
)
from tools.lib.planning.ring import Ring
from tools.lib.planning.ring_steps import (
    Sequence,
    visible_pairs,
    work,
)
from tools.tpu_schedule import measure
from training import chips

V3, V4, V5E, V5P, V6E, H200 = map(
    chips.find,
    (
        "TPU v3",
        "TPU v4",
        "TPU v5 lite",
        "TPU v5",
        "TPU v6 lite",
        "NVIDIA H200",
    ),
)


def make_ring(length, size=8, heads=8, documents=(), **fields):
    sequence = Sequence(Striped(), size, length, documents)
    values = {"heads": heads, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    sent = 2 * length * 8 * 128 * 2
    return Ring(sequence, 1, **values | fields, keys_bytes=sent, gradients_bytes=0)


def per_pair(chip, length, direction="forward", **fields):
    """Seconds of a visible pair, by those of a full tile."""
    ring, kernels = make_ring(length, **fields), Kernels.of(chip)
    pairs = ring.heads * length**2 / 2
    seconds = ring.times(kernels, direction).kernels / ring.steps
    return seconds / pairs / kernels.seconds[direction]


def test_full_tiles_are_as_fast_as_their_schedules_and_no_faster_than_the_peak():
    fast = Kernels.of(V5E)
    # 3877 bundles at 1.5 GHz would beat the peak: 2 products of 1024 x 1024 x 128.
    assert fast.seconds["forward"] == pytest.approx(4 * 128 / 197e12)
    slower, seconds = Kernels.of(V4), 4144 / 4096 * 4 * 128 / 275e12
    assert slower.seconds["forward"] == pytest.approx(seconds, rel=0.03)
    assert "forward 4142, backward 10240" in slower.source
    # A v6e's two products of 1024 x 1024 x 128 take 1024 bundles at its peak.
    wide = Kernels.of(V6E).seconds["forward"]
    assert wide == pytest.approx(1831 / 1024 * 4 * 128 / 918e12, rel=1e-3)


@pytest.mark.parametrize("chip", [V3, H200])
def test_kernels_without_parts_take_an_assumed_share(chip):
    kernels = Kernels.of(chip)
    assert kernels.seconds["forward"] == 2 * 2 * 128 / (0.6 * chip.peak_flops)
    assert "assumed" in kernels.source
    seconds = make_ring(1024, size=1).times(kernels, "forward").kernels
    # 10 of 16 sub-tiles are live.
    assert seconds == 8 * 10 * 256**2 * kernels.seconds["forward"]


@pytest.mark.parametrize("chip", [V4, V5E, V5P, V6E], ids=lambda chip: chip.name)
def test_short_shards_take_longer_for_a_pair_than_full_tiles(chip):
    for direction in PRODUCTS:
        found = [per_pair(chip, 2**n, direction) for n in range(10, 19)]
        assert found == sorted(found, reverse=True)
        assert 1 < found[-1] < 1.05 and found[2] > 1.1


def test_sum_of_the_parts_is_that_of_kernels_compiled_at_every_length():
    rows = json.loads((PARTS.parent / "kernel_checks.json").read_text())
    assert len(rows) == 4 * 4 * 8
    kernels = {kind: Kernels.of(chips.find(kind)) for kind, *_ in read_kernel_parts()}
    for row in rows:
        kind, direction, length, source = (
            row[name] for name in ("device_kind", "direction", "length", "source")
        )
        if (direction, source) == ("backward", "own"):
            continue  # two kernels, each of half of the queries
        keys = length, row["kv_heads"]
        shape = 1, *keys, 128
        kernel = Launched.of(
            row["chip"], direction, row["has_carry"], shape, keys, "bfloat16"
        )
        assert kernel.goes_on == row["goes_on"]
        shard = {"visiting": 0, "own": 7}[source]
        bounds = Sequence(Striped(), 8, length).bounds(7, shard, kernel.blocks.piece)
        found = work(direction, bounds, kernel.blocks, length)
        parts = read_kernel_parts()[kind, direction, kernel.goes_on]
        bundles = kernel.bundles(found, parts)
        assert bundles == pytest.approx(row["bundles"], rel=0.04), row
        least = bundles / kernels[kind].chip.bundles_per_second
        seconds = kernels[kind].call_seconds(kernel, found)
        # A v6e's backward at 1 Ki waits for 1.5 MiB, four fifths of its work.
        assert 0.999 * least < seconds < 1.9 * least


def test_packed_documents_take_less_than_one_and_more_than_their_pairs():
    kernels = Kernels.of(V5E)
    whole, packed = (
        make_ring(2**14, documents=documents).times(kernels, "forward").kernels
        for documents in ((), (2**13,))
    )
    pairs = [visible_pairs(documents, 2**17) for documents in ((), (2**13,))]
    assert pairs[0] / pairs[1] == pytest.approx(16, rel=1e-3)
    # Each of 16 tiles of queries still has one diagonal tile.
    assert 9 < whole / packed < 11


def test_half_of_the_queries_is_a_ring_of_its_own():
    kernels, ring = Kernels.of(V5E), make_ring(2**15, size=4)
    times = [
        part.times(kernels, "forward").kernels
        for part in (ring, ring.part("front"), ring.part("tail"))
    ]
    assert times[1] + times[2] == pytest.approx(times[0], rel=0.01)
    assert 0.25 < times[1] / times[0] < 0.27
    assert ring.part("front").keys_bytes == ring.keys_bytes // 2


def test_table_has_a_line_for_each_kernel_and_a_column_for_each_length():
    rows = [
        {"chip": chip, "direction": "forward", "source": source, "length": length}
        | {"over_ideal": over}
        for chip, source, length, over in (
            ("v5e", "own", 4096, 1.25),
            ("v5e", "own", 1024, 3.5),
            ("v6e", "own", 1024, 4.75),
            ("v6e", "own", 4096, 1.5),
        )
    ]
    head, *lines = tpu_kernel_parts.table(rows).splitlines()
    assert head.split()[-2:] == ["1,024", "4,096"]
    assert [line.split() for line in lines] == [
        ["forward", "own", "v5e", "3.500", "1.250"],
        ["forward", "own", "v6e", "4.750", "1.500"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("direction", PRODUCTS)
def test_sum_of_the_parts_is_that_of_a_kernel_compiled_now(direction):
    tile = tpu_kernel_parts.tile("v6e", direction, 2048, direction == "forward")
    measured = measure(tile, None)
    for source in tpu_kernel_parts.sources(tile).values():
        found = tpu_kernel_parts.compare(measured, source)
        assert found["estimated"] == pytest.approx(found["bundles"], rel=0.05)
        assert found["bundles"] > 1.1 * found["full_tiles"]
        # 36 of 64 sub-tiles are live, and 2049 / 4096 of the pairs.
        assert found["full_tiles"] / found["ideal"] == pytest.approx(1.125, rel=1e-3)
        took = found["bundles"] + found["waited_bundles"]
        assert found["over_ideal"] == pytest.approx(took / found["ideal"])


@pytest.mark.slow
def test_backward_on_the_own_keys_runs_twice_as_the_ring_does():
    tile = tpu_kernel_parts.tile("v5e", "backward", 1024, False)
    assert tpu_kernel_parts.sources(tile) == {"visiting": 0, "own": 7}
    measured = measure(tile, None)
    visiting, own = (tpu_kernel_parts.compare(measured, n) for n in (0, 7))
    assert own["ideal"] == visiting["ideal"]
    assert own["waited_bundles"] == 2 * visiting["waited_bundles"]
    assert own["bundles"] > visiting["bundles"]
