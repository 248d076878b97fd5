"""Sizes and parts of a decoder: a family of models is a record of them.

The defaults are LLaMA's (2302.13971).
"""

import math
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

import jax
import jax.numpy as jnp

from models.lora import Lora
from models.rope import Rope, RopeScaling

NORMS = "before", "after", "both"
ACTIVATIONS = "silu", "gelu_tanh", "clamped"
ROUTERS = "chosen", "all", "sigmoid"
EXPERT_SIZES = "experts", "experts_per_token", "shared_expert_size"
EXPERT_SIZES += "dense_layers", "dense_feed_forward_size"
"""Sizes of a mixture of experts, 0 without one."""
EXPERT_PARTS = "router", "expert_bias", "expert_scale", "shared_expert_gate"
QK_NORMS = "", "head", "all"
WINDOW, FULL, DELTA = "w", "f", "d"
"""Kinds of layers in a pattern; capitals have no RoPE."""
DELTA_SIZE = "delta_"
"""Begin of the names of Gated DeltaNet's sizes."""

Names = tuple[str, ...]


@dataclass(frozen=True)
class LayerKind:
    """Differences between the layers of a model.

    window: tokens that a query sees, its own included; 0 for all up to it.
    rope: None for layers without RoPE.
    is_delta: whether it is Gated DeltaNet, which has a state and no attention.
    """

    window: int
    rope: Rope | None
    is_delta: bool = False


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and parts of a stack of decoder layers.

    layer_pattern: kinds of the layers, repeated over them: "w" attends to a window, "f"
      to all; "" is "f". "W" and "F" do so without RoPE. "d" is Gated DeltaNet.
    window: tokens that a query of "w" layers sees, its own included; 0 without any.
    window_rope_theta: base of RoPE in "w" layers, where it is not scaled then; 0: RoPE
      is that of the others.
    rotary_fraction: share of each head's sizes, from the first on, that RoPE rotates.
    attention_scale: factor on the scores; 0 for head_dim^-0.5.
    attention_soft_cap: scores s become c · tanh(s / c); 0 for none.
    attention_sinks: whether each head has a logit of a key whose value is 0.
    attention_gate: whether heads' results are multiplied by sigmoids, made as queries.
    delta_key_heads, delta_value_heads, delta_key_dim, delta_value_dim: of "d" layers,
      and tokens that their delta_convolution reads; 0 without any.
    qkv_bias, output_bias: of the attention's projections.
    qk_norm: of queries and keys: "", of each "head", or of "all" heads at once.
    norms: "before" attention and feed-forward, "after" them, or "both".
    norm_unit_offset: whether norms multiply by 1 + scale.
    residual_scale: factor on what attention and feed-forward add to their input.
    activation: of the feed-forward's gate, "silu" or "gelu_tanh"; of experts also
      "clamped", see `models.experts`.
    experts: feed-forwards of a layer, of which a token takes experts_per_token; 0 for
      one that all tokens take.
    router: how a token weighs its experts: by a softmax over the "chosen" ones, over
      "all", or by "sigmoid", normalised, and chosen with a bias.
    expert_bias: whether the router and the experts have biases.
    shared_expert_size: width of an expert that all tokens take; 0 for none.
    shared_expert_gate: whether it is multiplied by a sigmoid.
    expert_scale: factor on what the chosen experts add, the shared one aside.
    dense_layers: first layers that have no experts, but one feed-forward, of width
      dense_feed_forward_size; 0 for none.
    lora: adapters of the layers' matrices, which are frozen then, as all the rest is.
    """

    hidden_size: int
    feed_forward_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-6
    layer_pattern: str = ""
    window: int = 0
    window_rope_theta: float = 0.0
    rotary_fraction: float = 1.0
    attention_scale: float = 0.0
    attention_soft_cap: float = 0.0
    attention_sinks: bool = False
    attention_gate: bool = False
    delta_key_heads: int = 0
    delta_value_heads: int = 0
    delta_key_dim: int = 0
    delta_value_dim: int = 0
    delta_convolution: int = 0
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: str = ""
    norms: str = "before"
    norm_unit_offset: bool = False
    residual_scale: float = 1.0
    activation: str = "silu"
    experts: int = 0
    experts_per_token: int = 0
    router: str = "chosen"
    expert_bias: bool = False
    shared_expert_size: int = 0
    shared_expert_gate: bool = False
    expert_scale: float = 1.0
    dense_layers: int = 0
    dense_feed_forward_size: int = 0
    rope_scaling: RopeScaling = RopeScaling()
    lora: Lora = Lora()

    _ABOVE_0: ClassVar[Names] = (
        *("rope_theta", "norm_epsilon", "residual_scale"),
        "expert_scale",
    )
    _AT_LEAST_0: ClassVar[Names] = (
        *("attention_scale", "attention_soft_cap"),
        *("window_rope_theta", "shared_expert_size"),
    )

    def __post_init__(self):
        errors = self._wrong_sizes()
        if self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads:
            errors.append(
                f"num_heads={self.num_heads} must be a multiple of "
                f"num_kv_heads={self.num_kv_heads}: query heads share key/value heads "
                "evenly"
            )
        if self.head_dim % 2:
            errors.append(f"head_dim={self.head_dim} must be even: RoPE rotates pairs")
        rotary = self.rotary_dim
        if not 2 <= rotary <= self.head_dim or rotary % 2:
            errors.append(
                f"rotary_fraction={self.rotary_fraction} of head_dim={self.head_dim} "
                f"must be an even number of sizes, at least 2, got {rotary}: RoPE "
                "rotates pairs"
            )
        factors = len(self.rope_scaling.long_factor)
        if factors not in (0, rotary // 2):
            errors.append(
                f"rope_type='longrope' has factors of {factors} pairs, and RoPE "
                f"rotates {rotary // 2}: give one for each"
            )
        for name in self._ABOVE_0:
            if not 0 < getattr(self, name) < math.inf:
                errors.append(f"{name}={getattr(self, name)} must be a number above 0")
        errors += self._wrong_parts()
        if errors:
            raise ValueError("; ".join(errors))

    def _wrong_sizes(self) -> list[str]:
        """Returns a message, of all sizes that no array can have; [] without any."""
        wrong = []
        for size in fields(self):
            may_be_0 = size.name == "window" or size.name.startswith(DELTA_SIZE)
            may_be_0 |= size.name in EXPERT_SIZES
            if size.type is int and not may_be_0:
                value = getattr(self, size.name)
                if not 0 < value < 1 << 31:
                    wrong.append(f"{size.name}={value}")
        must = "model sizes must be at least 1, and below 2^31"
        return [f"{must}: {', '.join(wrong)}"] if wrong else []

    def _wrong_parts(self) -> list[str]:
        """Returns a message for each invalid part."""
        errors = []
        for name in self._AT_LEAST_0:
            if not 0 <= getattr(self, name) < math.inf:
                errors.append(f"{name}={getattr(self, name)} must be at least 0")
        for name, known in (
            ("norms", NORMS),
            ("activation", ACTIVATIONS),
            ("qk_norm", QK_NORMS),
            ("router", ROUTERS),
        ):
            if getattr(self, name) not in known:
                must = ", ".join(map(repr, known))
                errors.append(f"{name}={getattr(self, name)!r} must be one of {must}")
        if set(self.layer_pattern) - {*"wfWF", DELTA}:
            errors.append(
                f"layer_pattern={self.layer_pattern!r} must be made of {WINDOW!r} for "
                f'layers with a window and {FULL!r} for others, as in "wwwwwf", in '
                f"capitals where they have no RoPE, and {DELTA!r} for Gated DeltaNet"
            )
        errors += self._wrong_delta()
        errors += self._wrong_experts()
        has_windows = WINDOW in self.layer_pattern.lower()
        if has_windows != (self.window > 0) or self.window < 0:
            errors.append(
                f"window={self.window} must be at least 1 with "
                f"{WINDOW!r} in layer_pattern={self.layer_pattern!r}, and 0 without"
            )
        if self.window_rope_theta and not has_windows:
            errors.append(
                f"window_rope_theta={self.window_rope_theta} needs {WINDOW!r} in "
                f"layer_pattern={self.layer_pattern!r}: set it to 0"
            )
        sides = self.matrix_sides()
        least = min((min(sides[name]) for name in self.lora.matrices), default=0)
        if self.lora.rank > least:
            errors.append(
                f"rank={self.lora.rank} must be at most {least}, the smallest side of "
                f"the matrices of targets={self.lora.targets!r}"
            )
        shared_rank = self.lora.gate_up_rank
        if shared_rank and not self.experts:
            errors.append(f"gate_up_rank={shared_rank} must be 0 without experts")
        return errors

    def _wrong_delta(self) -> list[str]:
        """Returns a message if sizes of Gated DeltaNet and the pattern do not agree."""
        names = (f.name for f in fields(self) if f.name.startswith(DELTA_SIZE))
        sizes = {name: getattr(self, name) for name in names}
        listed = ", ".join(f"{name}={size}" for name, size in sizes.items())
        if DELTA not in self.layer_pattern:
            wrong = f"{listed} must be 0 without {DELTA!r} in layer_pattern"
            return [wrong] if any(sizes.values()) else []
        if min(sizes.values()) < 1 or self.delta_value_heads % self.delta_key_heads:
            return [
                f"{listed} must be at least 1 with {DELTA!r} in layer_pattern="
                f"{self.layer_pattern!r}, and value heads share key heads evenly"
            ]
        if not set(self.layer_pattern[: self.num_layers]) - {DELTA}:
            pattern = self.layer_pattern
            return [f"layer_pattern={pattern!r} needs attention: choose 'dddf'"]
        return []

    def _wrong_experts(self) -> list[str]:
        """Returns a message for each part of experts that does not go with the rest."""
        errors = []
        chosen = self.experts_per_token
        least = min(self.experts, 1)
        if not least <= chosen <= self.experts:
            errors.append(
                f"experts_per_token={chosen} must be from {least} to "
                f"experts={self.experts}"
            )
        parts = {
            "router": self.router != ROUTERS[0],
            "expert_bias": self.expert_bias,
            "shared_expert_size": self.shared_expert_size != 0,
            "expert_scale": self.expert_scale != 1,
            "dense_layers": self.dense_layers != 0,
            "activation": self.activation == "clamped",
        }
        given = [f"{name}={getattr(self, name)!r}" for name in parts if parts[name]]
        if given and not self.experts:
            errors.append(f"{', '.join(given)} must have experts of at least 1, got 0")
        if self.shared_expert_gate and not self.shared_expert_size:
            errors.append("shared_expert_gate must have shared_expert_size above 0")
        has_others = DELTA in self.layer_pattern or self.activation == "clamped"
        most = 0 if has_others else max(1, self.num_layers) - 1
        if not 0 <= self.dense_layers <= most:
            errors.append(
                f"dense_layers={self.dense_layers} must be from 0 to {most}: fewer "
                f"than num_layers, 0 with {DELTA!r} in layer_pattern or clamped gates"
            )
        if (self.dense_feed_forward_size > 0) != (self.dense_layers > 0):
            errors.append(
                f"dense_feed_forward_size={self.dense_feed_forward_size} must be 0 if "
                f"dense_layers={self.dense_layers} is, and else at least 1"
            )
        return errors

    def uses(self, matrix: str) -> int:
        """Returns how many matrices of this name a token is multiplied with."""
        of_experts = matrix in ("gate", "up", "down") and self.experts
        return self.experts_per_token if of_experts else 1

    def matrix_sides(self, is_delta: bool = False) -> dict[str, tuple[int, int]]:
        """Returns the number of inputs and of outputs of a layer's matrices, by name.

        is_delta: of a layer with Gated DeltaNet.
        """
        embed = self.hidden_size
        wide = self.feed_forward_size
        if is_delta:
            keys = self.delta_key_heads * self.delta_key_dim
            heads = self.delta_value_heads * self.delta_value_dim
            into = {"query": keys, "key": keys, "value": heads, "output_gate": heads}
            into |= dict.fromkeys(("beta", "decay"), self.delta_value_heads)
        else:
            keys = self.num_kv_heads * self.head_dim
            heads = self.num_heads * self.head_dim
            # Each head's query and, if there is one, its gate.
            queries = heads * (1 + self.attention_gate)
            into = {"query": queries, "key": keys, "value": keys}
        sides = {name: (embed, size) for name, size in into.items()}
        sides |= {"gate": (embed, wide), "up": (embed, wide)}
        sides |= {"output": (heads, embed), "down": (wide, embed)}
        if self.experts:
            sides["router"] = (embed, self.experts)
        if shared := self.shared_expert_size:
            sides |= {"shared_gate": (embed, shared), "shared_up": (embed, shared)}
            sides["shared_down"] = (shared, embed)
        if self.shared_expert_gate:
            sides["shared_weight"] = (embed, 1)
        return sides

    @property
    def rotary_dim(self) -> int:
        """Returns how many sizes of each head RoPE rotates."""
        return int(self.head_dim * self.rotary_fraction)

    @property
    def period(self) -> tuple[LayerKind, ...]:
        """Returns the kinds of the first layers, which repeat over all of them."""
        rope = Rope(self.rope_theta, self.rope_scaling)
        window_rope = rope
        if self.window_rope_theta:
            window_rope = Rope(self.window_rope_theta, RopeScaling())
        kind_of = {
            FULL: LayerKind(0, rope),
            FULL.upper(): LayerKind(0, None),
            WINDOW: LayerKind(self.window, window_rope),
            WINDOW.upper(): LayerKind(self.window, None),
            DELTA: LayerKind(0, None, is_delta=True),
        }
        pattern = self.layer_pattern or FULL
        if len(set(pattern)) == 1:
            pattern = pattern[0]
        return tuple(kind_of[letter] for letter in pattern[: self.num_layers])

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Returns the kind of each layer."""
        period = self.period
        return tuple(period[n % len(period)] for n in range(self.num_layers))

    @property
    def attention_windows(self) -> list[int]:
        """Returns the window of each layer that has attention."""
        return [kind.window for kind in self.layer_kinds if not kind.is_delta]

    @property
    def of_layers(self) -> "list[DecoderConfig]":
        """Returns the sizes of each layer, of which the first may have no experts."""
        others: list[DecoderConfig] = [self] * (self.num_layers - self.dense_layers)
        if not self.dense_layers:
            return others
        names = (*EXPERT_SIZES, *EXPERT_PARTS)
        plain = {part.name: part.default for part in fields(self) if part.name in names}
        plain["lora"] = replace(self.lora, gate_up_rank=0)
        dense = replace(self, feed_forward_size=self.dense_feed_forward_size, **plain)
        return [dense] * self.dense_layers + others

    def numbers(self, stack: str) -> list[int]:
        """Returns the numbers of the layers in a stack of parameters, by its name.

        "dense_layers" are the first ones, "delta_layers" those with Gated DeltaNet.
        """
        if stack == "dense_layers":
            return [*range(self.dense_layers)]
        is_delta = stack == "delta_layers"
        kinds = self.layer_kinds
        others = range(self.dense_layers, self.num_layers)
        return [n for n in others if kinds[n].is_delta == is_delta]


@dataclass(frozen=True)
class LanguageModelConfig(DecoderConfig):
    """Sizes of a model of tokens; together with the parameters they are the model.

    tied_embeddings: whether the head is the embedding.
    embedding_scale: factor on embeddings. logit_scale: factor on logits.
    logit_soft_cap: logits z become c · tanh(z / c); 0 for none.
    """

    vocab_size: int = field(kw_only=True)
    tied_embeddings: bool = field(default=False, kw_only=True)
    embedding_scale: float = field(default=1.0, kw_only=True)
    logit_scale: float = field(default=1.0, kw_only=True)
    logit_soft_cap: float = field(default=0.0, kw_only=True)

    _ABOVE_0 = (*DecoderConfig._ABOVE_0, "embedding_scale", "logit_scale")
    _AT_LEAST_0 = (*DecoderConfig._AT_LEAST_0, "logit_soft_cap")

    def logits(self, hidden: jax.Array, head: jax.Array) -> jax.Array:
        """Returns logits (…, V) float32 of hidden states (…, E) and the head (E, V)."""
        # Cast here, and not outside of a loop over chunks of tokens: their gradients
        # for the head then add up in its own float32, and not in bfloat16.
        head = head.astype(hidden.dtype)
        z = jnp.dot(hidden, head, preferred_element_type=jnp.float32)
        if self.logit_scale != 1:
            z *= self.logit_scale
        cap = self.logit_soft_cap
        return cap * jnp.tanh(z / cap) if cap else z
