"""Projections, norms of heads and rotary embedding around an attention."""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

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
from models.rope import Rotation, rotate, rotate_queries
from models.sizes import DecoderConfig

Attend = Callable[..., jax.Array]
"""Maps q (B, T, H, D), k and v (B, T, K, D) to attention outputs (B, T, H, D).

Keywords: `window`, the tokens that a query sees, in layers that have one; `sinks` (H,),
logits of the heads' sinks, in models that have them.
"""

HEAD_GROUP_AXES = {"heads", "kv_heads"}
"""Names of axes that head groups share out."""

Weights = Mapping[str, jax.Array]
"""Parameters of a head group by name: all but norms and the output's bias."""


class HeadGroup(NamedTuple):
    """What a head group's attention is made of.

    q: (B, T, h, D). k, v: (B, T, k, D). gate: logits, as q; None in models without.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    gate: jax.Array | None


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
        embed = config.hidden_size
        depth = config.head_dim
        heads = config.num_heads
        kv_heads = config.num_kv_heads
        into = ("embed", "heads", None)
        into_kv = ("embed", "kv_heads", None)
        out_stddev = INITIAL_STDDEV * (2 * config.num_layers) ** -0.5
        wide = depth * (1 + config.attention_gate)  # each head's query, and its gate
        self.query = matrix(rngs, (embed, heads, wide), into, INITIAL_STDDEV)
        self.key = matrix(rngs, (embed, kv_heads, depth), into_kv, INITIAL_STDDEV)
        self.value = matrix(rngs, (embed, kv_heads, depth), into_kv, INITIAL_STDDEV)
        out_axes = ("heads", None, "embed")
        self.output = matrix(rngs, (heads, depth, embed), out_axes, out_stddev)
        self.lora = config.lora
        self.has_gate = config.attention_gate
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
        self.partition = partition
        self.remat = execution.remat
        parts = execution.attention_parts
        self.groups = parts
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
        project = functools.partial(self.project, rotation=rotation, norm=norm)
        project = remat_projection(project, self.remat)

        def attend_group(x: jax.Array, weights: Weights) -> jax.Array:
            heads = project(x, weights)
            sinks = self.sink_logits(weights)
            out = attend(heads.q, heads.k, heads.v, **sinks)  # (B, T, h, D)
            return self.combine(gated(out, heads.gate), weights)  # (B, T, E)

        attend_group = remat_attention(attend_group, self.remat)
        if self.groups == 1:
            return self.biased(attend_group(x, self.weights()))

        def add(total: jax.Array, weights: Weights) -> tuple[jax.Array, None]:
            return total + attend_group(x, weights).astype(total.dtype), None

        total = jnp.zeros(x.shape, jnp.float32)  # (B, T, E)
        total, _ = jax.lax.scan(add, total, self._grouped())
        return self.biased(total.astype(x.dtype))

    def with_cache[Cache](
        self,
        x: jax.Array,
        rotation: Rotation | None,
        attend: Callable[..., tuple[jax.Array, Cache]],
    ) -> tuple[jax.Array, Cache]:
        """Returns the attention of x, projected back, and the cache of `attend`."""
        weights = self.weights()
        heads = self.project(x, weights, rotation)
        sinks = self.sink_logits(weights)
        out, cache = attend(heads.q, heads.k, heads.v, **sinks)  # (B, T, H, D)
        return self.biased(self.combine(gated(out, heads.gate), weights)), cache

    def weights(self) -> Weights:
        """Returns the parameters that heads share out, by name."""
        return {name: weight[...] for name, weight in self._of_heads().items()}

    def project(
        self,
        x: jax.Array,
        weights: Weights,
        rotation: Rotation | None,
        norm: RMSNorm | None = None,
    ) -> HeadGroup:
        """Returns queries, keys, values and gate of norm(x), x (B, T, E).

        weights: of the queries (E, h, D), or (E, h, 2 D) with gates, of keys and values
          (E, k, D), and their biases.
        """
        x = x if norm is None else norm(x)

        def into_heads(name: str, heads: str) -> jax.Array:
            sides = RESIDUAL, (*RESIDUAL[:2], heads, None)
            y = multiply_whole(self, x, name, sides, weights)
            bias = weights.get(f"{name}_bias")
            return y if bias is None else y + bias.astype(y.dtype)

        gate = None
        q = into_heads("query", "heads")  # (B, T, h, D), or (B, T, h, 2 D) with gates
        if self.has_gate:
            q, gate = jnp.split(q, 2, axis=-1)
        k = into_heads("key", "kv_heads")  # (B, T, k, D)
        v = into_heads("value", "kv_heads")  # (B, T, k, D)
        if self.has_norms:
            q = self.query_norm(q)
            k = self.key_norm(k)
        q = rotate_queries(q, rotation)
        return HeadGroup(q, rotate(k, rotation), v, gate)

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
        parameters = {}
        for name, value in vars(self).items():
            if isinstance(value, nnx.Param) and HEAD_GROUP_AXES & {*value.axes}:
                parameters[name] = value
        return parameters

    def _grouped(self) -> Weights:
        """Returns the weights by head group: (groups, …, heads / groups, …) each.

        A group has as many heads of every device.
        """
        return {name: self._group(weight) for name, weight in self._of_heads().items()}

    def _group(self, parameter: nnx.Param) -> jax.Array:
        """Cuts a parameter (…, heads, …): (groups, …, heads / groups, …)."""
        weight = parameter[...]
        names = parameter.axes
        axis = next(i for i, name in enumerate(names) if name in HEAD_GROUP_AXES)
        shards = self.partition.shards("heads")
        before = weight.shape[:axis]
        after = weight.shape[axis + 1 :]
        heads = weight.shape[axis] // shards // self.groups
        # A device's heads are next to each other: each group takes some of all devices.
        x = weight.reshape(*before, shards, self.groups, heads, *after)
        x = jnp.moveaxis(x, axis + 1, 0)  # (groups, …, shards, heads, …)
        return x.reshape(self.groups, *before, shards * heads, *after)


def gated(out: jax.Array, gate: jax.Array | None = None) -> jax.Array:
    """Multiplies heads' results by the sigmoid of their gate's logits, if any."""
    return out if gate is None else out * jax.nn.sigmoid(gate)
