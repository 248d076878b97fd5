"""Stores the moments of an optimizer in fewer bits than it computes with.

As bfloat16, or in blocks of 256 numbers of 8 bits with one scale (2110.02861). That
paper looks numbers up in a table, as few bits must reach from large to tiny ones; a
float8 does so without: 3 bits of mantissa over a range of 2^17 for the first moment, 2
over 2^32 for the second, which is a square. Both are rounded at random, or an average
that moves by less than half a unit a step would stand still.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from training.update.rounding import random_bits, stochastic_round

MOMENTS = "float32", "bfloat16", "float8"
"""Types in which moments may be stored."""

BLOCK = 256
"""Numbers with a scale of their own; fewer where an axis does not divide by it."""

FLOAT8 = {"mu": jnp.float8_e4m3fn, "nu": jnp.float8_e5m2}
"""Of each moment, by its name in optax's states."""


class Blocks(NamedTuple):
    """Numbers in blocks along one axis, divided by the scale of their block.

    values: float8, of the array's shape. scales: float32, of the same but for the axis,
    which has one for each block.
    """

    values: jax.Array
    scales: jax.Array

    def decoded(self) -> jax.Array:
        """Returns the numbers, float32."""
        wide = self.values.astype(jnp.float32)
        for axis, size in enumerate(wide.shape):
            # Blocks lie along the axis on which there are fewer scales than numbers.
            parts = self.scales.shape[axis]
            if size != parts:
                blocks = _cut(wide, axis, size // parts)
                scales = jnp.expand_dims(self.scales, axis + 1)
                return (blocks * scales).reshape(wide.shape)
        return wide * self.scales  # blocks of one number


def encode(x: jax.Array, moment: str, axis: int, word: jax.Array) -> Blocks:
    """Encodes a moment, float32, in blocks along an axis.

    moment: "mu" or "nu". The latter has no negative numbers, and those above 0 do not
      become 0, as updates are divided by their roots.
    word: of the random bits, uint32.
    """
    dtype = FLOAT8[moment]
    info = jnp.finfo(dtype)
    length = math.gcd(BLOCK, x.shape[axis])
    blocks = _cut(x, axis, length)
    largest = jnp.abs(blocks).max(axis + 1, keepdims=True)
    # The largest number of a block becomes the largest of the type: e4m3fn has no inf,
    # and whatever exceeds that would be nan.
    scales = largest / jnp.float32(info.max)
    bits = random_bits(word, x.shape).reshape(blocks.shape)
    # A block of zeros has scale 0, and 0 / 0 would be nan.
    values = blocks / jnp.where(scales > 0, scales, 1)
    if moment == "nu":
        # Rounded to 0, an update would be divided by epsilon alone.
        least = jnp.float32(info.smallest_subnormal)
        values = jnp.where(values > 0, values.clip(least), 0)
    values = stochastic_round(values, bits, dtype).reshape(x.shape)
    return Blocks(values, scales.squeeze(axis + 1))


def _cut(x: jax.Array, axis: int, length: int) -> jax.Array:
    """Cuts an axis into blocks: (…, blocks, length, …)."""
    return x.reshape(*x.shape[:axis], -1, length, *x.shape[axis + 1 :])


def decode(state: Any) -> Any:
    """Returns a state with all its numbers in float32, as optax computes with them."""

    def wide(leaf: Any) -> jax.Array:
        if isinstance(leaf, Blocks):
            return leaf.decoded()
        return leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf

    return jax.tree.map(wide, state, is_leaf=lambda leaf: isinstance(leaf, Blocks))
