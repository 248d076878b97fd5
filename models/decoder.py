"""A stack of decoder layers: attention and feed-forward, with norms around both.

Letters: B batch, T tokens (in any order: positions and masks come with them), E hidden
size, H query heads, K key/value heads, D head size, F feed-forward size, V vocabulary.
The attention itself is an argument of the model's call.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models.attention import Attend, Attention
from models.delta import DeltaNet, Mix
from models.experts import Experts
from models.layers import INITIAL_STDDEV, FeedForward, RMSNorm, matrix, through_stack
from models.memory import RESIDUAL, Execution, Partition
from models.rope import Rope, Rotation, rotations
from models.sizes import DecoderConfig, LanguageModelConfig


class AttentionInputs[Result](NamedTuple):
    """What layers with attention of one kind are called with, beside x.

    rotation: RoPE at the tokens' positions; None in layers without it.
    attend: see `Attend`, with the layers' window. Returns the heads' results; with a
      cache, these and the cache.
    """

    rotation: Rotation | None
    attend: Callable[..., Result]

    def with_options(self, **options: object) -> Self:
        """Returns the same with further keyword arguments of `attend`."""
        return self._replace(attend=functools.partial(self.attend, **options))


class DeltaInputs[Result](NamedTuple):
    """What layers with Gated DeltaNet are called with, beside x.

    positions: int32 (B, T), in the tokens' documents.
    mix: see `Mix`. Returns the heads' results; with a cache, these and the cache.
    """

    positions: jax.Array
    mix: Callable[..., Result]

    def with_options(self, **options: object) -> Self:
        """Returns the same with further keyword arguments of `mix`."""
        return self._replace(mix=functools.partial(self.mix, **options))


class Stream(NamedTuple):
    """What passes through the layers.

    x: (B, T, E). loads: float32 (2,), sums over the layers so far of what `Experts`
      says of their loads; None in models without experts.
    """

    x: jax.Array
    loads: jax.Array | None

    def after(self, x: jax.Array, loads: jax.Array | None) -> "Stream":
        """Returns what leaves a layer, from its results."""
        if self.loads is None or loads is None:
            return self._replace(x=x)
        return Stream(x, self.loads + loads)


class DecoderLayer[Heads: (Attention, DeltaNet)](nnx.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); or norms after both."""

    def __init__(
        self,
        config: DecoderConfig,
        execution: Execution,
        partition: Partition,
        heads: type[Heads],
        *,
        rngs: nnx.Rngs,
    ):
        """Makes a layer whose `attention` is a module of class `heads`."""
        self.attention_norm = _norm(config, "before")
        self.attention: Heads = heads(config, execution, partition, rngs=rngs)
        self.attention_post_norm = _norm(config, "after")
        self.feed_forward_norm = _norm(config, "before")
        make = Experts if config.experts else FeedForward
        self.feed_forward: FeedForward | Experts = make(
            config, partition, execution.feed_forward_chunk, rngs=rngs
        )
        self.feed_forward_post_norm = _norm(config, "after")
        self.residual_scale = config.residual_scale

    def to_run(self, execution: Execution) -> Self:
        """Returns this layer after it is set to run as said, where layers differ."""
        self.attention.remat = execution.remat
        self.feed_forward.chunk = execution.feed_forward_chunk
        return self

    def _after(
        self, x: jax.Array, attended: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns the output of x (B, T, E) and of what attention makes of it.

        And the loads of the experts; None without any.
        """
        scale = self.residual_scale
        x = x + _scaled(_normalised(self.attention_post_norm, attended), scale)
        normal = _normalised(self.feed_forward_norm, x)
        added = self.feed_forward(normal, self.feed_forward_post_norm)
        if isinstance(added, tuple):
            added, loads = added
            return x + _scaled(added, scale), loads
        return x + _scaled(added, scale), None


class AttentionLayer(DecoderLayer[Attention]):
    """A decoder layer with attention."""

    def __call__(self, stream: Stream, inputs: AttentionInputs[jax.Array]) -> Stream:
        """Returns what leaves the layer."""
        x = checkpoint_name(stream.x, "layer_input")
        attended = self.attention(
            x, self.attention_norm, inputs.rotation, inputs.attend
        )
        return stream.after(*self._after(x, attended))

    def with_cache[Cache](
        self, x: jax.Array, inputs: AttentionInputs[tuple[jax.Array, Cache]]
    ) -> tuple[jax.Array, Cache]:
        """Returns the output of x (B, T, E) and the cache; has no gradient.

        All heads are attended to at once.
        """
        normal = _normalised(self.attention_norm, x)
        attended, cache = self.attention.with_cache(
            normal, inputs.rotation, inputs.attend
        )
        return self._after(x, attended)[0], cache


class DeltaLayer(DecoderLayer[DeltaNet]):
    """A decoder layer with Gated DeltaNet in the place of attention."""

    def __call__(self, stream: Stream, inputs: DeltaInputs[jax.Array]) -> Stream:
        """Returns what leaves the layer."""
        x = checkpoint_name(stream.x, "layer_input")
        normal = _normalised(self.attention_norm, x)
        mixed = self.attention(normal, inputs.positions, inputs.mix)
        return stream.after(*self._after(x, mixed))

    def with_cache[Cache](
        self, x: jax.Array, inputs: DeltaInputs[tuple[jax.Array, Cache]]
    ) -> tuple[jax.Array, Cache]:
        """Returns the output of x (B, T, E) and the cache; has no gradient."""
        normal = _normalised(self.attention_norm, x)
        mixed, cache = self.attention.with_cache(normal, inputs.positions, inputs.mix)
        return self._after(x, mixed)[0], cache


def _norm(config: DecoderConfig, side: str) -> RMSNorm | None:
    """Makes the norm before or after attention and feed-forward, if layers have it."""
    if config.norms not in (side, "both"):
        return None
    return RMSNorm(config, (config.hidden_size,))


def _normalised(norm: RMSNorm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)


def _scaled(x: jax.Array, scale: float) -> jax.Array:
    return x if scale == 1 else x * scale


class Decoder[Config: DecoderConfig](nnx.Module):
    """Layers and the norm after them, from embeddings to hidden states.

    A model derives from it, and adds what comes before and after.
    """

    def __init__(
        self,
        config: Config,
        execution: Execution,
        partition: Partition,
        *,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.execution = execution
        self.partition = partition

        keys = jax.random.split(rngs.params(), config.num_layers)

        def stack[Layer](name: str, make: Callable[..., Layer], heads: type) -> Layer:
            numbers = config.numbers(name)
            sizes = config.of_layers[numbers[0]]

            def layer(key: jax.Array) -> Layer:
                return make(sizes, execution, partition, heads, rngs=nnx.Rngs(key))

            own_keys = keys[np.array(numbers)]
            return nnx.scan(layer, in_axes=0, out_axes=0)(own_keys)

        self.layers = stack("layers", AttentionLayer, Attention)
        if config.dense_layers:
            self.dense_layers = stack("dense_layers", AttentionLayer, Attention)
        else:
            self.dense_layers = None
        if config.numbers("delta_layers"):
            self.delta_layers = stack("delta_layers", DeltaLayer, DeltaNet)
        else:
            self.delta_layers = None
        self.norm = RMSNorm(config, (config.hidden_size,))

    def through_layers(
        self,
        x: jax.Array,
        positions: jax.Array,
        attend: Attend,
        mix: Mix | None = None,
    ) -> Stream:
        """Returns hidden states of embeddings x, (B, T, E) both, in the compute type.

        And the mean loads of the layers' experts.

        positions: int32 (B, T), in the order of x, any. mix: of Gated DeltaNet.
        """
        layers = self.config.num_layers
        dense = self.config.dense_layers
        inputs = self.layer_inputs(positions, attend, mix)
        loads = jnp.zeros(2, jnp.float32) if self.config.experts else None
        stream = Stream(x, loads)
        if self.dense_layers is not None:
            runs = self.execution.runs(layers, stop=dense)
            stream = through_stack(self.dense_layers, runs, inputs, stream)
        stream = through_stack(
            self.layers,
            self.execution.runs(layers, first=dense),
            in_turn(inputs, dense),
            stream,
            self.delta_layers,
            self.stack_of_kind,
        )
        if stream.loads is not None:
            loads = stream.loads / (layers - dense)
        return Stream(self.norm(stream.x), loads)

    @property
    def stack_of_kind(self) -> tuple[int, ...]:
        """Returns, for each kind of `config.period`, the stack that its layers are in.

        0: `layers`, with attention. 1: `delta_layers`.
        """
        return tuple(int(kind.is_delta) for kind in self.config.period)

    def layer_inputs[Result](
        self,
        positions: jax.Array,
        attend: Callable[..., Result],
        mix: Callable[..., Result] | None,
        tokens: int = 0,
    ) -> list[AttentionInputs[Result] | DeltaInputs[Result]]:
        """Returns what layers are called with beside x, for each kind of the period.

        positions: int32 (B, T). mix: None without Gated DeltaNet.
        tokens: of a row, see `rotations`.

        Raises:
          ValueError: a layer has Gated DeltaNet, and there is no mix.
        """
        inputs: list[AttentionInputs[Result] | DeltaInputs[Result]] = []
        rotation_of: dict[Rope, Rotation] = {}
        for kind in self.config.period:
            if kind.is_delta:
                if mix is None:
                    raise ValueError(
                        "mix must be a function where layers have Gated DeltaNet, got "
                        "None: pass what make_delta_attention builds"
                    )
                inputs.append(DeltaInputs(positions, mix))
                continue
            rope = kind.rope
            # Kinds that differ in their windows alone share one rotation.
            if rope is not None and rope not in rotation_of:
                rotation_of[rope] = rotations(
                    positions, self.config.rotary_dim, rope.theta, rope.scaling, tokens
                )
            rotation = None if rope is None else rotation_of[rope]
            attend_kind = attend
            if kind.window:
                attend_kind = functools.partial(attend, window=kind.window)
            inputs.append(AttentionInputs(rotation, attend_kind))
        return inputs


def in_turn[Inputs](inputs: Sequence[Inputs], first: int) -> list[Inputs]:
    """Returns what layers are called with in turns, of layer `first` at the front.

    inputs: of layer 0 at the front.
    """
    first %= len(inputs)
    return [*inputs[first:], *inputs[:first]]


class LanguageModel(Decoder[LanguageModelConfig]):
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
        vocab = config.vocab_size
        embed = config.hidden_size
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
        return self.through_layers(self.embed(tokens), positions, attend, mix).x

    def head_weight(self) -> jax.Array:
        """Returns the head, (E, V) float32; the embedding's transpose if tied."""
        return self.embedding[...].T if self.head is None else self.head[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Returns logits of the next token, (B, m, V) float32, of hidden (B, m, E).

        In a `StationaryPartition`, as the head is not gathered.
        """
        call = self.partition.over_shards(
            self.config.logits, (RESIDUAL, self.HEAD_AXES), (*RESIDUAL[:2], "vocab")
        )
        return call(hidden, self.head_weight())

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Looks up the tokens, int32 (B, T): (B, T, E) in the compute type."""
        partition = self.partition
        embed = self.config.hidden_size
        dtype = self.execution.compute_dtype

        def local(tokens: jax.Array, table: jax.Array) -> jax.Array:
            whole = partition.gather(table, 1, embed, dtype)  # (V / shards, E)
            # The vocabulary may be sharded: each shard gives the tokens that it has.
            row = partition.vary(tokens)
            row -= partition.shard_number("vocab") * whole.shape[0]
            is_here = (row >= 0) & (row < whole.shape[0])
            x = jnp.take(whole, jnp.where(is_here, row, 0), axis=0)  # (b, t, E)
            return partition.total(jnp.where(is_here[..., None], x, 0), ("vocab",))

        names = ("batch", "sequence"), self.embedding.axes
        look_up = partition.over_shards(local, names, RESIDUAL)
        x = look_up(tokens, self.embedding[...])
        return _scaled(x.astype(dtype), self.config.embedding_scale)
