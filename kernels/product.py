"""Matrix products with operands of the inputs' type and wide sums."""

import jax
import jax.numpy as jnp


def accumulator_type(dtype: jnp.dtype) -> jnp.dtype:
    """The type of scores and sums: float32, or float64 for float64 operands."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


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
