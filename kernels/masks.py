"""Masks as intervals: every query sees the keys whose index lies in [lo, hi].

A token's *index* is its place in the global sequence; its *position* is its place in
its own document (what RoPE uses). Masks speak of indices only. For every mask here
`lo` and `hi` do not decrease along the sequence, so the keys a query sees on any shard
of any layout are one interval of local slots (see `layout.count`), and the live tiles
of a query tile are consecutive (see `tiles`).

A mask is a function of query indices, so it can be built for any part of a sequence, in
any order, without the whole: `causal()(index, key_length)`. Masks combine with `&`.
NumPy indices give NumPy bounds and JAX indices give JAX bounds.

Operands must be finite: kernels multiply a token that a query does not see by 0, and
0 · nan is nan. Only padding may hold anything: functions that are given a mask with
`padding` put zeros in its place first (`Mask.fill_padding`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .known import known, whole_number

Array = jax.Array | np.ndarray


class Visible(NamedTuple):
    """Bounds of what each query sees, both inclusive; `hi < lo` sees nothing.

    lo, hi: signed integers (B, T), or (1, T) where all rows of the batch share them.
      Neither decreases along the sequence, also where nothing is seen.
    """

    lo: Array
    hi: Array


@dataclass(frozen=True)
class Mask:
    """A mask whose sequence is not known yet.

    bounds: from query indices, int32 (..., T), and the number of keys to `Visible`,
    broadcast against the indices.
    real_lengths: tokens from any of them on are padding.
    """

    bounds: Callable[[Array, int], Visible]
    real_lengths: tuple[int | Array, ...] = field(default=(), compare=False)

    def __call__(self, index: Array, key_length: int) -> Visible:
        """Bounds for the queries at `index`, (T,) or (B, T); returns (1 or B, T).

        Raises:
          ValueError: the indices are no signed integers of that shape, or the mask was
            built from ids that do not cover them.
        """
        if not isinstance(index, Array) or index.ndim not in (1, 2):
            kind = f"{type(index).__name__} {np.shape(index)}"
            raise ValueError(f"query indices must be (T,) or (B, T), got {kind}")
        _check_signed("query indices", index)
        if index.dtype.itemsize < 4:
            index = index.astype(np.int32)
        index = index[None] if index.ndim == 1 else index
        keys = whole_number("key_length", key_length, 0)
        lo, hi = self.bounds(index, _as_index(keys, index))
        return Visible(lo.astype(index.dtype), hi.astype(index.dtype))

    def fill_padding(
        self, x: jax.Array, index: Array, value: float = 0, axis: int = 1
    ) -> jax.Array:
        """Puts `value` in the place of padding, so that nothing in it counts.

        Nor do gradients of what it gives. `ring.ring_attention` is given bounds and no
        mask: fill the padding of q, k, v and of its result. Functions that take a mask
        do that by themselves.

        x: (B, …), with the tokens at `index`, (T,) or (B, T), along `axis`. Comes back
          as it is where the mask has no `padding`.
        """
        index = index[None] if index.ndim == 1 else index
        for length in self.real_lengths:
            is_real = jnp.asarray(index < _as_index(length, index))
            others = [other for other in range(1, x.ndim) if other != axis]
            x = jnp.where(jnp.expand_dims(is_real, others), x, value)
        return x

    def __and__(self, other: "Mask") -> "Mask":
        """What both masks let a query see."""
        if not isinstance(other, Mask):
            name = getattr(other, "__name__", other)
            raise ValueError(f"& must join two masks, as causal() is, got {name}")

        def bounds(index: Array, key_length: int) -> Visible:
            xp = _namespace(index)
            mine, others = self(index, key_length), other(index, key_length)
            return Visible(
                xp.maximum(mine.lo, others.lo), xp.minimum(mine.hi, others.hi)
            )

        return Mask(bounds, self.real_lengths + other.real_lengths)

    __rand__ = __and__


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
      ValueError: `size` is no whole number, or below 1, the query itself.
    """
    size = whole_number("window size", size, 1)

    def bounds(index: Array, keys: int) -> Visible:
        xp = _namespace(index)
        first = index - _as_index(size, index) + 1
        return Visible(xp.maximum(first, 0), xp.minimum(index, keys - 1))

    return Mask(bounds)


def prefix(length: int | Array) -> Mask:
    """Prefix LM: causal, but the first `length` tokens are seen by all.

    length: one number, or (B, 1) for a prefix of its own in every row.

    Raises:
      ValueError: the length is no signed integer of that shape, or negative.
    """
    length = _checked_length("prefix length", length)

    def bounds(index: Array, keys: int) -> Visible:
        xp = _namespace(index)
        hi = xp.maximum(index, _as_index(length, index) - 1)
        return Visible(0 * hi, xp.minimum(hi, keys - 1))

    return Mask(bounds)


def padding(real_length: int | Array) -> Mask:
    """Tokens from `real_length` on are padding: unseen, and seeing nothing.

    It may hold anything, also nan. Combine it with another mask:
    `causal() & padding(1000)`.

    real_length: one number, or (B, 1) for a length of its own in every row.

    Raises:
      ValueError: the length is no signed integer of that shape, or negative.
    """
    real_length = _checked_length("padding real_length", real_length)

    def bounds(index: Array, keys: int) -> Visible:
        del keys
        xp = _namespace(index)
        length = _as_index(real_length, index)
        lo = xp.where(index < length, 0 * index, index)
        return Visible(lo, 0 * index + length - 1)

    return Mask(bounds, (real_length,))


def segments(ids: Array) -> Mask:
    """Queries see the tokens that carry their own id, before and after them.

    ids: int (B, T) or (T,), never decreasing along the sequence, and padding has some
      too, as the last document's.

    Raises:
      ValueError: the ids are no integers, not one or two dimensional, or decrease
        somewhere (checked where values are known, that is, outside of `jit`); from the
        mask, they are fewer than the tokens of the sequence.
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
        _check_covered(index, keys, ids.shape[-1])
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

    starts: int (documents,), increasing, the first of them 0. Documents that start
      after the end of a sequence have no tokens in it. This form needs no array of the
      sequence's length, so a host can build the bounds of its own shard alone.

    Raises:
      ValueError: the starts are no integers, do not begin with 0 or do not increase.
    """
    starts = np.asarray(starts)
    if starts.ndim != 1 or starts.size and not np.issubdtype(starts.dtype, np.integer):
        raise ValueError(
            "document starts must be integers (documents,), got "
            f"{starts.dtype} {starts.shape}"
        )
    if starts.size == 0 or starts[0] != 0 or (starts[1:] <= starts[:-1]).any():
        raise ValueError(
            f"document starts must increase from 0, got {starts[:8]} … "
            f"({starts.size} in all)"
        )

    def bounds(index: Array, keys: int) -> Visible:
        _check_covered(index, keys)
        xp = _namespace(index)
        first = xp.asarray(_as_index(starts, index))
        document = xp.searchsorted(first, index, side="right") - 1
        return Visible(first[document], xp.minimum(index, keys - 1))

    return Mask(bounds)


def _namespace(array: Array):
    return np if isinstance(array, np.ndarray) else jnp


def _running(pick: Callable, values: Array) -> Array:
    """The running maximum or minimum along the last axis."""
    if isinstance(values, np.ndarray):
        return pick.accumulate(values, axis=-1)
    scan = jax.lax.cummax if pick is jnp.maximum else jax.lax.cummin
    return scan(values, axis=values.ndim - 1)


def _as_index(value: int | Array, index: Array) -> int | Array:
    """A number, or an array in the type of `index`, at most the largest of that type.

    Larger ones would wrap around, and no sequence has so many tokens.
    """
    most = int(jnp.iinfo(index.dtype).max)
    if isinstance(value, int):
        return min(value, most)
    if jnp.iinfo(value.dtype).max > most:
        values = known(value)  # as JAX wraps 64 bits around where it does not have them
        value = (value if values is None else values).clip(max=most)
    return value.astype(index.dtype)


def _check_signed(name: str, array: Array) -> None:
    if not jnp.issubdtype(array.dtype, jnp.signedinteger):
        raise ValueError(f"{name} must be signed integers, got {array.dtype}")


def _checked_length(name: str, length: int | Array) -> int | Array:
    """One whole number, or (B, 1) of them; none is negative where they are known."""
    if not isinstance(length, Array):
        return whole_number(name, length, 0)
    _check_signed(name, length)
    if length.ndim and length.shape[1:] != (1,):
        raise ValueError(
            f"{name} must be one number, or (B, 1) for one in each row, got "
            f"{length.shape}: give (B,) as lengths[:, None]"
        )
    values = known(length)
    if values is not None and values.size:
        whole_number(name, int(values.min()), 0)
    return length


def _check_covered(index: Array, keys: int, ids: int | None = None) -> None:
    """Refuses indices that no sequence has, and fewer ids than tokens, by both."""
    tokens, values = max(keys, index.shape[1]), known(index)
    if values is not None and values.size:
        whole_number("the first query index", int(values.min()), 0)
        tokens = max(tokens, int(values.max()) + 1)
    if ids is not None and tokens > ids:
        raise ValueError(
            f"document ids must cover the sequence of {tokens} tokens, got {ids} ids: "
            "give every token one, padding that of the last document"
        )


def _checked_ids(ids: Array) -> Array:
    if not isinstance(ids, jax.Array):
        ids = np.asarray(ids)
    if ids.ndim not in (1, 2):
        raise ValueError(f"document ids must be (T,) or (B, T), got {ids.shape=}")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"document ids must be integers, got {ids.dtype}")
    values = known(ids)
    if values is not None:
        values = np.atleast_2d(values)
        rows, places = np.nonzero(values[:, 1:] < values[:, :-1])
        if rows.size:
            row, place = int(rows[0]), int(places[0])
            raise ValueError(
                f"document ids must not decrease: row {row} has "
                f"{values[row, place]} at {place} and {values[row, place + 1]} after "
                "it; number the documents of a row in the order in which they come"
            )
    return ids[None] if ids.ndim == 1 else ids
