"""Natural order outside of a ring, its layout's order inside.

Device d of N holds slice d of a sequence in natural order, an N-th of it. Before the
ring, devices exchange tokens of their slices, so that each holds its shard of the
layout; after it, results go back the same way:

    Contiguous    nothing
    Mirror        half of each slice, with device N - 1 - d: one transfer
    Zigzag        almost all of each slice: two transfers, of half a slice each
    Striped       almost all of each slice: one all-to-all

In a ring without `natural_order` nothing is exchanged either.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..layouts import Contiguous, Layout, Striped
from ..masks import Visible
from .comm import Ring

Pairs = list[tuple[int, int]]
"""Devices that send and receive."""


class Halves(NamedTuple):
    """Where the halves of slices belong: chunk c of 2N is a half of slice c // 2.

    even, odd: devices of the slice and of the shard of all even, and all odd chunks.
    is_odd_first: whether a shard's odd chunk comes before its even one, (N,).
    """

    even: Pairs
    odd: Pairs
    is_odd_first: np.ndarray

    @classmethod
    def of(cls, layout: Layout, ring_size: int) -> "Halves":
        """Computes it for a layout whose shards hold an even and an odd chunk each."""
        shards = [layout.index(shard, ring_size, 2) for shard in range(ring_size)]
        chunks = np.stack(shards)  # (N, 2)
        shard_of_chunk = np.argsort(chunks, axis=None) // 2
        even = list(enumerate(shard_of_chunk[0::2].tolist()))
        odd = list(enumerate(shard_of_chunk[1::2].tolist()))
        return cls(even, odd, chunks[:, 0] % 2 == 1)


def to_shard(ring: Ring, x: jax.Array, axis: int = 1) -> jax.Array:
    """Exchanges a slice, with its tokens along `axis`, for a shard of the layout."""
    if not _exchanges(ring):
        return x
    if isinstance(ring.layout, Striped):
        return _all_to_all(ring, ring.layout.granule, x, axis, is_slice=True)
    halves = Halves.of(ring.layout, ring.size)
    even, odd = jnp.split(x, 2, axis)
    even = _sent(ring, even, halves.even)
    odd = _sent(ring, odd, halves.odd)
    is_odd_first = jnp.asarray(halves.is_odd_first)[ring.shard()]
    first = jnp.where(is_odd_first, odd, even)
    second = jnp.where(is_odd_first, even, odd)
    return jnp.concatenate([first, second], axis)


def to_slice(ring: Ring, x: jax.Array, axis: int = 1) -> jax.Array:
    """Undoes `to_shard`; its gradient, too."""
    if not _exchanges(ring):
        return x
    if isinstance(ring.layout, Striped):
        return _all_to_all(ring, ring.layout.granule, x, axis, is_slice=False)
    halves = Halves.of(ring.layout, ring.size)
    first, second = jnp.split(x, 2, axis)
    is_odd_first = jnp.asarray(halves.is_odd_first)[ring.shard()]
    even = jnp.where(is_odd_first, second, first)
    odd = jnp.where(is_odd_first, first, second)
    even = _sent(ring, even, [(shard, piece) for piece, shard in halves.even])
    odd = _sent(ring, odd, [(shard, piece) for piece, shard in halves.odd])
    return jnp.concatenate([even, odd], axis)


def bounds_to_shard(ring: Ring, visible: Visible) -> Visible:
    """Exchanges the bounds (m, B or 1, L) of a slice's queries, all in one array."""
    if not _exchanges(ring):
        return visible
    k_start, k_end = to_shard(ring, jnp.stack(visible), axis=3)
    return Visible(k_start, k_end)


def _exchanges(ring: Ring) -> bool:
    return ring.natural_order and ring.size > 1 and ring.layout != Contiguous()


def _sent(ring: Ring, x: jax.Array, pairs: Pairs) -> jax.Array:
    """Sends x to another device, if any device sends it to another."""
    stays = all(source == receiver for source, receiver in pairs)
    return x if stays else lax.ppermute(x, ring.axis_name, pairs)


def _all_to_all(
    ring: Ring, granule: int, x: jax.Array, axis: int, is_slice: bool
) -> jax.Array:
    """Exchanges stripes: a slice has rounds of one for each shard, a shard its own."""
    before = x.shape[:axis]
    after = x.shape[axis + 1 :]
    rounds = x.shape[axis] // (granule * ring.size)  # of a slice
    if is_slice:
        shape = *before, rounds, ring.size, granule, *after
        split = axis + 1
        joined = axis
    else:
        shape = *before, ring.size * rounds, 1, granule, *after
        split = axis
        joined = axis + 1
    # Tiled: parts are joined in the order of the devices, which is that of the slices.
    stripes = lax.all_to_all(
        x.reshape(shape), ring.axis_name, split, joined, tiled=True
    )
    return stripes.reshape(x.shape)
