"""Bounds of visible keys: one interval a query, or a few that share no key."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .placement import sharded_alike

Array = jax.Array | np.ndarray


class Visible(NamedTuple):
    """Half-open interval of visible keys of each query; empty if k_end <= k_start.

    k_start, k_end: signed integers (B, T), or (1, T) where all rows of the batch share
      them. Neither decreases along the sequence, also where the interval is empty. Or
      (m, B or 1, T): m intervals of that kind a query, which share no key.
    """

    k_start: Array
    k_end: Array

    def intervals(self) -> "Visible":
        """Returns the bounds with their axis of intervals, (m, B or 1, T)."""
        if self.k_start.ndim == 3:
            return self
        return self.map(lambda bound: bound[None])

    def map(self, function: Callable[[Array], Array]) -> "Visible":
        """Applies a function to each of the bounds."""
        return Visible(function(self.k_start), function(self.k_end))

    def __and__(self, other: "Visible") -> "Visible":
        """Intersects the intervals of the same queries, each with each."""
        xp = namespace(*self, *other)
        start, end = self
        if self.k_start.ndim == other.k_start.ndim == 3:
            start = start[:, None]  # (m, 1, B or 1, T)
            end = end[:, None]
        k_start = xp.maximum(start, other.k_start)
        k_end = xp.minimum(end, other.k_end)
        if k_start.ndim > 3:  # (m, m', B or 1, T): one axis of intervals again
            k_start = k_start.reshape(-1, *k_start.shape[2:])
            k_end = k_end.reshape(-1, *k_end.shape[2:])
        return Visible(k_start, k_end)

    def __or__(self, other: "Visible") -> "Visible":
        """Returns the keys of either, in intervals (m, B or 1, T) that share none."""
        xp = namespace(*self, *other)
        # The batch may share the rows of one, and not of the other.
        rows = max(bound.shape[-2] for bound in (*self, *other))
        bounds = []
        for pair in zip(self.intervals(), other.intervals(), strict=True):
            wide = [xp.broadcast_to(x, (len(x), rows, x.shape[-1])) for x in pair]
            bounds.append(xp.concatenate(sharded_alike(wide)))  # (m + m', rows, T)
        k_start, k_end = Visible._make(bounds).ordered()
        # Cut where the interval before ends: no key may count twice.
        first = k_start[:1]
        others = xp.maximum(k_start[1:], k_end[:-1])
        return Visible(xp.concatenate([first, others]), k_end)

    def __bool__(self) -> bool:
        """Refuses `and`, `or` and `not`, which would drop one of two masks."""
        raise ValueError("bounds are neither true nor false: join them with & and |")

    def ordered(self) -> "Visible":
        """Sorts starts and ends of intervals (m, B or 1, T), each by itself.

        Sorting keeps, for every key, the number of intervals that contain it. Bounds
        that do not decrease along the sequence do not do so when they are sorted.
        """
        xp = namespace(*self)
        # An empty interval may end before it starts, and would be counted below 0.
        ends = xp.maximum(self.k_start, self.k_end)
        return Visible(self.k_start, ends).map(lambda bound: xp.sort(bound, axis=0))

    def share_keys(self) -> Array:
        """Returns whether intervals (m, B or 1, T) of a query share a key."""
        k_start, k_end = self.ordered()
        return (k_start[1:] < k_end[:-1]).any(axis=0)


def namespace(*arrays: Array) -> Any:
    """Returns NumPy if all arrays are its own, else `jax.numpy`."""
    return np if all(isinstance(x, np.ndarray) for x in arrays) else jnp
