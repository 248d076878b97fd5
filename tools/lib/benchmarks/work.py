"""Counts what each device of a ring computes, in tiles of scores.

From the layouts and the tile ranges that drive the kernels' loops. A partial tile
counts in full, as it is computed in full.
"""

from collections.abc import Iterator

import numpy as np

from kernels.backends.block_sizes import BlockSizes
from kernels.backends.tile_ranges import key_ranges
from kernels.layouts import Layout, permute
from kernels.masks import Visible


def bounds_of_steps(
    layout: Layout, ring_size: int, visible: Visible
) -> Iterator[tuple[tuple[int, int], list[np.ndarray]]]:
    """Yields each (device, step), and its bounds in the local slots of the step's keys.

    visible: NumPy bounds of the whole sequence, (B or 1, T), in natural order.

    Raises:
      ValueError: the sequence does not divide into the layout's shards.
    """
    bounds = [
        np.split(permute(bound, layout, ring_size), ring_size, axis=1)
        for bound in visible
    ]
    length = visible.k_start.shape[1] // ring_size
    for device, step in np.ndindex(ring_size, ring_size):
        source = (device - step) % ring_size  # whose keys are visiting the device
        mine = (bound[device] for bound in bounds)
        counts = [layout.count(source, x, ring_size, length) for x in mine]
        yield (device, step), counts


def tiles_per_step(
    layout: Layout, ring_size: int, visible: Visible, sizes: BlockSizes
) -> np.ndarray:
    """Counts the tiles of each device in each ring step, int64 (devices, steps)."""
    length = visible.k_start.shape[1] // ring_size
    tile = min(sizes.block_q, length), min(sizes.block_k, length)
    work = np.zeros((ring_size, ring_size), np.int64)
    for place, bounds in bounds_of_steps(layout, ring_size, visible):
        work[place] = key_ranges(*bounds, *tile).work().sum()
    return work


def critical_path(work: np.ndarray) -> int:
    """Sums the tiles of the slowest device of every step: all wait for it.

    work: (devices, steps).
    """
    return int(work.max(axis=0).sum())


def visible_pairs(visible: Visible) -> int:
    """Counts the pairs of a query and a key that is visible to it."""
    return int((visible.k_end - visible.k_start).clip(0).sum(dtype=np.int64))


def balanced_tiles(ring_size: int, visible: Visible, sizes: BlockSizes) -> float:
    """Counts the visible pairs, in tiles, spread evenly over the devices.

    No critical path is shorter: only visible pairs are computed, and no device waits.
    """
    return visible_pairs(visible) / (sizes.block_q * sizes.block_k) / ring_size
