"""Work on a few tokens at a time, so that nothing wide is held for all of them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def scan_chunks(
    function: Callable, tokens: jax.Array | tuple[jax.Array, ...], chunk: int
) -> jax.Array:
    """Maps `function` over chunks of tokens, recomputed in the backward if several.

    function: from arrays (chunk, …) to an array (chunk, …); finite at zero, as are its
      gradients.
    tokens: arrays whose first axis counts tokens, padded with zeros where the chunk
      does not divide it; the padding's results are cut off.

    Returns:
      The results of all tokens, (tokens, …).
    """
    count = jax.tree.leaves(tokens)[0].shape[0]
    if chunk >= count:
        return function(tokens)
    chunks = -(-count // chunk)

    def split(x: jax.Array) -> jax.Array:
        widths = [(0, chunks * chunk - count)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, widths).reshape(chunks, chunk, *x.shape[1:])

    body = jax.checkpoint(function, prevent_cse=False)
    _, results = lax.scan(
        lambda _, x: (None, body(x)), None, jax.tree.map(split, tokens)
    )
    return results.reshape(-1, *results.shape[2:])[:count]
