"""Digests of arrays: numbers that tell whether their bits are what they were.

A leaf's digest is the sum, modulo 2^32, of its elements' bits, each scrambled with its
place. The sum has no order, so it is the same on every mesh, and it is computed where
the elements lie. For each place the scrambling is one to one: a change of any one
element always changes the digest, and any other damage (elements swapped, rows lost)
goes unseen once in 2^32 times.
"""

from typing import Any

import jax
import jax.numpy as jnp


def digests(tree: Any) -> dict[str, int]:
    """The digest of each leaf, by dotted path; the same in every process.

    tree: of arrays, sharded in any way. Every process has to call this.
    """
    return {name: int(x) for name, x in jax.device_get(_by_name(tree)).items()}


@jax.jit
def device_digest(tree: Any) -> jax.Array:
    """One uint32 for a whole tree, left on the devices."""
    words = [digest(leaf) for leaf in jax.tree.leaves(tree)]
    return digest(jnp.stack(words))


@jax.jit
def _by_name(tree: Any) -> dict[str, jax.Array]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): digest(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def digest(array: jax.Array) -> jax.Array:
    """The digest of one array of any shape and of a type of 1 to 8 bytes, uint32."""
    bits = _words(jnp.asarray(array))
    # Each axis is scrambled by itself: a flat index would overflow.
    place = jnp.zeros((1,) * bits.ndim, jnp.uint32)
    for axis in range(bits.ndim):
        index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        place = _scramble(place + index + jnp.uint32(1))
    return _scramble(bits ^ place).sum(dtype=jnp.uint32)


def _words(array: jax.Array) -> jax.Array:
    """The bits as uint32; 8 bytes are two words, along a new last axis."""
    if array.dtype == jnp.bool:
        return array.astype(jnp.uint32)
    size = array.dtype.itemsize
    word = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[size]
    return jax.lax.bitcast_convert_type(array, word).astype(jnp.uint32)


def _scramble(x: jax.Array) -> jax.Array:
    """MurmurHash3's final mix, one to one on uint32 (Appleby, public domain)."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))
