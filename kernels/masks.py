"""Masks as intervals: a query attends to the keys with index in [k_start, k_end).

Or in a few intervals that share no key: the masks of trees, drafts and the like.

A token's *index* is its place in the global sequence; its *position* is its place in
its own document (what RoPE uses). Masks use indices only. For every mask here
`k_start` and `k_end` do not decrease along the sequence, so the keys of a query on any
shard of any layout are one interval of local slots (see `layouts.Layout.count`), and
the live tiles of a query tile are consecutive (see `tile_ranges`).

A mask is a function of query indices, so it can be built for any part of a sequence, in
any order, without the whole: `causal()(index, key_length)`. Masks combine with `&` and
`|`. NumPy indices give NumPy bounds and JAX indices give JAX bounds.

Operands must be finite: kernels multiply masked keys by 0, and 0 · nan is nan. Only
padding may hold anything: functions that are given a mask with `padding` put zeros in
its place first (`Mask.fill_padding`).

Pictures show a sequence of 4 tokens: rows are queries, columns are keys, 1 is visible.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .checks import (
    check_covered,
    check_signed,
    checked_ids,
    checked_length,
    known,
    whole_number,
)
from .placement import sharded_alike, whole_rows
from .visible import Array, Visible, namespace


def in_interval(k_start: jax.Array, index: jax.Array, k_end: jax.Array) -> jax.Array:
    """Returns k_start <= index < k_end elementwise; the arguments broadcast."""
    return (k_start <= index) & (index < k_end)


@dataclass(frozen=True)
class Mask:
    """A mask of a sequence that is not given yet.

    bounds: (query indices int32 (B or 1, T), number of keys) -> (k_start, k_end), each
      an integer or an array that broadcasts against the indices, or (m, B or 1, T).
    real_lengths: tokens from any of them on are padding.
    decreases: bool (B or 1,) each: whether the traced ids of a row decrease, which
      nothing else checks; see `make_ring_attention(..., check_masks=True)`.
    parts: two masks that this one joins; none if it joins none.
    join: how, `Visible.__and__` or `Visible.__or__`.
    """

    bounds: Callable[[Array, int], tuple[int | Array, int | Array]]
    real_lengths: tuple[int | Array, ...] = field(default=(), compare=False)
    decreases: tuple[Array, ...] = field(default=(), compare=False)
    parts: tuple["Mask", ...] = field(default=(), compare=False)
    join: Callable = field(default=Visible.__and__, compare=False)

    @classmethod
    def of_tokens(cls, visible: Visible, decreases: tuple[Array, ...] = ()) -> "Mask":
        """Returns the mask of bounds of every token of a sequence, in their order."""

        def bounds(index: Array, keys: int) -> tuple[Array, Array]:
            check_covered(index, keys, visible.k_start.shape[-1])
            xp = namespace(index)

            def at(values: Array) -> Array:
                rows = *values.shape[:-2], max(len(index), values.shape[-2])
                values = xp.asarray(values)
                values = xp.broadcast_to(values, (*rows, values.shape[-1]))
                tokens = xp.broadcast_to(xp.asarray(index), (*rows, index.shape[-1]))
                return xp.take_along_axis(values, tokens, axis=-1)

            return at(visible.k_start), xp.minimum(at(visible.k_end), keys)

        return cls(bounds, decreases=decreases)

    def __call__(self, index: Array, key_length: int) -> Visible:
        """Returns bounds (1 or B, T) of the queries at `index`, (T,) or (B, T).

        Of a mask of several intervals (m, 1 or B, T).

        Raises:
          ValueError: the indices are not signed integers of that shape, or the mask was
            built from ids that do not cover them.
        """
        if not isinstance(index, Array) or index.ndim not in (1, 2):
            kind = f"{type(index).__name__} {np.shape(index)}"
            raise ValueError(f"query indices must be (T,) or (B, T), got {kind}")
        check_signed("query indices", index)
        if index.dtype.itemsize < 4:
            index = index.astype(np.int32)
        index = index[None] if index.ndim == 1 else index
        keys = whole_number("key_length", key_length, 0)
        # Narrow indices would wrap around where there are more keys than they count.
        keys = min(keys, int(jnp.iinfo(index.dtype).max))
        bounds = self.bounds(index, keys)
        _, *bounds = namespace(index).broadcast_arrays(index, *bounds)
        return Visible._make(bounds).map(lambda bound: bound.astype(index.dtype))

    def outline(self, index: np.ndarray, key_length: int) -> Visible:
        """Returns bounds, as a call does, that are known while a program is traced.

        They contain the mask's own: of an intersection, that of its known parts.
        """
        if self.parts:
            return self.join(*(x.outline(index, key_length) for x in self.parts))
        try:
            return self(index, key_length)
        except jax.errors.TracerArrayConversionError:  # made of traced arrays
            # Too wide an outline costs time; too narrow a one leaves out visible keys.
            return full()(index, key_length)

    def fill_padding(
        self, x: jax.Array, index: Array, value: float = 0, axis: int = 1
    ) -> jax.Array:
        """Puts `value` in the place of padding, so that nothing in it counts.

        Its gradients are zero there too. `ring_attention` is given bounds and no
        mask: fill the padding of q, k, v and of its result. Functions that take a mask
        do that by themselves.

        x: (B, …), with the tokens at `index`, (T,) or (B, T), along `axis`. Returned
          unchanged where the mask has no `padding`.
        """
        index = index[None] if index.ndim == 1 else index
        for length in self.real_lengths:
            is_real = jnp.asarray(index < _as_index(length, index))
            others = [other for other in range(1, x.ndim) if other != axis]
            x = jnp.where(jnp.expand_dims(is_real, others), x, value)
        return x

    def __and__(self, other: "Mask") -> "Mask":
        """Intersects two masks, each interval of one with each of the other."""
        return self._joined(other, "&", Visible.__and__)

    def __or__(self, other: "Mask") -> "Mask":
        """Joins two masks: their queries see what they see in either, and once.

        Raises:
          ValueError: one of them has `padding`, which joins the whole with `&`.
        """
        mask = self._joined(other, "|", Visible.__or__)
        if mask.real_lengths:
            raise ValueError(
                "padding must be that of the whole mask, got a part of | with one: "
                "write (a | b) & padding(n)"
            )
        return mask

    def _joined(self, other: "Mask", sign: str, join: Callable) -> "Mask":
        if not isinstance(other, Mask):
            name = getattr(other, "__name__", other)
            raise ValueError(f"{sign} must join two masks, as causal() is, got {name}")

        def bounds(index: Array, keys: int) -> Visible:
            return join(self(index, keys), other(index, keys))

        lengths = self.real_lengths + other.real_lengths
        decreases = self.decreases + other.decreases
        return Mask(bounds, lengths, decreases, (self, other), join)

    def __bool__(self) -> bool:
        """Refuses `and`, `or` and `not`, which would drop one of two masks."""
        raise ValueError("a mask is neither true nor false: join masks with & and |")

    __ror__ = __or__
    __rand__ = __and__


def full() -> Mask:
    """Lets every query attend to every key.

    `full()`:

        1 1 1 1
        1 1 1 1
        1 1 1 1
        1 1 1 1
    """
    return Mask(lambda index, keys: (0, keys))


def causal() -> Mask:
    """Lets a query attend to the keys up to its own index.

    `causal()`:

        1 0 0 0
        1 1 0 0
        1 1 1 0
        1 1 1 1
    """
    return Mask(lambda index, keys: (0, namespace(index).minimum(index + 1, keys)))


def window(size: int) -> Mask:
    """Lets a query attend to itself and the `size - 1` keys before it.

    `window(2)`:

        1 0 0 0
        1 1 0 0
        0 1 1 0
        0 0 1 1

    Raises:
      ValueError: `size` is not a whole number from 1 on.
    """
    size = whole_number("window size", size, 1)

    def bounds(index: Array, keys: int) -> tuple[Array, Array]:
        xp = namespace(index)
        k_start = xp.maximum(index + 1 - _as_index(size, index), 0)
        return k_start, xp.minimum(index + 1, keys)

    return Mask(bounds)


def prefix(length: int | Array) -> Mask:
    """Builds the mask of a prefix LM: causal, but all attend to the first tokens.

    `prefix(3)`:

        1 1 1 0
        1 1 1 0
        1 1 1 0
        1 1 1 1

    length: one number, or (B, 1) for a prefix of its own in every row.

    Raises:
      ValueError: the length is not a signed integer of that shape, or is negative.
    """
    length = checked_length("prefix length", length)

    def bounds(index: Array, keys: int) -> tuple[int, Array]:
        xp = namespace(index)
        k_end = xp.maximum(index + 1, _as_index(length, index))
        return 0, xp.minimum(k_end, keys)

    return Mask(bounds)


def first(length: int | Array) -> Mask:
    """Lets every query attend to the first tokens, and to nothing else.

    A window that keeps these in sight is `window(1024) | first(4) & causal()`.

    `first(2)`:

        1 1 0 0
        1 1 0 0
        1 1 0 0
        1 1 0 0

    Arguments and errors as in `prefix`.
    """
    length = checked_length("first length", length)

    def bounds(index: Array, keys: int) -> tuple[int, Array]:
        return 0, namespace(index).minimum(_as_index(length, index), keys)

    return Mask(bounds)


def padding(real_length: int | Array) -> Mask:
    """Masks the tokens from `real_length` on, both as queries and as keys.

    `padding(3)`:

        1 1 1 0
        1 1 1 0
        1 1 1 0
        0 0 0 0

    Padding may hold anything, also nan. Combine it with another mask:
    `causal() & padding(1000)`.

    real_length: one number, or (B, 1) for a length of its own in every row.

    Raises:
      ValueError: the length is not a signed integer of that shape, or is negative.
    """
    real_length = checked_length("padding real_length", real_length)

    def bounds(index: Array, keys: int) -> tuple[Array, int | Array]:
        del keys
        length = _as_index(real_length, index)
        # Queries of padding see an empty interval that begins at their own index:
        # at 0 the starts would decrease along the sequence.
        return namespace(index).where(index < length, 0, index), length

    return Mask(bounds, (real_length,))


def segments(ids: Array) -> Mask:
    """Lets queries attend to the tokens with their own id, before and after them.

    `segments([7, 7, 8, 8])`:

        1 1 0 0
        1 1 0 0
        0 0 1 1
        0 0 1 1

    ids: int (B, T) or (T,), not decreasing along the sequence; padding has some too, as
      the last document's.

    Raises:
      ValueError: the ids are not integers, not one or two dimensional, or decrease
        somewhere (checked where values are known, that is, outside of `jit`); from the
        mask, they are fewer than the tokens of the sequence.
    """
    ids = whole_rows(checked_ids(ids))
    xp = namespace(ids)
    tokens = xp.arange(ids.shape[-1], dtype=xp.int32)
    edge = ids[:, 1:] != ids[:, :-1]
    yes, edge = sharded_alike([xp.ones_like(ids[:, :1], dtype=bool), edge])
    decreases = ()
    if known(ids) is None:  # else they were checked above
        decreases = ((ids[:, 1:] < ids[:, :-1]).any(axis=1),)
    # Running extremes carry an edge's index to all tokens of its segment.
    starts = xp.where(xp.concatenate([yes, edge], axis=1), tokens, 0)
    ends = xp.where(xp.concatenate([edge, yes], axis=1), tokens + 1, ids.shape[-1])
    first = _running(xp.maximum, starts)  # (B, T), where the token's segment starts
    end = _running(xp.minimum, ends[:, ::-1])[:, ::-1]  # (B, T), where it ends

    return Mask.of_tokens(Visible(first, end), decreases)


def documents(ids: Array) -> Mask:
    """Builds the mask of packed documents: causal within the query's own document.

    `documents([7, 7, 8, 8])`:

        1 0 0 0
        1 1 0 0
        0 0 1 0
        0 0 1 1

    Arguments and errors as in `segments`.
    """
    return causal() & segments(ids)


def _running(pick: Any, values: Array) -> Array:
    """Returns the running maximum or minimum along the last axis."""
    if isinstance(values, np.ndarray):
        return pick.accumulate(values, axis=-1)
    scan = jax.lax.cummax if pick is jnp.maximum else jax.lax.cummin
    return scan(values, axis=values.ndim - 1)


def _as_index(value: int | Array, index: Array) -> int | Array:
    """Returns a number, or an array in the type of `index`, clipped to that type.

    Larger ones would wrap around, and no sequence is that long.
    """
    most = int(jnp.iinfo(index.dtype).max)
    if isinstance(value, int):
        return min(value, most)
    if jnp.iinfo(value.dtype).max > most:
        values = known(value)  # as JAX wraps 64 bits around where it does not have them
        value = (value if values is None else values).clip(max=most)
    return value.astype(index.dtype)
