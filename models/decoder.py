"""A stack of decoder layers: attention and feed-forward, with norms around both.

Letters: B batch, T tokens (in any order: positions and masks come with them), E hidden
size, H query heads, K key/value heads, D head size, F feed-forward size, V vocabulary.
The attention itself is an argument of the model's call.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models.attention import Attend, Attention
from models.delta import DeltaNet, Mix
from models.layers import INITIAL_STDDEV, FeedForward, RMSNorm, matrix, through_stack
from models.memory import RESIDUAL, Execution, Partition
from models.rope import Rotation, rotations
from models.sizes import DecoderConfig, LanguageModelConfig


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); or norms after both.

    Its attention may be Gated DeltaNet, which is called alike.
    """

    def __init__(
        self,
        config: DecoderConfig,
        execution: Execution,
        partition: Partition,
        attention: type[Attention] | type[DeltaNet] = Attention,
        *,
        rngs: nnx.Rngs,
    ):
        def norm(place: str) -> RMSNorm | None:
            has_norm = config.norms in (place, "both")
            return RMSNorm(config, (config.hidden_size,)) if has_norm else None

        self.attention_norm = norm("before")
        self.attention = attention(config, execution, partition, rngs=rngs)
        self.attention_post_norm = norm("after")
        self.feed_forward_norm = norm("before")
        self.feed_forward = FeedForward(
            config, partition, execution.feed_forward_chunk, rngs=rngs
        )
        self.feed_forward_post_norm = norm("after")
        self.residual_scale = config.residual_scale

    def to_run(self, execution: Execution) -> "DecoderLayer":
        """Returns this layer after it is set to run as said, where layers differ."""
        self.attention.remat = execution.remat
        self.feed_forward.chunk = execution.feed_forward_chunk
        return self

    def __call__(self, x: jax.Array, place: Any, attend: Callable) -> jax.Array:
        """Returns the layer's output, (B, T, E), for x of the same shape.

        place: the tokens' rotation, or their positions for Gated DeltaNet.
        """
        x = checkpoint_name(x, "layer_input")
        return self._after(x, self.attention(x, self.attention_norm, place, attend))

    def with_cache(
        self, x: jax.Array, place: Any, attend: Callable[..., tuple[jax.Array, Any]]
    ) -> tuple[jax.Array, Any]:
        """Returns the same and a cache, which attend returns too; has no gradient.

        All heads are attended to at once.
        """
        normal = _normalised(self.attention_norm, x)
        attended, cache = self.attention.with_cache(normal, place, attend)
        return self._after(x, attended), cache

    def _after(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """Returns the output of x (B, T, E) and what attention makes of it."""
        scale = self.residual_scale
        x = x + _scaled(_normalised(self.attention_post_norm, attended), scale)
        normal = _normalised(self.feed_forward_norm, x)
        return x + _scaled(
            self.feed_forward(normal, self.feed_forward_post_norm), scale
        )


def _normalised(norm: RMSNorm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)


def _scaled(x: jax.Array, scale: float) -> jax.Array:
    return x if scale == 1 else x * scale


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

        def stacked(keys: jax.Array, attention: type) -> DecoderLayer:
            @nnx.scan(in_axes=0, out_axes=0)
            def stack(key: jax.Array) -> DecoderLayer:
                own = config, execution, partition, attention
                return DecoderLayer(*own, rngs=nnx.Rngs(key))

            return stack(keys)

        keys = jax.random.split(rngs.params(), config.num_layers)
        places = (np.array(config.numbers(is_delta)) for is_delta in (False, True))
        plain, delta = places
        self.layers = stacked(keys if not delta.size else keys[plain], Attention)
        self.delta_layers = stacked(keys[delta], DeltaNet) if delta.size else None
        self.norm = RMSNorm(config, (config.hidden_size,))

    def through_layers(
        self,
        x: jax.Array,
        positions: jax.Array,
        attend: Attend,
        mix: Mix | None = None,
    ) -> jax.Array:
        """Returns hidden states of embeddings x, (B, T, E) both, in the compute type.

        positions: int32 (B, T), in the order of x, any. mix: of Gated DeltaNet.
        """
        runs = self.execution.runs(self.config.num_layers)
        kinds = self.kinds(positions, attend, mix)
        more = self.delta_layers, self.turns
        return self.norm(through_stack(self.layers, runs, kinds, x, *more))

    @property
    def turns(self) -> tuple[int, ...]:
        """Returns 1 for each kind of layers that are Gated DeltaNet, else 0."""
        return tuple(int(kind.is_delta) for kind in self.config.kinds)

    def kinds(
        self, positions: jax.Array, attend: Callable, mix: Callable | None
    ) -> list[tuple[Rotation | jax.Array | None, Callable | None]]:
        """Returns what the layers of each kind are called with, after x.

        The rotations of RoPE at these positions, int32 (B, T), and the attention; the
        positions and the mixing for Gated DeltaNet.
        """
        kinds, depth = self.config.kinds, self.config.rotary_dim
        ropes = dict.fromkeys(kind.rope for kind in kinds)
        made = {rope: rope and rotations(positions, depth, *rope) for rope in ropes}

        def attend_within(window: int) -> Callable:
            return functools.partial(attend, window=window) if window else attend

        return [
            (positions, mix)
            if kind.is_delta
            else (made[kind.rope], attend_within(kind.window))
            for kind in kinds
        ]


class LanguageModel(Decoder):
    """Decoder from tokens to the hidden states that the head turns into logits."""

    HEAD_AXES = ("embed", "vocab")

    def __init__(
        self,
        config: LanguageModelConfig,
        execution: Execution,
        partition: Partition,
        *,
        rngs: nnx.Rngs,
    ):
        vocab, embed = config.vocab_size, config.hidden_size
        table_axes = ("vocab", "embed")
        self.embedding = matrix(rngs, (vocab, embed), table_axes, INITIAL_STDDEV)
        super().__init__(config, execution, partition, rngs=rngs)
        if config.tied_embeddings:
            self.head = None
        else:
            self.head = matrix(rngs, (embed, vocab), self.HEAD_AXES, INITIAL_STDDEV)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        attend: Attend,
        mix: Mix | None = None,
    ) -> jax.Array:
        """Returns hidden states (B, T, E) in the compute type.

        tokens, positions: int32 (B, T), in one order, any; with Gated DeltaNet, `mix`
        knows the order.
        """
        return self.through_layers(self.embed(tokens), positions, attend, mix)

    def head_weight(self) -> jax.Array:
        """Returns the head, (E, V) float32; the embedding's transpose if tied."""
        return self.embedding[...].T if self.head is None else self.head[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Returns logits of the next token, (B, m, V) float32, of hidden (B, m, E).

        In a `StationaryPartition`, as the head is not gathered.
        """
        names, result = (RESIDUAL, self.HEAD_AXES), (*RESIDUAL[:2], "vocab")
        call = self.partition.over_shards(self.config.logits, names, result)
        return call(hidden, self.head_weight())

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Looks up the tokens, int32 (B, T): (B, T, E) in the compute type."""
        partition, embed = self.partition, self.config.hidden_size
        dtype = self.execution.compute_dtype

        def local(tokens: jax.Array, table: jax.Array) -> jax.Array:
            whole = partition.gather(table, 1, embed, dtype)  # (V / shards, E)
            # The vocabulary may be sharded: each shard gives the tokens that it has.
            place = partition.vary(tokens)
            place -= partition.shard_number("vocab") * whole.shape[0]
            mine = (place >= 0) & (place < whole.shape[0])
            rows = jnp.take(whole, jnp.where(mine, place, 0), axis=0)  # (b, t, E)
            return partition.total(jnp.where(mine[..., None], rows, 0), ("vocab",))

        names = ("batch", "sequence"), self.embedding.axes
        rows = partition.over_shards(local, names, RESIDUAL)(
            tokens, self.embedding[...]
        )
        return _scaled(rows.astype(dtype), self.config.embedding_scale)
