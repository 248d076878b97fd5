"""Settings of a model's computation, and its interface to the mesh."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp

from models.remat import check_policy

Axes = tuple[str | None, ...]

RESIDUAL: Axes = ("batch", "sequence", None)
"""Names of the axes of hidden states, (B, T, E)."""


@dataclass(frozen=True)
class Execution:
    """Settings of speed and memory, which leave a model's function as it is.

    compute_dtype: of activations and matrix products; parameters are float32.
    remat: a name of `remat.REMAT_POLICIES`.
    feed_forward_chunk: tokens per device whose feed-forward exists at a time (blockwise
      parallel transformer, 2305.19370); 0 for all of them.
    attention_parts: head groups of a device; queries, keys, values and ring exist for
      one group at a time. 1 for all heads at once.
    loss_chunk: tokens per device whose logits exist at a time; 0 for all of them.
    last_layers: how the last layers run instead, which keep more, and how many.
    """

    compute_dtype: jnp.dtype
    remat: str
    feed_forward_chunk: int = 0
    attention_parts: int = 1
    loss_chunk: int = 0
    last_layers: "tuple[Execution, int] | None" = None

    def __post_init__(self):
        check_policy(self.remat)
        if self.feed_forward_chunk < 0:
            raise ValueError(
                f"feed_forward_chunk={self.feed_forward_chunk} must be a number of "
                "tokens, or 0 for all of them"
            )

    def __str__(self) -> str:
        text = f"remat {self.remat}, feed-forward {_tokens(self.feed_forward_chunk)}"
        if self.last_layers:
            last, layers = self.last_layers
            chunk = _tokens(last.feed_forward_chunk)
            text += f"; last {layers} layers {last.remat}, feed-forward {chunk}"
        return text + f"; logits {_tokens(self.loss_chunk)}" * (self.loss_chunk > 0)

    def runs(self, layers: int) -> "list[tuple[Execution, int]]":
        """Returns how these layers run, one run after the other, and their numbers."""
        last = [self.last_layers] if self.last_layers else []
        return [(self, layers - sum(count for _, count in last)), *last]


def _tokens(chunk: int) -> str:
    return f"of {chunk:,} tokens at a time" if chunk else "of all tokens"


class Partition(Protocol):
    """Places arrays on a mesh by the names of their axes; see `training.mesh`."""

    def spec(
        self, names: Axes, shape: tuple[int, ...]
    ) -> jax.sharding.PartitionSpec: ...

    def over_shards(
        self, function: Callable, names: Sequence[Axes], result_names: Axes
    ) -> Callable: ...

    def gather(
        self, shard: jax.Array, axis: int, size: int, dtype: jnp.dtype
    ) -> jax.Array: ...

    def vary(self, x: jax.Array, but: Sequence[str | None] = ()) -> jax.Array: ...

    def total(self, x: jax.Array, names: Sequence[str]) -> jax.Array: ...

    def largest(self, x: jax.Array, name: str) -> jax.Array: ...

    def shard_number(self, name: str) -> jax.Array: ...

    def shards(self, name: str) -> int: ...
