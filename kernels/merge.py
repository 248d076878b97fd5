"""Joining partial attention results over disjoint sets of keys.

A partial result is `(out, lse)`: the softmax average over some keys, and the natural
logarithm of the sum of exponentials that it was divided by. Two of them give the
result over both sets exactly (Ring Attention's running max and sum in another form):

    out = out₁ - σ(lse₂ - lse₁) · (out₁ - out₂)
    lse = lse₁ - log σ(lse₁ - lse₂)

A row that has seen nothing has out = 0 and lse = -inf, and changes nothing.
"""

import jax
import jax.numpy as jnp

Partial = tuple[jax.Array, jax.Array]


def merge(first: Partial, second: Partial) -> Partial:
    """Merges two partial results of the same queries.

    first, second: (out (B, T, H, D), lse (B, H, T)), both float32.
    """
    (out1, lse1), (out2, lse2) = first, second
    # Two empty rows differ by nan; any finite number does, as the outputs are equal.
    gap = jnp.where(lse1 == lse2, 0, lse2 - lse1)
    weight = jnp.swapaxes(jax.nn.sigmoid(gap), 1, 2)[..., None]  # (B, T, H, 1)
    return out1 - weight * (out1 - out2), jnp.logaddexp(lse1, lse2)
