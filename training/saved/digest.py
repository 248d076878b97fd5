"""Digests of arrays: whether they have the same bits, and all numbers are finite.

A leaf's digest is the sum, modulo 2^32, of its elements' bits, each scrambled with its
place. The sum has no order, so it is the same on every mesh, and it is computed where
the elements lie. For each place the scrambling is one to one: a change of any one
element always changes the digest, and any other damage (elements swapped, rows lost)
goes unseen once in 2^32 times.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Digest(NamedTuple):
    """Digest of one array's bits, and its numbers of nan and infinite elements.

    Counts above 2^24 are rounded, and never to 0.
    """

    bits: int
    nans: int
    infinities: int


def digests(tree: Any) -> dict[str, Digest]:
    """Returns the digest of each leaf, by dotted path; the same in every process.

    tree: of arrays, sharded in any way. Every process has to call this.
    """
    by_name = {}
    for name, counts in jax.device_get(_by_name(tree)).items():
        bits, nans, infinities = map(int, counts)
        by_name[name] = Digest(bits, nans, infinities)
    return by_name


def not_finite(by_name: Mapping[str, Digest]) -> str:
    """Names the first array that is not finite and says what it holds; "" for none."""
    bad = [name for name, digest in by_name.items() if digest.nans or digest.infinities]
    if not bad:
        return ""
    _, nans, infinities = by_name[bad[0]]
    held = f"{nans} nan and {infinities} inf"
    if not nans or not infinities:
        held = f"{nans} nan" if nans else f"{infinities} inf"
    others = f" (and {len(bad) - 1} more arrays are not finite)" if bad[1:] else ""
    return f"{bad[0]} holds {held}{others}"


@jax.jit
def device_digest(tree: Any) -> jax.Array:
    """Computes one uint32 for a whole tree, left on the devices."""
    here = jax.device_put(tree, jax.memory.Space.Device)  # some may be on the host
    # A digest of digests, not their sum: arrays that change places are seen.
    words = [digest(leaf) for leaf in jax.tree.leaves(here)]
    return digest(jnp.stack(words))


@jax.jit
def _by_name(tree: Any) -> dict[str, tuple[jax.Array, jax.Array, jax.Array]]:
    by_name = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        leaf = jax.device_put(leaf, jax.memory.Space.Device)  # may be on the host
        nans = _count(jnp.isnan, leaf)
        infinities = _count(jnp.isinf, leaf)
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        by_name[name] = digest(leaf), nans, infinities
    return by_name


def _count(function: Callable[[jax.Array], jax.Array], array: Any) -> jax.Array:
    array = jnp.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return jnp.zeros((), jnp.float32)
    # In float32: an integer would begin again at 0 after 2^32 of them.
    return function(array).sum(dtype=jnp.float32)


def digest(array: jax.Array) -> jax.Array:
    """Returns the uint32 digest of an array of any shape and a type of 1 to 8 bytes."""
    bits = _words(jnp.asarray(array))
    # Addition has no order: the same on every mesh, and no element has to move.
    return scramble(bits ^ scrambled_indices(bits.shape)).sum(dtype=jnp.uint32)


def scrambled_indices(shape: tuple[int, ...]) -> jax.Array:
    """Returns a uint32 for each element of an array, scrambled from its indices."""
    # Each axis is scrambled by itself: a flat index would overflow.
    # By place alone, so that each device computes those of its own elements.
    words = jnp.zeros((1,) * len(shape), jnp.uint32)
    for axis in range(len(shape)):
        index = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        words = scramble(words + index + jnp.uint32(1))
    return words


def _words(array: jax.Array) -> jax.Array:
    """Returns the bits as uint32; 8 bytes are two words, along a new last axis."""
    if array.dtype == jnp.bool:
        return array.astype(jnp.uint32)
    size = array.dtype.itemsize
    word = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[size]
    return jax.lax.bitcast_convert_type(array, word).astype(jnp.uint32)


def scramble(x: jax.Array) -> jax.Array:
    """Mixes bits one to one, as MurmurHash3 does last (Appleby, public domain)."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))
