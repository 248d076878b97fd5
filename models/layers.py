"""Parts of a decoder layer: parameters, norms and the feed-forward."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from models.adapters import adapt, multiply, over_whole, with_factors
from models.chunks import scan_chunks
from models.execution import RESIDUAL, Axes, Partition
from models.sizes import DecoderConfig

INITIAL_STDDEV = 0.02

GATES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}
"""By `DecoderConfig.activation`."""


def matrix(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple, stddev: float
) -> nnx.Param:
    """Draws a parameter of normal random numbers, whose axes have names."""
    values = stddev * jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(values, axes=axes)


def zeros(shape: tuple[int, ...], axes: Axes) -> nnx.Param:
    """Makes a parameter of zeros, whose axes have names."""
    return nnx.Param(jnp.zeros(shape, jnp.float32), axes=axes)


class RMSNorm(nnx.Module):
    """Root mean square layer normalisation (1910.07467), over one axis or several."""

    def __init__(
        self, config: DecoderConfig, shape: tuple[int, ...], axes: Axes = (None,)
    ):
        """Makes a scale of this shape, that of the last axes."""
        self.offset = 1.0 if config.norm_unit_offset else 0.0
        self.scale = nnx.Param(jnp.full(shape, 1 - self.offset, jnp.float32), axes=axes)
        self.epsilon = config.norm_epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises x (…, *shape) in float32; returns its shape and type."""
        return self.with_scale(x, self.scale[...])

    def with_scale(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        """Does so with this module's scale where `over_shards` has passed it on."""
        wide = x.astype(jnp.float32)
        axes = tuple(range(-scale.ndim, 0))
        mean_square = jnp.mean(jnp.square(wide), axis=axes, keepdims=True)
        normal = wide * jax.lax.rsqrt(mean_square + self.epsilon)
        scale = scale + self.offset if self.offset else scale
        return (normal * scale).astype(x.dtype)


class FeedForward(nnx.Module):
    """A gated feed-forward (GLU, 2002.05202), a chunk of the local tokens at a time."""

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
        self.lora = config.lora
        adapt(self, config.lora, rngs, gate=1, up=1, down=1)
        self.partition, self.chunk = partition, chunk
        self.activation = config.activation

    def __call__(self, x: jax.Array, norm: RMSNorm | None = None) -> jax.Array:
        """Returns what the feed-forward adds to x: (B, T, E), as x.

        norm: of the result, made chunk by chunk too: its gradient needs the result,
          which would otherwise be computed again for all tokens.
        """
        partition, embed = self.partition, x.shape[-1]
        activate = GATES[self.activation]

        def local(x: jax.Array, whole: Mapping[str, jax.Array]) -> jax.Array:
            def product(tokens: jax.Array, name: str) -> jax.Array:
                # Cast there, so that the chunks' gradients add up in float32.
                return multiply(tokens, whole, name, self.lora)

            def gated(tokens: jax.Array) -> jax.Array:
                wide = activate(product(tokens, "gate"))  # (tokens, F)
                wide *= product(tokens, "up")
                y = product(wide, "down")  # (tokens, E)
                if norm is None:
                    return y
                return norm.with_scale(partition.total(y, summed), whole["norm"])

            tokens = x.reshape(-1, embed)  # (b · t, E)
            y = scan_chunks(gated, tokens, self.chunk or len(tokens)).reshape(x.shape)
            return partition.total(y, summed) if norm is None else y

        summed = ("mlp",)
        weights = with_factors(self, "gate", "up", "down")
        if norm is not None:
            weights["norm"] = norm.scale
        axes = {name: weight.axes for name, weight in weights.items()}
        arrays = {name: weight[...] for name, weight in weights.items()}
        sides = RESIDUAL, RESIDUAL
        return over_whole(partition, local, axes, sides, summed)(x, arrays)
