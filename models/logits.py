"""Logits of hidden states."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Logits:
    """What is done to the products of hidden states and the head.

    scale: factor on them.
    soft_cap: then, logits z become soft_cap · tanh(z / soft_cap); 0 for none.
    """

    scale: float = 1.0
    soft_cap: float = 0.0

    def __call__(self, hidden: jax.Array, head: jax.Array) -> jax.Array:
        """Returns logits (…, V) float32 of hidden (…, E) and head (E, V)."""
        # Cast here, and not outside of a loop over chunks of tokens: their gradients
        # for the head then add up in its own float32, and not in bfloat16.
        head = head.astype(hidden.dtype)
        z = jnp.dot(hidden, head, preferred_element_type=jnp.float32)
        if self.scale != 1:
            z *= self.scale
        return self.soft_cap * jnp.tanh(z / self.soft_cap) if self.soft_cap else z


PLAIN = Logits()
"""The products themselves."""
