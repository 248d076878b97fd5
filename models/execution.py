"""How a model is computed."""

from dataclasses import dataclass

import jax.numpy as jnp

from models.remat import check_policy


@dataclass(frozen=True)
class Execution:
    """How a model is computed: its speed and memory, not its function.

    compute_dtype: of activations and matrix products; parameters are float32.
    remat: a name of `remat.REMAT_POLICIES`.
    feed_forward_chunk: tokens per device whose feed-forward exists at a time (blockwise
      parallel transformer, 2305.19370); 0 for all of them.
    attention_parts: shares of a device's heads whose queries, keys, values and ring
      exist at a time, one share after the other; 1 for all heads at once.
    """

    compute_dtype: jnp.dtype
    remat: str
    feed_forward_chunk: int = 0
    attention_parts: int = 1

    def __post_init__(self):
        check_policy(self.remat)
        if self.feed_forward_chunk < 0:
            raise ValueError(
                f"feed_forward_chunk={self.feed_forward_chunk} must be a number of "
                "tokens, or 0 for all of them"
            )
