"""Rotary position embedding (RoFormer, 2104.09864), exact at any position.

Positions come with the data, so packed and permuted tokens need nothing special.
"""

import jax
import jax.numpy as jnp
import numpy as np

_DIGIT = 1024
"""Positions are split into digits of this base: see `rotations`."""


def rotations(
    positions: jax.Array, head_dim: int, theta: float
) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every token's angles, (B, T, 1, D / 2) float32.

    positions: int32 (B, T), below 2³⁰.
    head_dim: D, even.
    theta: base of the geometric series of frequencies.

    A float32 product position · frequency is off by 0.03 radians at a million tokens.
    Here the position is split into digits in base 1024; the turn of each digit's unit
    is reduced below 2π in float64 when the program is made, and no float32 angle
    exceeds 1024 · 2π: the error stays below 10⁻³ radians at any position.
    """
    if head_dim % 2:
        raise ValueError(f"RoPE turns pairs: {head_dim=} must be even")
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    angle = jnp.zeros((*positions.shape, head_dim // 2), jnp.float32)
    for digit in range(3):
        unit = np.float64(_DIGIT**digit)
        turn = np.remainder(unit * frequencies, 2 * np.pi).astype(np.float32)
        value = positions // _DIGIT**digit % _DIGIT
        part = value[..., None].astype(jnp.float32) * turn
        angle = angle + jnp.remainder(part, np.float32(2 * np.pi))
    return jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]


def rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns the pairs (i, i + D/2) of each head, as in Hugging Face's LLaMA.

    x: (B, T, H, D); returns the same shape and type, computed in float32.
    """
    cosine, sine = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = first * cosine - second * sine, second * cosine + first * sine
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
