"""Rotary position embedding (RoFormer, 2104.09864), exact at any position.

Positions come with the data, so packed and permuted tokens need nothing special.
"""

import jax
import jax.numpy as jnp
import numpy as np

Rotation = tuple[jax.Array, jax.Array]
"""Cosine and sine of every token's angles, (B, T, 1, D / 2) float32."""

_DIGIT = 1024
"""Positions are split into digits of this base: see `rotations`."""


def rotations(positions: jax.Array, head_dim: int, theta: float) -> Rotation:
    """The rotation of every token.

    positions: int32 (B, T), below 2³⁰.
    head_dim: D, even.
    theta: base of the geometric series of frequencies.

    A float32 product position · frequency is off by 0.03 radians at a million tokens.
    Here angles are whole numbers of 2⁻³² turns, so that whole turns overflow and are
    gone, and the position is split into digits in base 1024, whose units are reduced to
    fractions of a turn in float64: the error stays below 10⁻⁵ radians at any position.
    """
    if head_dim % 2:
        raise ValueError(f"RoPE turns pairs: {head_dim=} must be even")
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turned = jnp.zeros((*positions.shape, head_dim // 2), jnp.uint32)
    for digit in range(3):
        turns = np.float64(_DIGIT**digit) * frequencies / (2 * np.pi)
        unit = np.round(np.remainder(turns, 1) * 2**32).astype(np.uint64)
        value = (positions // _DIGIT**digit % _DIGIT).astype(jnp.uint32)
        turned += value[..., None] * unit.astype(np.uint32)
    signed = jax.lax.bitcast_convert_type(turned, jnp.int32).astype(jnp.float32)
    angle = signed * np.float32(2 * np.pi / 2**32)
    return jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]


def rotate(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Turns the pairs (i, i + D/2) of each head, as in Hugging Face's LLaMA.

    x: (B, T, H, D); returns the same shape and type, computed in float32.
    """
    cosine, sine = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = first * cosine - second * sine, second * cosine + first * sine
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
