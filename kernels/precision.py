"""Matrix products with operands of the inputs' type and wide sums."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

LOG2_E = math.log2(math.e)
"""Kernels compute exp(x) as exp2(LOG2_E * x)."""

MAX_SOFT_CAP = 1024.0
"""Of GPU kernels, whose tanh is off by up to 2⁻²⁰, and scores by that times the cap."""


class Scores(NamedTuple):
    """What becomes of a product q k: it is scaled, and then capped if there is a cap.

    soft_cap: scores s become soft_cap · tanh(s / soft_cap), if given.
    """

    scale: float
    soft_cap: float | None = None


def accumulator_type(dtype: jnp.dtype) -> jnp.dtype:
    """Returns the type of scores and sums: float32, or float64 for float64 operands."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def soft_capped(
    s: jax.Array, soft_cap: float | None
) -> tuple[jax.Array, jax.Array | float]:
    """Returns scores s as soft_cap · tanh(s / soft_cap), and the slope of that at s."""
    if soft_cap is None:
        return s, 1.0
    t = jnp.tanh(s / soft_cap)
    return soft_cap * t, 1 - jnp.square(t)


def exponent_factors(scores: Scores) -> tuple[float, float | None]:
    """Returns a GPU kernel's factor on scores, for exponents of 2, and within a tanh.

    Scores are q k where there is no soft cap, and tanh(the second factor · q k) else.
    """
    scale, soft_cap = scores
    if soft_cap is None:
        return scale * LOG2_E, None
    if not 1 / MAX_SOFT_CAP <= soft_cap <= MAX_SOFT_CAP:
        raise NotImplementedError(
            f"GPU kernels have soft caps from {1 / MAX_SOFT_CAP} to {MAX_SOFT_CAP}, "
            f"got {soft_cap}: name another implementation"
        )
    return soft_cap * LOG2_E, scale / soft_cap


def forward_factors(
    q: jax.Array, scores: Scores
) -> tuple[jax.Array, float, float | None]:
    """Returns q and `exponent_factors` of a kernel that takes maxima before it scales.

    The factor on scores is positive: q has its sign. Nor is it flushed to 0, which
    times -inf would be nan: the smallest normal number makes all weights equal too.
    """
    factor, tanh_scale = exponent_factors(scores)
    smallest = float(jnp.finfo(jnp.float32).smallest_normal)
    return -q if factor < 0 else q, max(abs(factor), smallest), tanh_scale


def product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Computes an einsum of two arrays of one type; sums and result are wider.

    float32 operands get true float32 products on every device.
    """
    return jnp.einsum(
        subscripts,
        a,
        b,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=accumulator_type(a.dtype),
    )
