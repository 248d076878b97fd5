"""A decoder of tokens, as LLaMA (2302.13971) and its kin; `sizes` says what differs."""

import jax
import jax.numpy as jnp
from flax import nnx

from models.attention import Attend
from models.decoder import Decoder
from models.execution import RESIDUAL, Execution, Partition
from models.layers import INITIAL_STDDEV, matrix
from models.sizes import LanguageModelConfig


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
        self, tokens: jax.Array, positions: jax.Array, attend: Attend
    ) -> jax.Array:
        """Returns hidden states (B, T, E) in the compute type.

        tokens, positions: int32 (B, T), in one order, any.
        """
        return self.through_layers(self.embed(tokens), positions, attend)

    def head_weight(self) -> jax.Array:
        """Returns the head, (E, V) float32; the embedding's transpose if tied."""
        return self.embedding[...].T if self.head is None else self.head[...]

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
        rows = rows.astype(dtype)
        scale = self.config.embedding_scale
        return rows if scale == 1 else rows * scale
