"""Counts what each device of a ring computes, in tiles of scores.

From the layouts and the tile ranges that drive the kernels' loops. A partial tile
counts in full, as it is computed in full.
"""

from collections.abc import Iterator
from typing import Any

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


def visible_pairs(visible: Visible) -> int:
    """Counts the pairs of a query and a key that is visible to it."""
    return int((visible.k_end - visible.k_start).clip(0).sum(dtype=np.int64))


def count_tiles(
    layout: Layout, ring_size: int, visible: Visible, sizes: BlockSizes
) -> dict[str, Any]:
    """Returns the tiles of one head and one batch row, as fields of a row.

    tiles: of each device in each ring step. tiles_critical_path: of the slowest device
      of each step, as all wait for it. tiles_bound: the visible pairs, spread evenly:
      no critical path is shorter.
    """
    work = tiles_per_step(layout, ring_size, visible, sizes)
    path = int(work.max(axis=0).sum())
    tile = sizes.block_q * sizes.block_k
    bound = visible_pairs(visible) / tile / ring_size
    found = {"tiles": work.tolist(), "tiles_total": int(work.sum())}
    found |= {"tiles_critical_path": path, "tiles_bound": bound}
    return found | {"bound_share": bound / path}
