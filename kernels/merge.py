"""Joining partial attention results over disjoint sets of keys.

A partial result is `(out, lse)`: the softmax average over some keys, and the natural
logarithm of the sum of exponentials that it was divided by. Two of them give the
result over both sets exactly (Ring Attention's running max and sum in another form):

    out = σ(lse₁ - lse₂) · out₁ + σ(lse₂ - lse₁) · out₂
    lse = lse₁ - log σ(lse₁ - lse₂)

A row without visible keys has out = 0 and lse = -inf, and changes nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp

Partial = tuple[jax.Array, jax.Array]


def merge(first: Partial, second: Partial) -> Partial:
    """Merges two partial results of the same queries.

    first, second: (out (B, T, H, D), lse (B, H, T)), both float32.
    """
    out1, lse1 = first
    out2, lse2 = second
    # Two empty rows would differ by nan, in the gradient too: any finite number does.
    empty = jnp.maximum(lse1, lse2) == -jnp.inf
    lse1 = jnp.where(empty, 0, lse1)
    lse2 = jnp.where(empty, 0, lse2)
    out = _weight(lse1 - lse2) * out1 + _weight(lse2 - lse1) * out2
    return out, jnp.where(empty, -jnp.inf, jnp.logaddexp(lse1, lse2))


def _weight(gap: jax.Array) -> jax.Array:
    """Returns the sigmoid of (B, H, T), as (B, T, H, 1)."""
    return jnp.swapaxes(jax.nn.sigmoid(gap), 1, 2)[..., None]


def added(sums: Any, gradients: Any) -> Any:
    """Adds gradients to those so far, if any: dk and dv, or any two trees alike."""
    # Without sums nothing is added: zeros would be written, and read.
    return jax.tree.map(jnp.add, sums, gradients) if sums else gradients


def merge_over(axis_name: str | tuple[str, ...], partial: Partial) -> Partial:
    """Merges the partial results of the devices along mesh axes; all get the result.

    partial: this device's, as in `merge`; inside `shard_map`. Not differentiable.
    """
    out, lse = partial
    highest = jax.lax.pmax(lse, axis_name)
    # Where no device has visible keys, any finite number keeps the weights from nan.
    highest = jnp.where(highest == -jnp.inf, 0, highest)
    weight = jnp.exp(lse - highest)
    total = jax.lax.psum(weight, axis_name)
    share = weight / jnp.where(total == 0, 1, total)
    share = jnp.swapaxes(share, 1, 2)[..., None]  # (B, H, T) -> (B, T, H, 1)
    return jax.lax.psum(share * out, axis_name), jnp.log(total) + highest
