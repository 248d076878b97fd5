"""Ulysses: all-to-alls that turn the tokens of a group of devices into its heads.

The U devices of a mesh axis hold a shard of the ring, L slots, in U equal slices. One
all-to-all each for q, k and v before the ring gives a device all L slots of its part of
the heads, and one after it brings the results back (DeepSpeed-Ulysses, 2309.14509). So
the ring is U times shorter, and knows nothing of it (USP, 2405.07719).

Every device needs whole groups: query heads, and the key/value head that they share.
Where U does not divide the key/value heads, these are repeated, no more than it takes.
Where it does not divide the query heads, zero heads are added, whose work is wasted.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..masks import Array
from ..precision import accumulator_type

Pair = tuple[jax.Array, jax.Array]


class HeadShares(NamedTuple):
    """Heads as they are shared out over U devices.

    group: query heads of each of the K given key/value heads, zero heads included.
    copies: of each of these key/value heads; they divide its group.
    kv_heads: key/value heads in all, a multiple of U, copies and zero heads included.
    """

    group: int
    copies: int
    kv_heads: int

    @property
    def heads(self) -> int:
        """Query heads in all, a multiple of U."""
        return self.kv_heads * self.group // self.copies


def share_heads(heads: int, kv_heads: int, devices: int) -> HeadShares:
    """Shares out H query and K key/value heads over the devices of a Ulysses axis.

    Returns:
      The way with the fewest query heads, and of these with the fewest key/value heads.
    """
    group = heads // kv_heads
    ways = (
        HeadShares(padded, copies, -(-kv_heads * copies // devices) * devices)
        for padded in range(group, group + devices)
        for copies in range(1, padded + 1)
        if padded % copies == 0
    )
    return min(ways, key=lambda way: (way.heads, way.kv_heads, way))


def over_heads(
    attend: Callable[..., Pair],
    axis_name: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    k_start: Array,
    k_end: Array,
) -> Pair:
    """Calls `ring.attend` with whole shards of some heads, in `shard_map`.

    attend: (q, k, v, sinks, k_start, k_end) -> (out, lse), on the L slots of a shard.
    axis_name: mesh axis over which the shard's slots are cut, in their order.
    q: (B, L / U, H, D). k, v: (B, L / U, K, D). sinks: (H,), the same on all devices.
    k_start, k_end: int32 (m, B or 1, L / U).

    Returns:
      out (B, L / U, H, D), lse (B, H, L / U).
    """
    devices = lax.axis_size(axis_name)
    heads = q.shape[2]
    kv_heads = k.shape[2]
    way = share_heads(heads, kv_heads, devices)
    # Tiled: slices are joined in the order of the devices, which is that of the slots.
    swap = functools.partial(lax.all_to_all, axis_name=axis_name, tiled=True)
    q = swap(_with_zeros(q, 2, kv_heads, way), split_axis=2, concat_axis=1)
    k = swap(_with_copies(k, way), split_axis=2, concat_axis=1)  # (B, L, K' / U, D)
    v = swap(_with_copies(v, way), split_axis=2, concat_axis=1)
    if sinks is not None:
        own = way.heads // devices
        # The heads that the all-to-all leaves here: consecutive ones, by device.
        begin = lax.axis_index(axis_name) * own
        padded = _with_zeros(sinks, 0, kv_heads, way)
        sinks = lax.dynamic_slice_in_dim(padded, begin, own)
    # Every device has all slots of its heads now, so it needs all rows' bounds; one
    # gather takes both.
    bounds = jnp.stack([k_start, k_end])  # (2, m, B or 1, L / U)
    k_start, k_end = lax.all_gather(bounds, axis_name, axis=3, tiled=True)
    out, lse = attend(q, k, v, sinks, k_start, k_end)  # (B, L, H' / U, D)
    # What zero heads have computed goes: it is cut off behind the exchange.
    out = swap(out, split_axis=1, concat_axis=2)  # (B, L / U, H', D)
    lse = swap(lse, split_axis=2, concat_axis=1)  # (B, H', L / U)
    sizes = heads // kv_heads, kv_heads
    return _without_zeros(out, 2, sizes, way), _without_zeros(lse, 1, sizes, way)


def _with_zeros(x: jax.Array, axis: int, kv_heads: int, way: HeadShares) -> jax.Array:
    """Adds zero heads to H along an axis: in each group, then behind them all."""
    groups = (*x.shape[:axis], kv_heads, -1, *x.shape[axis + 1 :])
    more = way.group - x.shape[axis] // kv_heads
    x = _padded(x.reshape(groups), axis + 1, more)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return _padded(x, axis, way.heads - x.shape[axis])


def _without_zeros(
    x: jax.Array, axis: int, sizes: tuple[int, int], way: HeadShares
) -> jax.Array:
    """Undoes `_with_zeros`. sizes: query heads of a group, and key/value heads."""
    group, kv_heads = sizes
    x = lax.slice_in_dim(x, 0, kv_heads * way.group, axis=axis)
    x = x.reshape(*x.shape[:axis], kv_heads, -1, *x.shape[axis + 1 :])
    x = lax.slice_in_dim(x, 0, group, axis=axis + 1)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _with_copies(x: jax.Array, way: HeadShares) -> jax.Array:
    """Repeats the heads of k or v (B, T, K, D), and adds zero heads behind them."""
    x = _repeated(x, way.copies)
    return _padded(x, 2, way.kv_heads - x.shape[2])


def _padded(x: jax.Array, axis: int, more: int) -> jax.Array:
    if not more:
        return x
    return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _repeated(x: jax.Array, copies: int) -> jax.Array:
    """Repeats each head of (B, T, K, D), as neighbours."""
    return jnp.repeat(x, copies, axis=2) if copies > 1 else x


def _repeated_forward(x, copies):
    return _repeated(x, copies), None


def _sum_copies(copies, _, gradient):
    """Sums up the gradients of the copies in float32, and rounds once."""
    if copies == 1:
        return (gradient,)
    shape = *gradient.shape[:2], -1, copies, gradient.shape[3]
    wide = gradient.reshape(shape).astype(accumulator_type(gradient.dtype))
    return (wide.sum(axis=3).astype(gradient.dtype),)


_repeated.defvjp(_repeated_forward, _sum_copies)
