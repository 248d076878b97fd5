"""Masks as intervals: every query sees the keys whose index lies in [lo, hi].

A token's *index* is its place in the global sequence; its *position* is its place in
its own document (what RoPE uses). Masks speak of indices only. For every mask here
`lo` and `hi` do not decrease along the sequence, so the keys a query sees on any shard
of any layout are one interval of local slots (see `layout.count`), and the live tiles
of a query tile are consecutive (see `tiles`).

A mask is a function of query indices, so it can be built for any part of a sequence, in
any order, without the whole: `causal()(index, key_length)`. Masks combine with `&`.
NumPy indices give NumPy bounds and JAX indices give JAX bounds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray


class Visible(NamedTuple):
    """Bounds of what each query sees, both inclusive; `hi < lo` sees nothing.

    lo, hi: int32 (B, T), or (1, T) where all rows of the batch share them.
    """

    lo: Array
    hi: Array


@dataclass(frozen=True)
class Mask:
    """A mask whose sequence is not known yet.

    bounds: from query indices, int32 (..., T), and the number of keys to `Visible`,
    broadcast against the indices.
    """

    bounds: Callable[[Array, int], Visible]

    def __call__(self, index: Array, key_length: int) -> Visible:
        """Bounds for the queries at `index`, (T,) or (B, T); returns (1 or B, T)."""
        if index.ndim == 1:
            index = index[None]
        lo, hi = self.bounds(index, key_length)
        return Visible(lo.astype(index.dtype), hi.astype(index.dtype))

    def __and__(self, other: "Mask") -> "Mask":
        """What both masks let a query see."""

        def bounds(index: Array, key_length: int) -> Visible:
            xp = _namespace(index)
            mine, others = self(index, key_length), other(index, key_length)
            return Visible(
                xp.maximum(mine.lo, others.lo), xp.minimum(mine.hi, others.hi)
            )

        return Mask(bounds)


def full() -> Mask:
    """Every query sees every key."""
    return Mask(lambda index, keys: Visible(0 * index, 0 * index + keys - 1))


def causal() -> Mask:
    """A query sees the keys up to its own index."""
    return Mask(
        lambda index, keys: Visible(
            0 * index, _namespace(index).minimum(index, keys - 1)
        )
    )


def window(size: int) -> Mask:
    """A query sees itself and the `size - 1` keys before it.

    Raises:
      ValueError: `size` is below 1.
    """
    if size < 1:
        raise ValueError(f"window {size=} must be at least 1 token (the query itself)")

    def bounds(index: Array, keys: int) -> Visible:
        xp = _namespace(index)
        return Visible(xp.maximum(index - size + 1, 0), xp.minimum(index, keys - 1))

    return Mask(bounds)


def prefix(length: int | Array) -> Mask:
    """Prefix LM: causal, but the first `length` tokens are seen by all.

    length: one number, or (B, 1) for a prefix of its own in every row.
    """
    if isinstance(length, int) and length < 0:
        raise ValueError(f"prefix {length=} must not be negative")

    def bounds(index: Array, keys: int) -> Visible:
        xp = _namespace(index)
        hi = xp.maximum(index, length - 1)
        return Visible(0 * hi, xp.minimum(hi, keys - 1))

    return Mask(bounds)


def padding(real_length: int | Array) -> Mask:
    """Tokens from `real_length` on are padding: unseen, and seeing nothing.

    real_length: one number, or (B, 1) for a length of its own in every row. Combine
    it with another mask: `causal() & padding(1000)`.
    """

    def bounds(index: Array, keys: int) -> Visible:
        del keys
        xp = _namespace(index)
        lo = xp.where(index < real_length, 0 * index, index)
        return Visible(lo, 0 * index + real_length - 1)

    return Mask(bounds)


def segments(ids: Array) -> Mask:
    """Queries see the tokens that carry their own id, before and after them.

    ids: int (B, T) or (T,), never decreasing along the sequence.

    Raises:
      ValueError: the ids decrease somewhere (checked where values are known, that is,
        outside of `jit`), or are not one or two dimensional.
    """
    ids = _checked_ids(ids)
    xp = _namespace(ids)
    places = xp.arange(ids.shape[-1], dtype=xp.int32)
    edge = ids[:, 1:] != ids[:, :-1]
    yes = xp.ones_like(ids[:, :1], dtype=bool)
    starts = xp.where(xp.concatenate([yes, edge], axis=1), places, 0)
    ends = xp.where(xp.concatenate([edge, yes], axis=1), places, ids.shape[-1])
    first = _running(xp.maximum, starts)
    last = _running(xp.minimum, ends[:, ::-1])[:, ::-1]

    def bounds(index: Array, keys: int) -> Visible:
        namespace = _namespace(index)
        rows = max(index.shape[0], first.shape[0])
        index = namespace.broadcast_to(index, (rows, index.shape[1]))

        def at(values: Array) -> Array:
            values = namespace.broadcast_to(
                namespace.asarray(values), (rows, values.shape[1])
            )
            return namespace.take_along_axis(values, index, axis=1)

        return Visible(at(first), namespace.minimum(at(last), keys - 1))

    return Mask(bounds)


def documents(ids: Array) -> Mask:
    """Packed documents: causal, and only within the query's own document.

    Arguments and errors as in `segments`.
    """
    return causal() & segments(ids)


def documents_at(starts: np.ndarray) -> Mask:
    """As `documents`, from the index at which each document begins.

    starts: int (documents,), increasing, the first of them 0. This form needs no array
    of the sequence's length, so a host can build the bounds of its own shard alone.

    Raises:
      ValueError: the starts do not begin with 0 or do not increase.
    """
    starts = np.asarray(starts)
    if starts.size == 0 or starts[0] != 0 or (starts[1:] <= starts[:-1]).any():
        raise ValueError(
            f"document starts must increase from 0, got {starts[:8]} … "
            f"({starts.size} in all)"
        )

    def bounds(index: Array, keys: int) -> Visible:
        xp = _namespace(index)
        document = xp.searchsorted(xp.asarray(starts), index, side="right") - 1
        return Visible(xp.asarray(starts)[document], xp.minimum(index, keys - 1))

    return Mask(bounds)


def _namespace(array: Array):
    return np if isinstance(array, np.ndarray) else jnp


def _running(pick: Callable, values: Array) -> Array:
    """The running maximum or minimum along the last axis."""
    if isinstance(values, np.ndarray):
        return pick.accumulate(values, axis=-1)
    scan = jax.lax.cummax if pick is jnp.maximum else jax.lax.cummin
    return scan(values, axis=values.ndim - 1)


def _checked_ids(ids: Array) -> Array:
    if not isinstance(ids, jax.Array):
        ids = np.asarray(ids)
    if ids.ndim not in (1, 2):
        raise ValueError(f"document ids must be (T,) or (B, T), got {ids.shape=}")
    if not isinstance(ids, jax.core.Tracer):
        values = np.atleast_2d(np.asarray(ids))
        rows, places = np.nonzero(values[:, 1:] < values[:, :-1])
        if rows.size:
            row, place = int(rows[0]), int(places[0])
            raise ValueError(
                f"document ids must not decrease: row {row} has "
                f"{values[row, place]} at {place} and {values[row, place + 1]} after "
                "it; number the documents of a row in the order in which they come"
            )
    return ids[None] if ids.ndim == 1 else ids
