"""Programs, tiles and sub-blocks of a ring step, against masks looked at in full."""

import dataclasses

import numpy as np
import pytest

from data.document_mask import DocumentMask
from kernels.layouts import Contiguous, Striped, Zigzag
from kernels.tile_ranges import key_ranges, query_ranges
from tools.lib.planning.ring_steps import (
    Blocks,
    Sequence,
    document_spans,
    visible_pairs,
    work,
)

WHOLE, PREFIX = DocumentMask(), DocumentMask(prefix=1000)

BLOCKS = [
    Blocks(1, 512, 512, 128, 128),
    Blocks(4, 128, 512, 256, 128),  # two heads in a sub-block
    Blocks(4, 96, 256, 128, 128),  # sub-blocks across heads
]


def rows(sequence, device, source):
    """Bounds of every row in a ring step, (1, L) each."""
    layout, shape = sequence.layout, (sequence.ring_size, sequence.length)
    token = np.asarray(layout.index(device, *shape))[None]
    total = sequence.ring_size * sequence.length
    first, end = document_spans(sequence.documents, token, total)
    start = np.maximum(first, token + 1 - (sequence.mask.window or total))
    end = np.maximum(token + 1, np.minimum(first + sequence.mask.prefix, end))
    bounds = start, end
    return [layout.count(source, bound, *shape) for bound in bounds]


def hull(live):
    """The length of a line from its first to its last live element."""
    place = np.flatnonzero(live)
    return place[-1] - place[0] + 1 if place.size else 0


@pytest.mark.parametrize("mask", [WHOLE, DocumentMask(window=130), PREFIX], ids=str)
@pytest.mark.parametrize("documents", [(), (700,), (100, 900, 3000)])
@pytest.mark.parametrize("layout", [Contiguous(), Striped(), Zigzag()], ids=str)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_work_is_that_of_the_masks(layout, documents, mask, blocks):
    q, k, heads = blocks.block_q, blocks.block_k, blocks.heads
    sequence = Sequence(layout, 4, 1536, documents, mask)
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


@pytest.mark.parametrize("documents", [(), (700,), (512, 1024)])
@pytest.mark.parametrize("layout", [Contiguous(), Striped(), Striped(4), Zigzag()])
@pytest.mark.parametrize("heads, block_q", [(1, 512), (2, 256), (8, 64)])
def test_diagonal_tiles_have_one_key_more_in_each_row(
    layout, documents, heads, block_q
):
    blocks = Blocks(heads, block_q, 512, 128, 128, 128)
    others = dataclasses.replace(blocks, diagonal=None)
    sequence = Sequence(layout, 4, 1536, documents)
    for device, source in ((0, 0), (3, 1), (0, 2)):
        bounds = sequence.bounds(device, source, blocks.piece)
        start, end = rows(sequence, device, source)
        line = np.arange(block_q)
        count = 0
        for i in range(1536 // block_q):
            lo, hi = (bound[0, i * block_q :][:block_q] for bound in (start, end))
            first = hi[0] // 512 * 512
            # The first row's last key lies in a granule whose rest holds the others'.
            fits = hi[0] % 128 + min(block_q, 128) <= 129
            is_aligned = (hi[0] - first) // 128 % max(1, block_q // 128) == 0
            count += bool(
                (hi - hi[0] == line).all() and lo[-1] <= first and fits and is_aligned
            )
        for direction in ("forward", "backward"):
            found = work(direction, bounds, blocks, 1536)
            plain = work(direction, bounds, others, 1536)
            assert found.diagonal == count and plain.diagonal == 0
            assert found.tiles == plain.tiles
            assert found.partial_tiles == plain.partial_tiles - count
            live = sum(n * number for n, number in enumerate(found.granules))
            every = sum(n * number for n, number in enumerate(plain.granules))
            assert live + found.diagonal_granules == every
    assert count > 0 or documents or layout != Striped()


def test_a_window_takes_pairs_away_and_a_prefix_brings_some():
    token = np.arange(14)
    spans = document_spans((3, 7), token, 14)
    for size in (1, 2, 5, 20):
        for mask in DocumentMask(window=size), DocumentMask(prefix=size):
            start, end = mask.bounds(token, *spans)
            assert visible_pairs((3, 7), 14, mask) == (end - start).sum()
    assert visible_pairs((), 12, DocumentMask(window=12)) == visible_pairs((), 12)
