"""A stack of decoder layers: attention and feed-forward, with norms around both.

Letters: B batch, T tokens (in any order: positions and masks come with them), E hidden
size, H query heads, K key/value heads, D head size, F feed-forward size, V vocabulary.
The attention itself is an argument of the model's call.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models.attention import Attend, Attention
from models.execution import Execution, Partition
from models.layers import FeedForward, RMSNorm
from models.rope import Rotation, rotations
from models.sizes import DecoderConfig
from models.stacks import through_stack


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); or norms after both."""

    def __init__(
        self,
        config: DecoderConfig,
        execution: Execution,
        partition: Partition,
        *,
        rngs: nnx.Rngs,
    ):
        def norm(place: str) -> RMSNorm | None:
            has_norm = config.norms in (place, "both")
            return RMSNorm(config, (config.hidden_size,)) if has_norm else None

        self.attention_norm = norm("before")
        self.attention = Attention(config, execution, partition, rngs=rngs)
        self.attention_post_norm = norm("after")
        self.feed_forward_norm = norm("before")
        self.feed_forward = FeedForward(
            config, partition, execution.feed_forward_chunk, rngs=rngs
        )
        self.feed_forward_post_norm = norm("after")

    def to_run(self, execution: Execution) -> "DecoderLayer":
        """Returns this layer after it is set to run as said, where layers differ."""
        self.attention.remat = execution.remat
        self.feed_forward.chunk = execution.feed_forward_chunk
        return self

    def __call__(self, x: jax.Array, rotation: Rotation, attend: Attend) -> jax.Array:
        """Returns the layer's output, (B, T, E), for x of the same shape."""
        x = checkpoint_name(x, "layer_input")
        return self._after(x, self.attention(x, self.attention_norm, rotation, attend))

    def with_cache(
        self,
        x: jax.Array,
        rotation: Rotation,
        attend: Callable[..., tuple[jax.Array, Any]],
    ) -> tuple[jax.Array, Any]:
        """Returns the same and a cache, which attend returns too; has no gradient.

        All heads are attended to at once.
        """
        module, weights = self.attention, self.attention.weights()
        normal = _normalised(self.attention_norm, x)
        q, k, v = module.project(normal, weights, rotation)
        out, cache = attend(q, k, v, **module.sink_logits(weights))  # (B, T, H, D)
        attended = module.biased(module.combine(out, weights))
        return self._after(x, attended), cache

    def _after(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """Returns the output of x (B, T, E) and what attention makes of it."""
        x = x + _normalised(self.attention_post_norm, attended)
        normal = _normalised(self.feed_forward_norm, x)
        return x + self.feed_forward(normal, self.feed_forward_post_norm)


def _normalised(norm: RMSNorm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)


class Decoder(nnx.Module):
    """Layers and the norm after them, from embeddings to hidden states.

    A model derives from it, and adds what comes before and after.
    """

    def __init__(
        self,
        config: DecoderConfig,
        execution: Execution,
        partition: Partition,
        *,
        rngs: nnx.Rngs,
    ):
        self.config, self.execution = config, execution
        self.partition = partition

        @nnx.vmap
        def stacked(key: jax.Array) -> DecoderLayer:
            return DecoderLayer(config, execution, partition, rngs=nnx.Rngs(key))

        self.layers = stacked(jax.random.split(rngs.params(), config.num_layers))
        self.norm = RMSNorm(config, (config.hidden_size,))

    def through_layers(
        self, x: jax.Array, positions: jax.Array, attend: Attend
    ) -> jax.Array:
        """Returns hidden states of embeddings x, (B, T, E) both, in the compute type.

        positions: int32 (B, T), in the order of x, any.
        """
        runs = self.execution.runs(self.config.num_layers)
        kinds = self.kinds(positions, attend)
        return self.norm(through_stack(self.layers, runs, kinds, x))

    def kinds(
        self, positions: jax.Array, attend: Callable
    ) -> list[tuple[Rotation, Callable]]:
        """Returns what the layers of each kind are called with, after x.

        The rotations of RoPE at these positions, int32 (B, T), and the attention.
        """
        config, made = self.config, {}
        for kind in config.kinds:
            rope = kind.rope_theta, kind.rope_scaling
            if rope not in made:
                made[rope] = rotations(positions, config.head_dim, *rope)
        return [
            (
                made[kind.rope_theta, kind.rope_scaling],
                functools.partial(attend, window=kind.window)
                if kind.window
                else attend,
            )
            for kind in config.kinds
        ]
