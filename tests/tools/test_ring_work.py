"""Counts of tiles against every pair of the mask, one by one."""

import numpy as np
import pytest

from kernels import layouts as layout
from kernels import masks
from kernels.backends.block_sizes import BlockSizes
from kernels.masks import Visible, in_interval
from tests.cases.attention import LAYOUTS, MASKS
from tools.lib.benchmarks.work import tiles_per_step

RING, LENGTH = 3, 96
SIZES = BlockSizes(block_q=8, block_k=5)


def visible(mask_name: str) -> Visible:
    mask = MASKS[mask_name](LENGTH, LENGTH)
    return mask(np.arange(LENGTH, dtype=np.int32), LENGTH)


def seen_pairs(bounds: Visible) -> np.ndarray:
    """(T, T) booleans: whether a query sees a key."""
    key = np.arange(LENGTH)
    return in_interval(bounds.k_start[0][:, None], key, bounds.k_end[0][:, None])


@pytest.mark.parametrize("mask_name", MASKS)
@pytest.mark.parametrize("layout_name", LAYOUTS)
def test_a_device_computes_the_tiles_with_any_visible_pair(layout_name, mask_name):
    """Exactly those, but where a document or a window ends inside of a tile."""
    bounds, chosen = visible(mask_name), LAYOUTS[layout_name]
    work = tiles_per_step(chosen, RING, bounds, SIZES)
    order = layout.order(chosen, RING, LENGTH).reshape(RING, -1)
    seen, needed = seen_pairs(bounds), np.zeros_like(work)
    for device, hop in np.ndindex(work.shape):
        local = seen[np.ix_(order[device], order[device - hop])]
        rows = np.add.reduceat(local, range(0, len(local), SIZES.block_q), axis=0)
        tiles = np.add.reduceat(rows, range(0, len(local), SIZES.block_k), axis=1)
        needed[device, hop] = np.count_nonzero(tiles)
    if mask_name in ("none", "causal"):
        assert (work == needed).all()
    else:
        query_tiles = LENGTH // RING // SIZES.block_q
        assert (needed <= work).all() and (work <= needed + query_tiles).all()


def test_rows_of_the_batch_add_up():
    ids = np.array([[0] * 48 + [1] * 48, [0] * 96])

    def count(documents):
        bounds = masks.documents(documents)(np.arange(LENGTH, dtype=np.int32), LENGTH)
        return tiles_per_step(layout.Striped(), RING, bounds, SIZES)

    assert (count(ids) == count(ids[:1]) + count(ids[1:])).all()


def test_length_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="96 tokens .* pad it to 100"):
        tiles_per_step(layout.Contiguous(), 5, visible("causal"), SIZES)
