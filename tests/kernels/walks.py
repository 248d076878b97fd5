"""Closed walks over the chips of a grid."""

from collections.abc import Sequence

import numpy as np


def links(walk: Sequence[Sequence[int]]) -> np.ndarray:
    """Links between each chip and the next, from the last to the first at its end."""
    return np.abs(np.subtract(walk, np.roll(walk, -1, axis=0))).sum(axis=1)
