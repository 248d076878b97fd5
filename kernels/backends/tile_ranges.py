"""Empty, partial and full tiles of the score matrix, from intervals alone.

Query row t attends to the key slots [k_start[t], k_end[t]). With bounds that do not
decrease, a tile of query rows i0 … i1 and key slots j0 … j1 is

- empty if j0 >= k_end[i1] or j1 < k_start[i0]: no pair in it is visible;
- full if k_start[i1] <= j0 and j1 < k_end[i0]: every pair in it is visible;
- partial otherwise.

The live (not empty) tiles of a query tile are consecutive, and the full ones among
them too, so four numbers per query tile drive a kernel's loops. The same holds for the
query tiles of a key tile, which drives the loops for dK and dV.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..masks import Array

MOST_COMPARED = 1024
"""Tiles of which all pairs are compared; of more, bounds are searched for."""


class TileRanges(NamedTuple):
    """Half-open ranges of tile numbers, each int32 (B, tiles).

    Along a line of tiles: live_begin <= full_begin <= full_end <= live_end. Tiles in
    [live_begin, full_begin) and [full_end, live_end) are partial.
    """

    live_begin: Array
    full_begin: Array
    full_end: Array
    live_end: Array

    def line(self, index: Any) -> "TileRanges":
        """Returns the ranges of one line of tiles, numbers each."""
        return TileRanges(*(bound[index] for bound in self))

    def work(self) -> Array:
        """Returns the number of live tiles of each line, (B, tiles)."""
        return self.live_end - self.live_begin


def key_ranges(k_start: Array, k_end: Array, block_q: int, block_k: int) -> TileRanges:
    """Returns the live key tiles of each query tile.

    k_start, k_end: int32 (B, T), visible key slots per query row, not decreasing.

    Returns:
      Ranges of key tiles, one for each of the ceil(T / block_q) query tiles.
    """
    k_start_first, k_start_last = _edges(k_start, block_q)
    k_end_first, k_end_last = _edges(k_end, block_q)
    live_begin = k_start_first // block_k  # (B, tiles), as the next three
    live_end = -(-k_end_last // block_k)
    full_begin = -(-k_start_last // block_k)
    full_end = k_end_first // block_k
    return _ordered(live_begin, full_begin, full_end, live_end)


def query_ranges(
    k_start: Array, k_end: Array, block_q: int, block_k: int, num_keys: int
) -> TileRanges:
    """Returns the live query tiles of each key tile: the mirror of `key_ranges`.

    Returns:
      Ranges of query tiles, one for each of the ceil(num_keys / block_k) key tiles.
    """
    k_start_first, k_start_last = _edges(k_start, block_q)
    k_end_first, k_end_last = _edges(k_end, block_q)
    first_key = np.arange(0, num_keys, block_k, dtype=np.int32)
    last_key = first_key + block_k - 1
    # Tiles of rows with k_end <= key, or with k_start <= key, come first: bounds do not
    # decrease. Of live tiles the last row sees the first key, or the first row the last
    # key; of full tiles all rows see both.
    return _ordered(
        live_begin=_count_below(k_end_last, first_key + 1),
        full_begin=_count_below(k_end_first, last_key + 1),
        full_end=_count_below(k_start_last, first_key + 1),
        live_end=_count_below(k_start_first, last_key + 1),
    )


def _edges(bound: Array, block: int) -> tuple[Array, Array]:
    """Returns a bound at the first and the last row of every tile, (B, tiles) each."""
    first = bound[:, ::block]
    last = bound[:, block - 1 :: block]
    if bound.shape[1] % block:  # the last tile is cut off, and ends with the last row
        xp = jnp if isinstance(bound, jax.Array) else np
        last = xp.concatenate([last, bound[:, -1:]], axis=1)
    return first, last


def _ordered(
    live_begin: Array, full_begin: Array, full_end: Array, live_end: Array
) -> TileRanges:
    # Where no tile is full, full_begin may lie behind full_end, or outside of the live
    # tiles: unclipped, the loops would compute partial tiles twice.
    xp = jnp if isinstance(live_begin, jax.Array) else np
    live_end = xp.maximum(live_begin, live_end)
    full_begin = full_begin.clip(live_begin, live_end)
    full_end = full_end.clip(full_begin, live_end)
    return TileRanges(live_begin, full_begin, full_end, live_end)


def _count_below(values: Array, bounds: np.ndarray) -> Array:
    """Counts, for each bound, the non-decreasing values (B, n) below it."""
    if isinstance(values, jax.Array):
        # On devices a binary search is a loop of small instructions.
        method = "compare_all" if values.shape[1] <= MOST_COMPARED else "scan"
        search = functools.partial(jnp.searchsorted, side="left", method=method)
        return jax.vmap(lambda row: search(row, bounds))(values).astype(jnp.int32)
    counts = [np.searchsorted(row, bounds, side="left") for row in values]
    return np.stack(counts).astype(np.int32)
