"""Programs, tiles and sub-blocks of a ring step, against masks looked at in full."""

import numpy as np
import pytest

from kernels.layouts import Contiguous, Striped, Zigzag
from kernels.tile_ranges import key_ranges, query_ranges
from tools.lib.planning.ring_steps import (
    Blocks,
    Sequence,
    document_starts,
    visible_pairs,
    work,
)

BLOCKS = [
    Blocks(1, 512, 512, 128, 128),
    Blocks(4, 128, 512, 256, 128),  # two heads in a sub-block
    Blocks(4, 96, 256, 128, 128),  # sub-blocks across heads
]


def rows(sequence, device, source):
    """Bounds of every row in a ring step, (1, L) each."""
    layout, shape = sequence.layout, (sequence.ring_size, sequence.length)
    token = np.asarray(layout.index(device, *shape))[None]
    start = document_starts(sequence.documents, token)
    if sequence.window:
        start = np.maximum(start, token - sequence.window + 1)
    bounds = start, token + 1
    return [layout.count(source, bound, *shape) for bound in bounds]


def hull(live):
    """The length of a line from its first to its last live element."""
    place = np.flatnonzero(live)
    return place[-1] - place[0] + 1 if place.size else 0


@pytest.mark.parametrize("window", [0, 130])
@pytest.mark.parametrize("documents", [(), (700,), (100, 900, 3000)])
@pytest.mark.parametrize("layout", [Contiguous(), Striped(), Zigzag()], ids=str)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_work_is_that_of_the_masks(layout, documents, window, blocks):
    q, k, heads = blocks.block_q, blocks.block_k, blocks.heads
    sequence = Sequence(layout, 4, 1536, documents, window)
    for device, source in ((0, 0), (3, 1), (0, 2)):
        bounds = sequence.bounds(device, source, blocks.piece)
        start, end = rows(sequence, device, source)
        slot = np.arange(1536)
        mask = (start[0][:, None] <= slot) & (slot < end[0][:, None])
        tiles = mask.reshape(1536 // q, q, 1536 // k, k)
        granules = np.zeros(k // blocks.live_columns + 1, int)
        for i, j in np.argwhere(tiles.any((1, 3)) & ~tiles.all((1, 3))):
            stacked = np.tile(tiles[i, :, j], (heads, 1))
            pieces = stacked.reshape(-1, blocks.exact_rows, granules.size - 1, 128)
            for row in pieces.any((1, 3)):
                granules[hull(row)] += 1
        for direction, ranges in (
            ("forward", key_ranges(start, end, q, k)),
            ("backward", query_ranges(start, end, q, k, 1536)),
        ):
            found = work(direction, bounds, blocks, 1536)
            assert found.programs == ranges.live_end.size
            assert found.full_tiles == tiles.all((1, 3)).sum()
            assert found.tiles == ranges.work().sum()
            assert found.live == (ranges.work() > 0).sum()
            # Tiles without visible pairs have no live granules.
            assert found.granules[1:] == tuple(granules[1:])


def test_rows_after_the_end_repeat_the_last_one():
    blocks = Blocks(1, 1024, 1024, 256, 256)
    bounds = Sequence(Striped(), 1, 2500).bounds(0, 0, blocks.piece)
    found = work("forward", bounds, blocks, 2500)
    assert (found.programs, found.full_tiles, found.partial_tiles) == (3, 3, 3)
    assert sum(found.granules) == 3 * 4


def test_documents_repeat_until_the_row_is_full():
    starts = document_starts((3, 2), np.arange(12))
    assert starts.tolist() == [0, 0, 0, 3, 3, 5, 5, 5, 8, 8, 10, 10]
    assert document_starts((), np.arange(3)).tolist() == [0, 0, 0]
    assert visible_pairs((3, 2), 12) == 2 * (6 + 3) + 3
    assert visible_pairs((3, 2), 14) == 2 * (6 + 3) + 6 + 1
    assert visible_pairs((), 12) == visible_pairs((100,), 12) == 78


def test_a_window_takes_pairs_away_but_in_documents_that_it_covers():
    token = np.arange(14)
    start = document_starts((3, 7), token)
    for window in (1, 2, 5, 20):
        pairs = (token + 1 - np.maximum(start, token + 1 - window)).sum()
        assert visible_pairs((3, 7), 14, window) == pairs
    assert visible_pairs((), 12, 12) == visible_pairs((), 12) == 78


@pytest.mark.parametrize(
    ("layout", "live"),
    [(Contiguous(), [0, 1]), (Zigzag(), [0, 1, 15]), (Striped(), range(16))],
    ids=str,
)
def test_windows_see_keys_in_few_ring_steps_of_layouts_that_keep_neighbours(
    layout, live
):
    sequence = Sequence(layout, 16, 2048, window=512)
    weights, pairs = zip(*sequence.areas, strict=True)
    assert weights == pytest.approx([1 / 16] * 16)
    assert np.flatnonzero(pairs).tolist() == [*live]
    assert sequence.area < Sequence(layout, 16, 2048).area / 2
