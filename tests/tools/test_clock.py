"""Seconds of rings: counted pairs, kernels of known chips, and transfers on links."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data.document_mask import DocumentMask
from kernels import layouts
from kernels.cost.choice import mean_times, slower_links
from kernels.cost.clock import Heads, RingCost
from kernels.cost.speed import PRODUCTS, source, speed
from kernels.cost.work import TILE, Row, RowOnRing, document_spans
from kernels.devices import chips
from kernels.masks import Visible
from kernels.ring.comm import Ring
from kernels.ring.routes import (
    HOME_FROM,
    ONE_WAY,
    TURNS_FROM,
    AllShards,
    Counted,
    backward_route,
)
from tests.support.pages import PAGES
from tests.support.rings import ring_mesh

V4, V5E, V5P, V6E, V7X, H200 = map(
    chips.find,
    ("TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x", "NVIDIA H200"),
)
LENGTH = 2048
CAUSAL = DocumentMask()
MASKS = CAUSAL, DocumentMask(window=130), DocumentMask(prefix=1000)


def row_of(tokens, documents=(), mask=CAUSAL):
    index = np.arange(tokens, dtype=np.int32)
    bounds = mask.bounds(index, *document_spans(documents, index, tokens))
    return Row(*bounds, mask.window, is_causal=not mask.prefix)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("documents", [(), (700,), (100, 900, 3000)])
@pytest.mark.parametrize("layout", [layouts.Contiguous(), layouts.Zigzag()], ids=str)
def test_counts_are_those_of_the_mask(layout, documents, mask):
    row = row_of(4 * LENGTH, documents, mask)
    sequence, half = RowOnRing(row, layout, 4, LENGTH), LENGTH // 2
    work = sequence.work()
    assert (work.rows == LENGTH // TILE).all()
    halves = (sequence.work(slots).pairs for slots in ((0, half), (half, LENGTH)))
    np.testing.assert_array_equal(sum(halves), work.pairs)
    for device, shard in ((0, 0), (3, 1), (0, 2)):
        token = np.asarray(layout.index(device, 4, LENGTH))
        key = np.asarray(layout.index(shard, 4, LENGTH))
        first, end = document_spans(documents, token, 4 * LENGTH)
        start = np.maximum(first, token + 1 - (mask.window or 4 * LENGTH))
        stop = np.maximum(token + 1, np.minimum(first + mask.prefix, end))
        seen = (start[:, None] <= key) & (key < stop[:, None])
        subs = seen.reshape(LENGTH // 256, 256, LENGTH // 256, 256).any((1, 3))
        tiles = seen.reshape(LENGTH // TILE, TILE, LENGTH // TILE, TILE)
        partial = tiles.any((1, 3)) & ~tiles.all((1, 3))
        assert work.pairs[device, shard] == subs.sum() * 256**2
        assert work.partial[device, shard] == partial.sum()


def test_a_window_takes_pairs_away_and_a_prefix_brings_some():
    index = np.arange(14)
    behind = index[:, None] - index  # (14, 14)
    document = np.searchsorted((3, 10, 13), index, side="right")
    is_own = document[:, None] == document
    place = index - np.array((0, 3, 10, 13))[document]
    for size in (1, 2, 5, 20):
        seen = is_own & (behind >= 0) & (behind < size)
        assert row_of(14, (3, 7), DocumentMask(window=size)).pairs == seen.sum()
        assert row_of(14, (3, 7)).seen_within(size).pairs == seen.sum()
        seen = is_own & ((behind >= 0) | (place < size))
        assert row_of(14, (3, 7), DocumentMask(prefix=size)).pairs == seen.sum()
    row = row_of(14, (3, 7), DocumentMask(window=2))
    assert row.seen_within(3) is row and row.seen_within(1).window == 1


def make_ring(length, size=64, layout=None, mask=CAUSAL, head_dim=128, **fields):
    sequence = RowOnRing(
        row_of(size * length, mask=mask), layout or layouts.Striped(), size, length
    )
    values = {"route": AllShards(both_ways=True)} | fields
    return RingCost(sequence, 1, Heads(8, 8, head_dim), sent=128, **values)


(MESHES,) = (page for page in PAGES if str(page) == "docs/meshes.md")
MEASURED = re.findall(r"^\| (\d+) Ki ((?:\| [\d.]+ [\d.]+ ){4})\|$", MESHES.text, re.M)


@pytest.mark.parametrize("kilo, cells", MEASURED)
def test_short_shards_take_as_long_as_kernels_that_were_compiled(kilo, cells):
    """Of docs/meshes.md, by summing every part of the kernels at each length."""
    values, length = iter(map(float, re.findall(r"[\d.]+", cells))), 1024 * int(kilo)
    for chip in (V4, V5E, V5P, V6E):
        for direction in PRODUCTS:
            seconds = make_ring(length).times(chip, direction).kernels / 64 / 8
            # Of a visible pair, by that of a full tile.
            full = speed(chip, direction).full / TILE**2
            found = seconds / (length**2 / 2) / full
            assert found == pytest.approx(next(values), rel=0.1), chip.name


def test_kernels_are_as_fast_as_their_schedules_and_no_faster_than_the_peak():
    for chip in chips.CHIPS:
        for direction, products in PRODUCTS.items():
            flops = 2 * products * TILE**2 * 128
            assert speed(chip, direction).full >= flops / chip.peak_flops
    bundles = 9522 / V4.bundles_per_second
    least = 10 * TILE**2 * 128 / V4.peak_flops
    assert speed(V4, "backward").full == pytest.approx(max(bundles, least))
    assert source(V4).endswith("forward 4142, backward 9522")
    assert source(H200).endswith("reaches them: forward 60%, backward 50%")
    b200 = chips.find("NVIDIA B200")
    assert "(those of B200 are not known): forward 60%" in source(b200)


def test_heads_wider_than_the_matrix_unit_take_several_passes():
    def seconds(chip, head_dim):
        return make_ring(2**15, head_dim=head_dim).times(chip, "forward").kernels

    for chip, ratio in ((V4, 2), (V6E, 1), (H200, 2)):
        assert seconds(chip, 256) == pytest.approx(ratio * seconds(chip, 128), rel=0.1)
    assert seconds(V4, 64) == seconds(V4, 128)


def sent(ring, direction, chip=V5P, steps=(3,)):
    """Seconds of the links in some steps, by those of a shard's keys and values."""
    shard = ring.keys_bytes / chip.interconnect_bytes_per_second
    if direction == "backward":
        route = backward_route(ring.route, TURNS_FROM, chip.device_kinds[0])
        ring = replace(ring, route=route)
    parts = []
    for step in steps:
        kernels = ring._chunk_seconds(chip, direction)
        parts += ring._parts(step, direction, kernels)
    return sum(ring._seconds(part.moves, chip) for part in parts) / shard


def test_links_carry_half_a_shard_both_ways_and_backward_gradients_too():
    for route, ways in ((ONE_WAY, 1), (AllShards(both_ways=True), 2)):
        ring = make_ring(LENGTH, 8, route=route)
        assert ring.ways == ways
        assert sent(ring, "forward") == 1 / ways
        # Of two chunks that take turns the gradients of one, beside the keys of the
        # other, which go the other way.
        assert sent(ring, "backward") == {1: 1 + 2, 2: 2 * 2 / 2}[ways]
        assert sent(ring, "forward", H200) == 1  # a switch joins GPUs
    one = make_ring(LENGTH, 1, route=ONE_WAY)
    assert one.times(V5P, "backward").outlasting == 0


@pytest.mark.parametrize("size", [2, 3, 8])
def test_gradients_are_sent_as_often_as_there_are_devices(size):
    """After each kernel but the last one, and home."""
    ring = make_ring(LENGTH, size, route=ONE_WAY)
    steps = range(size)
    # Keys go on after each step but the last, as they do forward; gradients have twice
    # their bytes.
    gradients = sent(ring, "backward", V5P, steps) - sent(ring, "forward", V5P, steps)
    # Of long rings the keys come home: of one half once, of the other twice.
    home = 1.5 if size >= HOME_FROM else 0
    assert gradients == pytest.approx(2 * size + home)
    for route in ONE_WAY, AllShards(both_ways=True):
        ring = make_ring(TURNS_FROM, size, route=route)
        slow = slower_links(V5P, 1e3)  # all kernels are beside transfers, and once
        times = ring.times(slow, "backward")
        links = sent(ring, "backward", slow, steps)
        links *= ring.keys_bytes / slow.interconnect_bytes_per_second
        assert links - times.outlasting == pytest.approx(times.kernels, rel=1e-3)
        stalled = ring.times(chips.stalled(slow), "backward")
        assert stalled.kernels > times.kernels  # and hide as much more
        assert links - stalled.outlasting == pytest.approx(stalled.kernels, rel=1e-3)


# Of tokamax's kernels: bundles of a full tile, and ms of 16 heads of 16, 8, 4, 2 and 1
# rows of 1 to 16 Ki keys, full and causal, with Ki queries and keys of causal blocks.
MEASURED = [
    (V5P, "forward", 4225, (0.556, 0.875, 1.498, 2.861, 5.367), None),
    (V5P, "forward", 4225, (0.693, 0.84, 1.217, 1.9, 3.196), (1, 1, 1, 1, 2)),
    (V6E, "forward", 2458, (0.793, 1.141, 2.012, 3.553, 6.657), None),
    (V6E, "forward", 2458, (0.878, 1.146, 1.576, 2.431, 3.981), (1, 1, 1, 2, 2)),
    (V7X, "forward", 2567, (0.597, 0.924, 1.547, 2.94, 5.619), None),
    (V7X, "forward", 2567, (0.722, 0.932, 1.354, 2.138, 3.585), (1, 1, 1, 2, 2)),
    (V7X, "backward", 5034, (1.349, 1.995, 3.418, 6.37, 12.13), None),
    (V7X, "backward", 5034, (1.41, 2.067, 3.05, 4.707, 8.245), (1, 1, 2, 2, 2)),
]


@pytest.mark.parametrize(
    ("chip", "direction", "bundles", "measured", "blocks"), MEASURED
)
def test_stalls_are_those_that_were_measured(
    chip, direction, bundles, measured, blocks
):
    waiting = speed(chips.stalled(chip), direction)
    factor, *_ = dict(chips.stalled(chip).stalls)[direction]
    assert waiting.full == factor * speed(chip, direction).full
    full = factor * bundles / chip.bundles_per_second
    for number, seconds in enumerate(1e-3 * np.array(measured)):
        tiles = 2**number  # along a side
        live = 16 * 16 * tiles
        if blocks:
            live = 16 * 16 * (tiles + blocks[number]) / 2
        found = live * full + 256 * (
            waiting.row + waiting.diagonal * (blocks is not None)
        )
        assert found == pytest.approx(seconds, rel=0.1)
    assert chips.stalled(V4) is None


def test_windows_send_what_neighbours_read_and_skip_the_other_steps():
    window, zigzag = DocumentMask(window=1024), layouts.Zigzag()
    whole = make_ring(16384, layout=zigzag, mask=window)
    route = RingCost.of(whole.sequence, 1, whole.heads, V5P).route
    few = make_ring(16384, layout=zigzag, mask=window, route=route)
    assert few.describe() == "neighbours" and few.schedule.last == 1
    # Two ways carry what is read: a sixteenth of a shard each, in place of half of one.
    carried = [sent(ring, "forward", steps=(0,)) for ring in (few, whole)]
    assert carried[0] == carried[1] / 8
    assert sent(few, "backward", steps=(1,)) == 0  # gradients go home at once
    times = [ring.times(V5P, "forward") for ring in (few, whole)]
    assert times[0].outlasting == 0 and times[0].kernels < times[1].kernels


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_counted_ring_brings_gradients_home_alone(count):
    route = Counted(both_ways=True)
    ring = make_ring(LENGTH, 8, layouts.Zigzag(), route=route, count=count)
    assert ring.schedule.last == count
    home = count * ring.gradients_bytes / V5P.interconnect_bytes_per_second
    outlasting = ring.times(V5P, "backward").outlasting
    assert outlasting >= home and (count or outlasting == 0)
    rings = replace(ring, count=0), ring  # of a batch: both take as many steps
    assert mean_times(rings, "backward", V5P) == ring.times(V5P, "backward")


@pytest.mark.parametrize("documents", [(), (2000,), (96,), (96, 1400)])
@pytest.mark.parametrize(
    "layout", [layouts.Contiguous(), layouts.Zigzag(), layouts.Striped(16)], ids=str
)
def test_counted_steps_are_those_that_the_ring_counts(layout, documents):
    length = 128
    sequence = RowOnRing(row_of(4 * length, documents), layout, 4, length)
    planned = RingCost.of(sequence, 1, Heads(1, 1, 128), V5P, counts=True)
    route = planned.route
    assert route.both_ways == isinstance(layout, layouts.Zigzag)
    token = layouts.order(layout, 4, 4 * length)
    bounds = CAUSAL.bounds(token, *document_spans(documents, token, 4 * length))
    visible = Visible(*(jnp.asarray(bound, jnp.int32)[None] for bound in bounds))
    ring = Ring("ring", 4, layout, 1.0, None, route=route)
    spec = jax.sharding.PartitionSpec
    count = jax.shard_map(
        lambda visible: ring.count_steps(visible, length),
        mesh=ring_mesh(4),
        in_specs=spec(None, "ring"),
        out_specs=spec(),
        check_vma=False,
    )
    assert planned.count == int(jax.jit(count)(visible))
