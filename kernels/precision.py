"""Matrix products with operands of the inputs' type and wide sums."""

import jax
import jax.numpy as jnp


def accumulator_type(dtype: jnp.dtype) -> jnp.dtype:
    """The type of scores and sums: float32, or float64 for float64 operands."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def gradient_factors(scale: float, dtype: jnp.dtype) -> tuple[float, float]:
    """By what gradients of scores are multiplied before they are rounded, and after.

    The scale is one of the two: the latter in float16, whose small numbers have few
    digits, and where it is too small or too large for those of float32.
    """
    is_ordinary = scale == 0 or 2.0**-64 <= abs(scale) <= 2.0**64
    return (scale, 1.0) if is_ordinary and dtype != jnp.float16 else (1.0, scale)


def product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """An einsum of two arrays of one type that adds up, and answers, in a wide type.

    float32 operands get true float32 products on every device.
    """
    return jnp.einsum(
        subscripts,
        a,
        b,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=accumulator_type(a.dtype),
    )
