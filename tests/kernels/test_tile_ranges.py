"""Tile ranges against every tile of the boolean matrix, one by one."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import layouts as layout
from kernels import masks
from kernels.backends.tile_ranges import TileRanges, key_ranges, query_ranges
from kernels.masks import Visible

BATCH = 3
SHAPES = [(20, 17), (16, 24), (1, 9), (9, 1)]
BLOCKS = [(1, 1), (1, 4), (3, 8), (8, 3), (8, 8), (5, 50), (50, 5), (50, 50)]


def random_bounds(
    rng: np.random.Generator, shape: tuple[int, int]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Non-decreasing bounds: with empty rows, without, and narrow ones."""
    queries, keys = shape
    drawn = []
    for _ in range(8):
        bounds = rng.integers(0, keys + 1, (2, BATCH, queries), np.int32)
        k_start, k_end = np.sort(bounds)
        drawn += [
            (k_start, k_end),
            (np.minimum(k_start, k_end), np.maximum(k_start, k_end)),
            (k_start, np.minimum(k_start + np.int32(2), keys)),
            (k_start, k_start),
        ]
    return drawn


def matrix(k_start: np.ndarray, k_end: np.ndarray, keys: int) -> np.ndarray:
    """(B, T, keys): whether a slot is visible to a query."""
    return masks.in_interval(k_start[..., None], np.arange(keys), k_end[..., None])


def tiled(mask: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """(B, T, S) -> (B, query tiles, key tiles, block_q, block_k), rows filled up."""
    mask = np.pad(mask, [(0, 0), (0, -mask.shape[1] % block[0]), (0, 0)], mode="edge")
    batch, queries, keys = mask.shape
    mask = mask.reshape(batch, queries // block[0], block[0], -1, block[1])
    return mask.swapaxes(2, 3)


def inside(begin: np.ndarray, end: np.ndarray, tiles: int) -> np.ndarray:
    """(B, lines) ranges -> (B, lines, tiles): which tiles lie in them."""
    return masks.in_interval(begin[..., None], np.arange(tiles), end[..., None])


def live_and_full(ranges: TileRanges, tiles: int) -> tuple[np.ndarray, np.ndarray]:
    begin, full_begin, full_end, end = map(np.asarray, ranges)
    bounds = 0 * begin, begin, full_begin, full_end, end, 0 * end + tiles
    assert (np.diff(bounds, axis=0) >= 0).all()
    return inside(begin, end, tiles), inside(full_begin, full_end, tiles)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_full_tiles_are_all_visible_and_live_ones_those_that_the_bounds_touch(
    shape, block, rng
):
    """Rows after the last do not count; slots after the last are never visible.

    The query tiles of a key tile are the mirror of that.
    """
    queries, keys = shape
    query_tiles, tiles = -(-queries // block[0]), -(-keys // block[1])
    last = np.minimum(np.arange(block[0], queries + block[0], block[0]), queries) - 1
    slot = block[1] * np.arange(tiles)
    for k_start, k_end in random_bounds(rng, shape):
        live, full = live_and_full(key_ranges(k_start, k_end, *block), tiles)
        visible = tiled(matrix(k_start, k_end, tiles * block[1]), block)
        np.testing.assert_array_equal(full, visible.all((-1, -2)))
        is_touched = (k_start[:, :: block[0], None] < slot + block[1]) & (
            slot < k_end[:, last, None]
        )
        np.testing.assert_array_equal(live, is_touched)
        by_key = live_and_full(query_ranges(k_start, k_end, *block, keys), query_tiles)
        for one, other in zip((live, full), by_key, strict=True):
            np.testing.assert_array_equal(one, other.swapaxes(1, 2))


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
@pytest.mark.parametrize("block", [(1, 4), (3, 8), (50, 5)], ids=str)
def test_jax_and_numpy_agree(shape, block, rng):
    for ranges in (
        lambda *bounds: key_ranges(*bounds, *block),
        lambda *bounds: query_ranges(*bounds, *block, shape[1]),
    ):
        compiled = jax.jit(ranges)
        for bounds in random_bounds(rng, shape):
            want = ranges(*bounds)
            assert all(isinstance(bound, np.ndarray) for bound in want)
            for got, bound in zip(
                compiled(*map(jnp.asarray, bounds)), want, strict=True
            ):
                assert got.dtype == bound.dtype == np.int32
                np.testing.assert_array_equal(got, bound)


@pytest.mark.parametrize(
    "kind, first_step, later_steps, total",
    [
        # Contiguous: after h steps, device d has the shard of d - h, and all of it or
        # none of it is in the past.
        (layout.Contiguous(), 36, lambda device, step: 64 * (device >= step), 228),
        # Striped: every shard is a triangle, with the diagonal or just below it.
        (layout.Striped(), 36, lambda device, step: 36, 144),
        # Stripes as wide as tiles: with those of its own stripe, or without.
        (layout.Striped(8), 36, lambda device, step: 28 + 8 * (device >= step), 144),
        # Zigzag: two tiles of chunks of 4 x 4 in any case.
        (layout.Zigzag(), 36, lambda device, step: 32, 132),
    ],
    ids=["contiguous", "striped", "wide stripes", "zigzag"],
)
def test_work_of_a_causal_ring_of_four(kind, first_step, later_steps, total):
    """Counts live tiles, 8 x 8 a shard, per device and step; the slowest decides."""
    ring_size, length, block = 4, 64, 8
    work = np.zeros((ring_size, ring_size), int)  # (step, device)
    for step, device in np.ndindex(work.shape):
        index = kind.index(device, ring_size, length)
        visible = masks.causal()(index, ring_size * length)
        k_start, k_end = slots(kind, (device - step) % ring_size, visible, length)
        work[step, device] = key_ranges(k_start, k_end, block, block).work().sum()
        by_key = query_ranges(k_start, k_end, block, block, length).work().sum()
        assert by_key == work[step, device]
    assert work[0].tolist() == [first_step] * ring_size
    for step in range(1, ring_size):
        assert work[step].tolist() == [later_steps(d, step) for d in range(ring_size)]
    assert work.max(axis=1).sum() == total


@pytest.mark.parametrize("width", [64, 128])
def test_wide_stripes_have_partial_tiles_at_edges_of_documents_alone(width, rng):
    """In visiting shards, of tiles that divide a stripe, as those for CPUs and GPUs."""
    ring_size, length = 4, 1024
    edges = np.sort(rng.choice(ring_size * length // width, 9, replace=False)) * width
    for shift in 0, width // 2:
        found = 0
        for device, step in itertools.product(range(ring_size), range(1, ring_size)):
            kind = layout.Striped(width)
            index = kind.index(device, ring_size, length)
            begins = np.append(0, edges + shift)
            start = begins[np.searchsorted(begins, index, side="right") - 1]
            visible = Visible(start[None].astype(np.int32), index[None] + np.int32(1))
            shard = (device - step) % ring_size
            bounds = slots(kind, shard, visible, length)
            ranges = key_ranges(*bounds, min(width, 128), 64)
            found += (ranges.work() - (ranges.full_end - ranges.full_begin)).sum()
        assert (found > 0) == (shift > 0)


def slots(kind, shard: int, visible: Visible, length: int) -> list[np.ndarray]:
    """Bounds of the visible slots of a shard, in a ring of four."""
    return [kind.count(shard, bound, 4, length) for bound in visible]
