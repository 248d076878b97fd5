"""Batches of a training step, and the blocks of them that devices hold."""

from typing import NamedTuple

import numpy as np


class Batch(NamedTuple):
    """Rows of tokens, or a block of their columns; along T in layout order.

    tokens: int32 (B, T), what the model reads; 0 on padding.
    targets: int32 (B, T), the token that follows; 0 where nothing does.
    loss_weights: float32 (B, T), 0 where the target counts for nothing.
    positions: int32 (B, T), place of the token in its own document, or tree, from 0.
    k_start, k_end: int32 (B, T), half-open interval of the indices in the row that the
      token attends to, or (B, T, m) for m intervals; empty on padding (see
      kernels/masks.py).
    """

    tokens: np.ndarray
    targets: np.ndarray
    loss_weights: np.ndarray
    positions: np.ndarray
    k_start: np.ndarray
    k_end: np.ndarray


class Block(NamedTuple):
    """A part of a global batch that one device holds.

    rows: first row of the global batch, and the row after the last.
    columns: first slot of the row *in layout order*, and the slot after the last.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
