"""Gated DeltaNet (2412.06464): projections, gates and norms around its state."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from models.adapters import multiply_whole
from models.layers import INITIAL_STDDEV, RMSNorm, matrix
from models.memory import RESIDUAL, Execution, Partition
from models.sizes import DecoderConfig

Mix = Callable[..., jax.Array]
"""Maps (qkv, kernels, log_decay, beta, positions) to results (B, T, H, V).

As `kernels.delta.attention.make_delta_attention` says.
"""

Triple = tuple[jax.Array, jax.Array, jax.Array]
"""Of queries, keys and values."""

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
        embed = config.hidden_size
        heads = config.delta_value_heads
        of_keys = (config.delta_key_heads, config.delta_key_dim)
        of_values = (heads, config.delta_value_dim)
        width = config.delta_convolution
        into = ("embed", "heads", None)

        def projection(size: tuple[int, ...]) -> nnx.Param:
            return matrix(rngs, (embed, *size), into[: 1 + len(size)], INITIAL_STDDEV)

        def kernel(size: tuple[int, int]) -> nnx.Param:
            return matrix(rngs, (width, *size), (None, *into[1:]), width**-0.5)

        # The order is that of the random numbers, and with it of seeds in use.
        self.query = projection(of_keys)
        self.query_kernel = kernel(of_keys)
        self.key = projection(of_keys)
        self.key_kernel = kernel(of_keys)
        self.value = projection(of_values)
        self.value_kernel = kernel(of_values)
        self.output_gate = projection(of_values)
        self.beta = projection((heads,))
        self.decay = projection((heads,))
        rates = jax.random.uniform(rngs.params(), (heads,), minval=0.01, maxval=16)
        self.log_rate = nnx.Param(jnp.log(rates), axes=("heads",))
        self.decay_bias = nnx.Param(jnp.ones((heads,)), axes=("heads",))
        self.norm = RMSNorm(config, of_values[1:])
        self.norm.offset = 0.0  # of which the scale is not centred at zero
        self.norm.scale[...] = jnp.ones_like(self.norm.scale[...])
        out_axes = ("heads", None, "embed")
        stddev = INITIAL_STDDEV * (2 * config.num_layers) ** -0.5
        self.output = matrix(rngs, (*of_values, embed), out_axes, stddev)
        self.partition = partition
        self.remat = execution.remat
        self.lora = config.lora  # of attention alone

    def __call__(self, x: jax.Array, positions: jax.Array, mix: Mix) -> jax.Array:
        """Returns the mixing of x, projected back: (B, T, E), as x.

        positions: int32 (B, T), in the tokens' documents.
        """
        out = mix(*self.operands(x), positions)
        return self.project_back(out, x)

    def with_cache[Cache](
        self,
        x: jax.Array,
        positions: jax.Array,
        mix: Callable[..., tuple[jax.Array, Cache]],
    ) -> tuple[jax.Array, Cache]:
        """Returns the mixing of x, projected back, and the cache of `mix`."""
        out, cache = mix(*self.operands(x), positions)
        return self.project_back(out, x), cache

    def operands(self, x: jax.Array) -> tuple[Triple, Triple, jax.Array, jax.Array]:
        """Returns what `mix` reads of x (B, T, E): qkv, kernels, log_decay, beta.

        qkv: q and k (B, T, K, D), v (B, T, H, V). kernels: of their convolutions, (W,
          K, D) and (W, H, V). log_decay, beta: float32 (B, T, H).
        """
        q = multiply_whole(self, x, "query", (RESIDUAL, HEADS))
        k = multiply_whole(self, x, "key", (RESIDUAL, HEADS))
        v = multiply_whole(self, x, "value", (RESIDUAL, HEADS))
        kernels = self.query_kernel[...], self.key_kernel[...], self.value_kernel[...]
        beta = multiply_whole(self, x, "beta", (RESIDUAL, HEADS[:3]))
        beta = beta.astype(jnp.float32)
        decay = multiply_whole(self, x, "decay", (RESIDUAL, HEADS[:3]))
        decay = decay.astype(jnp.float32)
        rate = jnp.exp(self.log_rate[...])
        log_decay = -rate * jax.nn.softplus(decay + self.decay_bias[...])
        return (q, k, v), kernels, log_decay, jax.nn.sigmoid(beta)

    def project_back(self, out: jax.Array, x: jax.Array) -> jax.Array:
        """Projects the heads' results (B, T, H, V), gated by x, to (B, T, E), as x."""
        gate = multiply_whole(self, x, "output_gate", (RESIDUAL, HEADS))
        gate = gate.astype(jnp.float32)
        y = self.norm(out).astype(jnp.float32) * jax.nn.silu(gate)  # (B, T, H, V)
        return multiply_whole(self, y.astype(x.dtype), "output", (HEADS, RESIDUAL))
