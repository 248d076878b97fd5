"""Rounds float32 to fewer bits at random, so that the mean over many times is exact.

What a bfloat16 or an 8-bit number loses of a small change is kept on average
(2010.06192). The random bits of an element are a hash of its place and a word of the
step, computed where the element lies: equal on every mesh, and never in memory.
"""

import jax
import jax.numpy as jnp

from training.saved.digest import scramble, scrambled_indices

SMALLEST_EXPONENT = -100
"""Smaller numbers are rounded as if they had this exponent: a unit that is no normal
float32 would be 0 on some devices."""


def random_bits(word: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns 32 random bits for each element of an array.

    word: uint32 scalar; another one gives other bits.
    """
    return scramble(scrambled_indices(shape) ^ word)


def stochastic_round(x: jax.Array, bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rounds to one of the two neighbours in `dtype`, the nearer one more often.

    The mean over `bits` is x, to 2^(nmant - 23) of the neighbours' distance, but for
    what exceeds the largest number of `dtype`. Numbers of `dtype` stay as they are.

    Args:
      x: float32, finite.
      bits: uint32, uniformly distributed, of x's shape.
      dtype: a floating type with fewer bits of mantissa.
    """
    info = jnp.finfo(dtype)
    _, exponent = jnp.frexp(x)  # x is from 2^(exponent - 1) to below 2^exponent
    least = max(int(info.minexp), SMALLEST_EXPONENT)
    unit = jnp.ldexp(jnp.float32(1), jnp.maximum(exponent - 1, least) - info.nmant)
    # Of at most the binary places of x / unit, or their sum would be rounded up to 1.
    digits = 22 - info.nmant
    share = (bits >> jnp.uint32(32 - digits)).astype(jnp.float32)
    share = (share + jnp.float32(0.5)) * jnp.float32(2.0**-digits)  # between 0 and 1
    # Down after a share between 0 and 1 of a unit is added, below 0 too: so the upper
    # neighbour is taken as often as x is near to it.
    rounded = jnp.floor(x / unit + share) * unit
    most = jnp.float32(info.max)
    return rounded.clip(-most, most).astype(dtype)
