"""LLaMA (2302.13971): RMSNorm, rotary positions, SwiGLU, grouped key/value heads.

Letters: B batch, T tokens (in any order: positions and masks come with them), E hidden
size, H query heads, K key/value heads, D head size, F feed-forward size, V vocabulary.
The attention itself is an argument of the model's call.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models.chunks import scan_chunks
from models.execution import Execution, Partition
from models.remat import remat_attention, remat_projection
from models.rope import RopeScaling, Rotation, rotate, rotations
from models.stacks import through_stack

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Maps q (B, T, H, D), k and v (B, T, K, D) to attention outputs (B, T, H, D)."""

RESIDUAL = ("batch", "sequence", None)
INITIAL_STDDEV = 0.02


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a stack of decoder layers."""

    hidden_size: int
    feed_forward_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-6
    rope_scaling: RopeScaling = RopeScaling()

    def __post_init__(self):
        names = [size.name for size in fields(self) if size.type is int]
        sizes = {name: getattr(self, name) for name in names}
        wrong = [f"{n}={size}" for n, size in sizes.items() if not 0 < size < 1 << 31]
        must = "model sizes must be at least 1, and below 2^31"
        found = [f"{must}: {', '.join(wrong)}"] if wrong else []
        if self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads:
            found.append(
                f"num_heads={self.num_heads} must be a multiple of "
                f"num_kv_heads={self.num_kv_heads}: query heads share key/value heads "
                "evenly"
            )
        if self.head_dim % 2:
            found.append(f"head_dim={self.head_dim} must be even: RoPE rotates pairs")
        for name in ("rope_theta", "norm_epsilon"):
            if not 0 < getattr(self, name) < math.inf:
                found.append(f"{name}={getattr(self, name)} must be a number above 0")
        if found:
            raise ValueError("; ".join(found))


@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    """Sizes of a model; together with the parameters they are the model."""

    vocab_size: int = field(kw_only=True)


def matrix(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple, stddev: float
) -> nnx.Param:
    """Draws a parameter of normal random numbers, whose axes have names."""
    values = stddev * jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(values, axes=axes)


class RMSNorm(nnx.Module):
    """Root mean square layer normalisation (1910.07467)."""

    def __init__(self, size: int, epsilon: float):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32), axes=(None,))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises x (B, T, E) in float32; returns its shape and type."""
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)  # (B, T, 1)
        normal = wide * jax.lax.rsqrt(mean_square + self.epsilon)
        return (normal * self.scale[...]).astype(x.dtype)


class Attention(nnx.Module):
    """Projections and rotary embedding around an attention that is passed in.

    The heads are attended to in groups, one after the other: queries, keys, values and
    what the ring holds exist for one head group at a time.
    """

    def __init__(
        self,
        config: DecoderConfig,
        execution: Execution,
        partition: Partition,
        *,
        rngs: nnx.Rngs,
    ):
        """Raises ValueError if a device's heads do not divide into the groups."""
        embed, depth = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_heads, config.num_kv_heads
        into, into_kv = ("embed", "heads", None), ("embed", "kv_heads", None)
        out_stddev = INITIAL_STDDEV * (2 * config.num_layers) ** -0.5
        self.query = matrix(rngs, (embed, heads, depth), into, INITIAL_STDDEV)
        self.key = matrix(rngs, (embed, kv_heads, depth), into_kv, INITIAL_STDDEV)
        self.value = matrix(rngs, (embed, kv_heads, depth), into_kv, INITIAL_STDDEV)
        out_axes = ("heads", None, "embed")
        self.output = matrix(rngs, (heads, depth, embed), out_axes, out_stddev)
        self.partition, self.remat = partition, execution.remat
        self.groups = parts = execution.attention_parts
        local = kv_heads // partition.shards("kv_heads")
        if parts < 1 or local % parts:
            raise ValueError(
                f"attention_{parts=} must divide the {local} key/value heads of a "
                "device: choose a divisor of them"
            )

    def __call__(
        self, x: jax.Array, norm: RMSNorm, rotation: Rotation, attend: Attend
    ) -> jax.Array:
        """Returns the attention of norm(x), projected back: (B, T, E), as x.

        norm: computed here, as remat_projection recomputes it.
        """
        weights = self.query, self.key, self.value, self.output

        def project(x: jax.Array, weights: tuple[jax.Array, ...]) -> tuple:
            return self.project(norm(x), weights, rotation)

        def head_group(x: jax.Array, weights: tuple[jax.Array, ...]) -> jax.Array:
            *into, output = weights  # (E, h, D), (E, k, D), (E, k, D); (h, D, E)
            q, k, v = remat_projection(project, self.remat)(x, tuple(into))
            out = attend(q, k, v)  # (B, T, h, D)
            return self.combine(out, output)  # (B, T, E)

        head_group = remat_attention(head_group, self.remat)
        if self.groups == 1:
            return head_group(x, tuple(weight[...] for weight in weights))

        def add(total: jax.Array, group: tuple) -> tuple[jax.Array, None]:
            return total + head_group(x, group).astype(total.dtype), None

        total = jnp.zeros(x.shape, jnp.float32)  # (B, T, E)
        return jax.lax.scan(add, total, self._grouped(weights))[0].astype(x.dtype)

    def project(
        self, x: jax.Array, weights: tuple[jax.Array, ...], rotation: Rotation
    ) -> tuple[jax.Array, ...]:
        """Returns q (B, T, h, D), k and v (B, T, k, D) of x (B, T, E).

        weights: of the queries (E, h, D), keys and values (E, k, D) of a head group.
        """
        query, key, value = weights
        q = rotate(self._into_heads(x, query, "heads"), rotation)  # (B, T, h, D)
        k = rotate(self._into_heads(x, key, "kv_heads"), rotation)  # (B, T, k, D)
        return q, k, self._into_heads(x, value, "kv_heads")

    def combine(self, out: jax.Array, weight: jax.Array) -> jax.Array:
        """Sums heads' results (B, T, h, D) with their weight (h, D, E): (B, T, E)."""
        partition, embed = self.partition, weight[...].shape[-1]

        def local(out: jax.Array, weight: jax.Array) -> jax.Array:
            weight = partition.gather(weight, 2, embed, out.dtype)  # (h, D, E)
            weight = weight.astype(out.dtype)
            y = jnp.einsum("bthd,hde->bte", partition.vary(out), weight)
            return partition.total(y, ("heads",))  # (b, t, E)

        names = ("batch", "sequence", "heads", None), self.output.axes
        return partition.over_shards(local, names, RESIDUAL)(out, weight)

    def _into_heads(self, x: jax.Array, weight: jax.Array, heads: str) -> jax.Array:
        """Projects x (B, T, E) with weight (E, h, D): (B, T, h, D)."""
        partition, embed = self.partition, x.shape[-1]

        def local(x: jax.Array, weight: jax.Array) -> jax.Array:
            weight = partition.gather(weight, 0, embed, x.dtype)  # (E, h, D)
            weight = weight.astype(x.dtype)
            return jnp.einsum("bte,ehd->bthd", partition.vary(x), weight)

        result = ("batch", "sequence", heads, None)
        names = RESIDUAL, ("embed", heads, None)
        return partition.over_shards(local, names, result)(x, weight)

    def _grouped(self, weights: tuple[nnx.Param, ...]) -> tuple[jax.Array, ...]:
        """Returns the weights by head group: (groups, …, heads / groups, …) each.

        A group has as many heads of every device.
        """
        shards = self.partition.shards("heads")

        def grouped(weight: nnx.Param) -> jax.Array:
            axis = next(i for i, name in enumerate(weight.axes) if "heads" in str(name))
            before, after = weight[...].shape[:axis], weight[...].shape[axis + 1 :]
            heads = weight[...].shape[axis] // shards // self.groups
            x = weight[...].reshape(*before, shards, self.groups, heads, *after)
            x = jnp.moveaxis(x, axis + 1, 0)  # (groups, …, shards, heads, …)
            return x.reshape(self.groups, *before, shards * heads, *after)

        return tuple(grouped(weight) for weight in weights)


class FeedForward(nnx.Module):
    """SwiGLU (2002.05202), a chunk of the local tokens at a time."""

    def __init__(
        self,
        config: DecoderConfig,
        partition: Partition,
        chunk: int,
        *,
        rngs: nnx.Rngs,
    ):
        embed, wide = config.hidden_size, config.feed_forward_size
        out_stddev = INITIAL_STDDEV * (2 * config.num_layers) ** -0.5
        self.gate = matrix(rngs, (embed, wide), ("embed", "mlp"), INITIAL_STDDEV)
        self.up = matrix(rngs, (embed, wide), ("embed", "mlp"), INITIAL_STDDEV)
        self.down = matrix(rngs, (wide, embed), ("mlp", "embed"), out_stddev)
        self.partition, self.chunk = partition, chunk

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns what the feed-forward adds to x: (B, T, E), as x."""
        partition, embed = self.partition, x.shape[-1]

        def local(
            x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array
        ) -> jax.Array:
            gate, up = (partition.gather(w, 0, embed, x.dtype) for w in (gate, up))
            down = partition.gather(down, 1, embed, x.dtype)
            tokens = partition.vary(x).reshape(-1, embed)  # (b · t, E)

            def swiglu(tokens: jax.Array) -> jax.Array:
                # Cast here, so that the chunks' gradients add up in float32.
                wide = jax.nn.silu(tokens @ gate.astype(x.dtype))  # (tokens, F)
                wide *= tokens @ up.astype(x.dtype)
                return wide @ down.astype(x.dtype)  # (tokens, E)

            y = scan_chunks(swiglu, tokens, self.chunk or len(tokens))
            return partition.total(y.reshape(x.shape), ("mlp",))

        weights = self.gate, self.up, self.down
        names = RESIDUAL, *(weight.axes for weight in weights)
        shards = partition.over_shards(local, names, RESIDUAL)
        return shards(x, *(weight[...] for weight in weights))


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(
        self,
        config: DecoderConfig,
        execution: Execution,
        partition: Partition,
        *,
        rngs: nnx.Rngs,
    ):
        embed, epsilon = config.hidden_size, config.norm_epsilon
        self.attention_norm = RMSNorm(embed, epsilon)
        self.attention = Attention(config, execution, partition, rngs=rngs)
        self.feed_forward_norm = RMSNorm(embed, epsilon)
        self.feed_forward = FeedForward(
            config, partition, execution.feed_forward_chunk, rngs=rngs
        )

    def to_run(self, execution: Execution) -> "DecoderLayer":
        """Returns this layer after it is set to run as said, where layers differ."""
        self.attention.remat = execution.remat
        self.feed_forward.chunk = execution.feed_forward_chunk
        return self

    def __call__(self, x: jax.Array, rotation: Rotation, attend: Attend) -> jax.Array:
        """Returns the layer's output, (B, T, E), for x of the same shape."""
        x = checkpoint_name(x, "layer_input")
        x = x + self.attention(x, self.attention_norm, rotation, attend)
        return x + self.feed_forward(self.feed_forward_norm(x))

    def with_cache(
        self,
        x: jax.Array,
        rotation: Rotation,
        attend: Callable[..., tuple[jax.Array, Any]],
    ) -> tuple[jax.Array, Any]:
        """Returns the same and a cache, which attend returns too; has no gradient.

        All heads are attended to at once.
        """
        module = self.attention
        weights = module.query[...], module.key[...], module.value[...]
        q, k, v = module.project(self.attention_norm(x), weights, rotation)
        out, cache = attend(q, k, v)  # (B, T, H, D)
        x = x + module.combine(out, module.output[...])
        return x + self.feed_forward(self.feed_forward_norm(x)), cache


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
        self.norm = RMSNorm(config.hidden_size, config.norm_epsilon)

    def through_layers(
        self, x: jax.Array, positions: jax.Array, attend: Attend
    ) -> jax.Array:
        """Returns hidden states of embeddings x, (B, T, E) both, in the compute type.

        positions: int32 (B, T), in the order of x, any.
        """
        rotation = self.rotation(positions)
        runs = self.execution.runs(self.config.num_layers)
        x = through_stack(self.layers, runs, x, rotation, attend)
        return self.norm(x)

    def rotation(self, positions: jax.Array) -> Rotation:
        """Returns the rotations of RoPE at these positions, int32 (B, T)."""
        config = self.config
        return rotations(
            positions, config.head_dim, config.rope_theta, config.rope_scaling
        )


class Llama(Decoder):
    """Decoder from tokens to the hidden states that the head turns into logits."""

    def __init__(
        self,
        config: LlamaConfig,
        execution: Execution,
        partition: Partition,
        *,
        rngs: nnx.Rngs,
    ):
        vocab, embed = config.vocab_size, config.hidden_size
        table_axes = ("vocab", "embed")
        self.embedding = matrix(rngs, (vocab, embed), table_axes, INITIAL_STDDEV)
        super().__init__(config, execution, partition, rngs=rngs)
        self.head = matrix(rngs, (embed, vocab), ("embed", "vocab"), INITIAL_STDDEV)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, attend: Attend
    ) -> jax.Array:
        """Returns hidden states (B, T, E) in the compute type.

        tokens, positions: int32 (B, T), in one order, any.
        """
        return self.through_layers(self.embed(tokens), positions, attend)

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
        return rows.astype(dtype)
