"""Bounds of visible keys: one interval a query, or a few that share no key."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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
        return Visible(*(bound[None] for bound in self))

    def __and__(self, other: "Visible") -> "Visible":
        """Intersects the intervals of the same queries, each with each."""
        xp, pairs = namespace(*self, *other), (self, other)
        if self.k_start.ndim == other.k_start.ndim == 3:
            pairs = Visible(*(bound[:, None] for bound in self)), other
        starts, ends = zip(*pairs, strict=True)
        found = xp.maximum(*starts), xp.minimum(*ends)
        if found[0].ndim > 3:
            found = (x.reshape(-1, *x.shape[2:]) for x in found)
        return Visible(*found)

    def __or__(self, other: "Visible") -> "Visible":
        """Returns the keys of either, in intervals (m, B or 1, T) that share none."""
        xp = namespace(*self, *other)
        rows = max(bound.shape[-2] for bound in (*self, *other))
        both = zip(self.intervals(), other.intervals(), strict=True)
        wide = (
            [xp.broadcast_to(x, (len(x), rows, x.shape[-1])) for x in bounds]
            for bounds in both
        )
        k_start, k_end = Visible(*map(xp.concatenate, wide)).ordered()
        k_start = [k_start[:1], xp.maximum(k_start[1:], k_end[:-1])]
        return Visible(xp.concatenate(k_start), k_end)

    def __bool__(self) -> bool:
        """Refuses `and`, `or` and `not`, which would drop one of two masks."""
        raise ValueError("bounds are neither true nor false: join them with & and |")

    def ordered(self) -> "Visible":
        """Sorts starts and ends of intervals (m, B or 1, T), each by itself.

        As many of the results hold a key as before. Bounds that do not decrease along
        the sequence do not do so either when they are sorted.
        """
        xp = namespace(*self)
        bounds = self.k_start, xp.maximum(*self)
        return Visible(*(xp.sort(bound, axis=0) for bound in bounds))

    def share_keys(self) -> Array:
        """Returns whether intervals (m, B or 1, T) of a query share a key."""
        k_start, k_end = self.ordered()
        return (k_start[1:] < k_end[:-1]).any(axis=0)


def namespace(*arrays: Array) -> Any:
    """Returns NumPy if all arrays are its own, else `jax.numpy`."""
    return np if all(isinstance(x, np.ndarray) for x in arrays) else jnp
