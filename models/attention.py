"""Projections, norms of heads and rotary embedding around an attention."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.adapters import adapt, multiply_whole
from models.layers import INITIAL_STDDEV, RMSNorm, matrix, zeros
from models.memory import (
    RESIDUAL,
    Execution,
    Partition,
    remat_attention,
    remat_projection,
)
from models.rope import Rotation, rotate
from models.sizes import DecoderConfig

Attend = Callable[..., jax.Array]
"""Maps q (B, T, H, D), k and v (B, T, K, D) to attention outputs (B, T, H, D).

Keywords: `window`, the tokens that a query sees, in layers that have one; `sinks` (H,),
logits of the heads' sinks, in models that have them.
"""

Weights = Mapping[str, jax.Array]


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
        wide = depth * (1 + config.attention_gate)  # each head's query, and its gate
        self.query = matrix(rngs, (embed, heads, wide), into, INITIAL_STDDEV)
        self.key = matrix(rngs, (embed, kv_heads, depth), into_kv, INITIAL_STDDEV)
        self.value = matrix(rngs, (embed, kv_heads, depth), into_kv, INITIAL_STDDEV)
        out_axes = ("heads", None, "embed")
        self.output = matrix(rngs, (heads, depth, embed), out_axes, out_stddev)
        self.lora, self.has_gate = config.lora, config.attention_gate
        adapt(self, config.lora, rngs, query=1, key=1, value=1, output=2)
        if config.qkv_bias:
            self.query_bias = zeros((heads, wide), into[1:])
            self.key_bias = zeros((kv_heads, depth), into_kv[1:])
            self.value_bias = zeros((kv_heads, depth), into_kv[1:])
        self.output_bias = zeros((embed,), (None,)) if config.output_bias else None
        if config.attention_sinks:
            self.sinks = zeros((heads,), ("heads",))
        self.has_norms = bool(config.qk_norm)
        if config.qk_norm == "head":
            self.query_norm = RMSNorm(config, (depth,))
            self.key_norm = RMSNorm(config, (depth,))
        elif config.qk_norm == "all":
            self.query_norm = RMSNorm(config, (heads, depth), into[1:])
            self.key_norm = RMSNorm(config, (kv_heads, depth), into_kv[1:])
        self.partition, self.remat = partition, execution.remat
        self.groups = parts = execution.attention_parts
        local = kv_heads // partition.shards("kv_heads")
        if parts < 1 or local % parts:
            raise ValueError(
                f"attention_{parts=} must divide the {local} key/value heads of a "
                "device: choose a divisor of them"
            )
        if parts > 1 and config.qk_norm == "all":
            raise ValueError(
                f"attention_{parts=} cannot be with norms of all heads at once, "
                f"qk_norm={config.qk_norm!r}: set it to 1"
            )

    def __call__(
        self,
        x: jax.Array,
        norm: RMSNorm | None,
        rotation: Rotation | None,
        attend: Attend,
    ) -> jax.Array:
        """Returns the attention of norm(x), projected back: (B, T, E), as x.

        norm: computed here, as remat_projection recomputes it; None for x itself.
        """

        def project(x: jax.Array, weights: Weights) -> tuple:
            return self.project(norm(x) if norm else x, weights, rotation)

        def head_group(x: jax.Array, weights: Weights) -> jax.Array:
            q, k, v, *gate = remat_projection(project, self.remat)(x, weights)
            out = attend(q, k, v, **self.sink_logits(weights))  # (B, T, h, D)
            return self.combine(gated(out, *gate), weights)  # (B, T, E)

        head_group = remat_attention(head_group, self.remat)
        if self.groups == 1:
            return self.biased(head_group(x, self.weights()))

        def add(total: jax.Array, group: Weights) -> tuple[jax.Array, None]:
            return total + head_group(x, group).astype(total.dtype), None

        total = jnp.zeros(x.shape, jnp.float32)  # (B, T, E)
        total, _ = jax.lax.scan(add, total, self._grouped())
        return self.biased(total.astype(x.dtype))

    def with_cache(
        self, x: jax.Array, rotation: Rotation | None, attend: Callable
    ) -> tuple[jax.Array, Any]:
        """Returns the attention of x, projected back, and what attend returns too."""
        weights = self.weights()
        q, k, v, *gate = self.project(x, weights, rotation)
        out, cache = attend(q, k, v, **self.sink_logits(weights))  # (B, T, H, D)
        return self.biased(self.combine(gated(out, *gate), weights)), cache

    def weights(self) -> Weights:
        """Returns the parameters that heads share out, by name."""
        return {name: weight[...] for name, weight in self._of_heads().items()}

    def project(
        self, x: jax.Array, weights: Weights, rotation: Rotation | None
    ) -> tuple[jax.Array, ...]:
        """Returns q (B, T, h, D), k and v (B, T, k, D) of x (B, T, E).

        And logits of the gate, as q, where there is one.

        weights: of a head group: of the queries (E, h, D), keys and values (E, k, D),
          and their biases.
        """

        def into_heads(name: str, heads: str) -> jax.Array:
            sides = RESIDUAL, (*RESIDUAL[:2], heads, None)
            y = multiply_whole(self, x, name, sides, weights)
            bias = weights.get(f"{name}_bias")
            return y if bias is None else y + bias.astype(y.dtype)

        q, gate = into_heads("query", "heads"), ()  # (B, T, h, D)
        if self.has_gate:
            q, *gate = jnp.split(q, 2, axis=-1)
        k = into_heads("key", "kv_heads")  # (B, T, k, D)
        v = into_heads("value", "kv_heads")  # (B, T, k, D)
        if self.has_norms:
            q, k = self.query_norm(q), self.key_norm(k)
        return rotate(q, rotation), rotate(k, rotation), v, *gate

    def sink_logits(self, weights: Weights) -> Weights:
        """Returns the attention's argument of a head group's sinks, if it has any."""
        return {"sinks": weights["sinks"]} if "sinks" in weights else {}

    def combine(self, out: jax.Array, weights: Weights) -> jax.Array:
        """Sums heads' results (B, T, h, D) with their weight (h, D, E): (B, T, E)."""
        sides = ("batch", "sequence", "heads", None), RESIDUAL
        return multiply_whole(self, out, "output", sides, weights)

    def biased(self, x: jax.Array) -> jax.Array:
        """Adds the bias of the output, if any, to x (B, T, E)."""
        bias = self.output_bias
        return x if bias is None else x + bias[...].astype(x.dtype)

    def _of_heads(self) -> dict[str, nnx.Param]:
        """Returns the parameters with an axis of heads, by name; no norms."""
        return {
            name: value
            for name, value in vars(self).items()
            if isinstance(value, nnx.Param) and {"heads", "kv_heads"} & {*value.axes}
        }

    def _grouped(self) -> Weights:
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

        return {name: grouped(weight) for name, weight in self._of_heads().items()}


def gated(out: jax.Array, gate: jax.Array | None = None) -> jax.Array:
    """Multiplies heads' results by the sigmoid of their gate's logits, if any."""
    return out if gate is None else out * jax.nn.sigmoid(gate)
