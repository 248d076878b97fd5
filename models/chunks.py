"""How many of a device's tokens layers work on at a time, and loops over chunks."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from models.sizes import DecoderConfig

MEMORY_SHARE = 1 / 16
"""Share of a device's memory that the arrays of a chunk take at most.

In long contexts they do not raise the peak of a step: the backward of attention holds
more than 8 float32 arrays of all hidden states, when those of chunks are gone. With a
hidden size of 4096 and 32 GiB these are more from 16 Ki tokens of a device on.
"""

TRAFFIC_SHARE = 1 / 8
"""Time in which the weights of a chunk move, over that of its products, by peaks."""

FLOPS_PER_BYTE = 8 / 14
"""Of a weight, for each token of a chunk and each byte moved for all of them.

Its product is computed twice, and has two in the backward; its float32 gradient is read
and written once, the weight itself read three times in 2 bytes.
"""

MODEST_CHUNK = 1024
"""Tokens of a chunk at most on a device whose memory and rates are not known."""


@dataclass(frozen=True)
class Device:
    """Memory in bytes, and FLOPs that take as long as moving a byte to or from it."""

    memory: float
    flops_per_byte: float


def feed_forward_bytes(sizes: DecoderConfig, itemsize: int) -> int:
    """Returns the bytes of a token's wide arrays in a feed-forward's backward.

    Gate, up, their product, and the gradients of the three. Of experts one of each for
    every one that the token takes, and rows of its hidden states in and out. The most
    of layers with experts and without.
    """
    width = 6 * sizes.feed_forward_size
    if sizes.experts:
        width = sizes.experts_per_token * (width + 4 * sizes.hidden_size)
    return max(width, 6 * sizes.dense_feed_forward_size) * itemsize


def choose_chunk(
    tokens: int, token_bytes: int, device: Device | None, weights: float = 1.0
) -> int:
    """Chooses how many of a device's tokens to work on at a time; at most all.

    As many as make the traffic of the weights' gradient small, which is rewritten for
    each chunk; fewer where they would take too much memory. A divisor of the tokens
    that is more than half of that, if there is one: then no chunk has padding.

    token_bytes: of the wide arrays of a token, and of their gradients.
    device: None where it is not known.
    weights: how many times those that a token is multiplied with are moved.
    """
    if device is None:
        most = MODEST_CHUNK
    else:
        enough = weights * device.flops_per_byte / (TRAFFIC_SHARE * FLOPS_PER_BYTE)
        enough = 2 ** math.ceil(math.log2(enough))
        held = int(MEMORY_SHARE * device.memory / token_bytes)
        most = max(1, min(enough, held))
    if most >= tokens:
        return max(1, tokens)
    return next((n for n in range(most, most // 2, -1) if tokens % n == 0), most)


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
        """Cuts x (tokens, …) into chunks, with zeros at the end: (chunks, chunk, …)."""
        widths = [(0, chunks * chunk - count)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, widths).reshape(chunks, chunk, *x.shape[1:])

    body = jax.checkpoint(function, prevent_cse=False)

    def step(_: None, part: jax.Array | tuple[jax.Array, ...]) -> tuple[None, Any]:
        return None, body(part)

    _, results = lax.scan(step, None, jax.tree.map(split, tokens))
    return results.reshape(-1, *results.shape[2:])[:count]
