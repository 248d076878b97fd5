"""Choosing the next token from its logits."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Sampling:
    """Settings of drawing tokens.

    temperature: that logits are divided by; 0 for the likeliest token (greedy).
    top_k: draw among this many of the likeliest tokens only; 0 for all.
    top_p: and among the fewest of them that have this probability together (nucleus
      sampling, 1904.09751); 1 for all.
    allowed_tokens: ids from here on are never drawn, as where a vocabulary is padded;
      0, or more than the model has, for all of its own.

    Raises:
      ValueError: values out of these ranges.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    allowed_tokens: int = 0

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature={self.temperature} must be above 0, or 0 for the "
                "likeliest token each time"
            )
        if self.top_k < 0 or self.allowed_tokens < 0:
            raise ValueError(
                f"top_k={self.top_k} and allowed_tokens={self.allowed_tokens} must be "
                "numbers of tokens, or 0 for all"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p={self.top_p} must be a probability above 0, or 1 for all tokens"
            )


def row_keys(seed: jax.Array | int, rows: int) -> jax.Array:
    """Returns a random key for each row, (B,)."""
    return jax.vmap(jax.random.fold_in, (None, 0))(
        jax.random.key(seed), jnp.arange(rows)
    )


def sample(
    logits: jax.Array, keys: jax.Array, index: jax.Array, sampling: Sampling
) -> jax.Array:
    """Draws the next token of each row, int32 (B,).

    logits: (B, V) float32.
    keys: (B,), a random key of each row. index: int32 (B,), that the tokens will have:
      what is drawn depends on key, index and logits of the row, and on no other row.
    """
    ids = jnp.arange(logits.shape[-1])
    if sampling.allowed_tokens:
        logits = jnp.where(ids < sampling.allowed_tokens, logits, -jnp.inf)
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # In the order of their probability; a rank is drawn, and its token looked up.
    order = jnp.argsort(logits, axis=-1, descending=True)  # (B, V)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    ranked = (ranked - ranked[:, :1]) / sampling.temperature
    if sampling.top_k:
        ranked = jnp.where(ids < sampling.top_k, ranked, -jnp.inf)
    if sampling.top_p < 1:
        p = jax.nn.softmax(ranked, axis=-1)
        before = jnp.cumsum(p, axis=-1) - p
        ranked = jnp.where((before < sampling.top_p) | (ids == 0), ranked, -jnp.inf)
    keys = jax.vmap(jax.random.fold_in)(keys, index)
    rank = jax.vmap(jax.random.categorical)(keys, ranked)
    return jnp.take_along_axis(order, rank[:, None], axis=-1)[:, 0].astype(jnp.int32)
