"""Gated DeltaNet (2412.06464): projections, gates and norms around its state."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.adapters import multiply_whole
from models.layers import INITIAL_STDDEV, RMSNorm, matrix
from models.memory import RESIDUAL, Execution, Partition
from models.sizes import DecoderConfig

Mix = Callable[..., Any]
"""Maps (qkv, kernels, log_decay, beta, positions) to results (B, T, H, V).

As `kernels.delta_attention.make_delta_attention` says.
"""

QKV = "query", "key", "value"
HEADS = "batch", "sequence", "heads", None
"""Names of axes (B, T, H, …)."""


class DeltaNet(nnx.Module):
    """A state for each head, written by gated deltas, in the place of attention.

    Letters: B, T, E as of the decoder, H heads of values of size V, K heads of queries
    and keys of size D, W tokens that the convolution reads.
    """

    def __init__(
        self,
        config: DecoderConfig,
        execution: Execution,
        partition: Partition,
        *,
        rngs: nnx.Rngs,
    ):
        embed, heads = config.hidden_size, config.delta_value_heads
        of_keys = config.delta_key_heads, config.delta_key_dim
        of_values, width = (heads, config.delta_value_dim), config.delta_convolution
        into = "embed", "heads", None

        def projection(*size: int) -> nnx.Param:
            return matrix(rngs, (embed, *size), into[: 1 + len(size)], INITIAL_STDDEV)

        for name, size in zip(QKV, (of_keys, of_keys, of_values), strict=True):
            setattr(self, name, projection(*size))
            kernel = matrix(rngs, (width, *size), (None, *into[1:]), width**-0.5)
            setattr(self, f"{name}_kernel", kernel)
        self.output_gate = projection(*of_values)
        self.beta, self.decay = projection(heads), projection(heads)
        rates = jax.random.uniform(rngs.params(), (heads,), minval=0.01, maxval=16)
        self.log_rate = nnx.Param(jnp.log(rates), axes=("heads",))
        self.decay_bias = nnx.Param(jnp.ones((heads,)), axes=("heads",))
        self.norm = RMSNorm(config, of_values[1:])
        self.norm.offset = 0.0  # of which the scale is not centred at zero
        self.norm.scale[...] = jnp.ones_like(self.norm.scale[...])
        out_axes, stddev = ("heads", None, "embed"), (2 * config.num_layers) ** -0.5
        stddev *= INITIAL_STDDEV
        self.output = matrix(rngs, (*of_values, embed), out_axes, stddev)
        self.partition, self.remat = partition, execution.remat
        self.lora = config.lora  # of attention alone

    def __call__(
        self, x: jax.Array, norm: RMSNorm | None, positions: jax.Array, mix: Mix
    ) -> jax.Array:
        """Returns the mixing of norm(x), projected back: (B, T, E), as x."""
        x = norm(x) if norm else x
        return self.with_cache(x, positions, lambda *qkv: (mix(*qkv), None))[0]

    def with_cache(
        self, x: jax.Array, positions: jax.Array, mix: Mix
    ) -> tuple[jax.Array, Any]:
        """Returns the mixing of x, projected back, and what mix returns too."""
        qkv = tuple(multiply_whole(self, x, name, (RESIDUAL, HEADS)) for name in QKV)
        kernels = tuple(getattr(self, f"{name}_kernel")[...] for name in QKV)
        beta, decay = (
            multiply_whole(self, x, name, (RESIDUAL, HEADS[:3])).astype(jnp.float32)
            for name in ("beta", "decay")
        )
        rate = jnp.exp(self.log_rate[...])
        log_decay = -rate * jax.nn.softplus(decay + self.decay_bias[...])  # (B, T, H)
        out, cache = mix(qkv, kernels, log_decay, jax.nn.sigmoid(beta), positions)
        gate = multiply_whole(self, x, "output_gate", (RESIDUAL, HEADS)).astype(
            jnp.float32
        )
        y = self.norm(out).astype(jnp.float32) * jax.nn.silu(gate)  # (B, T, H, V)
        return multiply_whole(
            self, y.astype(x.dtype), "output", (HEADS, RESIDUAL)
        ), cache
