"""The order in which the columns of a row are read."""

from collections.abc import Sequence

import numpy as np

from kernels.layouts import Layout, order

Columns = tuple[int, int]
"""First slot of a row in layout order, and the slot after the last, as of `Block`."""


class ColumnOrder:
    """Reads columns of a row in increasing order, then restores theirs.

    A row lies in increasing order on the disk and layouts spread its neighbours over
    the ring: read in a layout's order, a row would be many small reads.

    index: int32 (L,), increasing, the tokens of the row that the columns hold.
    inverse: for each range of columns, int64 (columns,), where in `index` its own are.
    """

    def __init__(
        self, layout: Layout, ring_size: int, slots: int, columns: Sequence[Columns]
    ):
        """Orders the tokens of columns, of a row of so many slots.

        columns: ranges of slots in layout order, all of one size.
        """
        parts = [order(layout, ring_size, slots, part) for part in columns]
        in_layout = np.concatenate(parts).astype(np.int32)
        by_index = np.argsort(in_layout, kind="stable")
        self.index = in_layout[by_index]
        inverse = np.split(np.argsort(by_index), len(columns))
        self.inverse = dict(zip(columns, inverse, strict=True))
