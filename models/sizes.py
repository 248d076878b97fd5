"""Sizes and parts of a decoder: a family of models is a record of them.

The defaults are LLaMA's (2302.13971).
"""

import math
from dataclasses import dataclass, field, fields

from models.adapters import Lora
from models.logits import Logits
from models.rope import RopeScaling

NORMS = "before", "after", "both"
ACTIVATIONS = "silu", "gelu_tanh"
QK_NORMS = "", "head", "all"
WINDOW, FULL = "w", "f"
"""Kinds of layers in a pattern."""


@dataclass(frozen=True)
class LayerKind:
    """What kinds of layers differ in.

    window: tokens that a query sees, its own included; 0 for all up to it.
    rope_theta, rope_scaling: of RoPE.
    """

    window: int
    rope_theta: float
    rope_scaling: RopeScaling


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and parts of a stack of decoder layers.

    layer_pattern: kinds of the layers, repeated over them: "w" attends to a window, "f"
      to all; "" is "f".
    window: tokens that a query of "w" layers sees, its own included; 0 without any.
    window_rope_theta: base of RoPE in "w" layers, where it is not scaled then; 0: RoPE
      is that of the others.
    attention_scale: factor on the scores; 0 for head_dim^-0.5.
    attention_soft_cap: scores s become c · tanh(s / c); 0 for none.
    attention_sinks: whether each head has a logit of a key whose value is 0.
    qkv_bias, output_bias: of the attention's projections.
    qk_norm: of queries and keys: "", of each "head", or of "all" heads at once.
    norms: "before" attention and feed-forward, "after" them, or "both".
    norm_unit_offset: whether norms multiply by 1 + scale.
    activation: of the feed-forward's gate, "silu" or "gelu_tanh".
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
    attention_scale: float = 0.0
    attention_soft_cap: float = 0.0
    attention_sinks: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: str = ""
    norms: str = "before"
    norm_unit_offset: bool = False
    activation: str = "silu"
    rope_scaling: RopeScaling = RopeScaling()
    lora: Lora = Lora()

    def __post_init__(self):
        names = [s.name for s in fields(self) if s.type is int and s.name != "window"]
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
        if found := found + self._wrong_parts():
            raise ValueError("; ".join(found))

    def _wrong_parts(self) -> list[str]:
        """Returns what no model has."""
        found = []
        for name in ("attention_scale", "attention_soft_cap", "window_rope_theta"):
            if not 0 <= getattr(self, name) < math.inf:
                found.append(f"{name}={getattr(self, name)} must be at least 0")
        for name, known in (
            ("norms", NORMS),
            ("activation", ACTIVATIONS),
            ("qk_norm", QK_NORMS),
        ):
            if getattr(self, name) not in known:
                must = ", ".join(repr(value) for value in known)
                found.append(f"{name}={getattr(self, name)!r} must be one of {must}")
        if set(self.layer_pattern) - {WINDOW, FULL}:
            found.append(
                f"layer_pattern={self.layer_pattern!r} must be made of {WINDOW!r} for "
                f'layers with a window and {FULL!r} for others, as in "wwwwwf"'
            )
        has_windows = WINDOW in self.layer_pattern
        if has_windows != (self.window > 0) or self.window < 0:
            found.append(
                f"window={self.window} must be at least 1 with "
                f"{WINDOW!r} in layer_pattern={self.layer_pattern!r}, and 0 without"
            )
        if self.window_rope_theta and not has_windows:
            found.append(
                f"window_rope_theta={self.window_rope_theta} needs {WINDOW!r} in "
                f"layer_pattern={self.layer_pattern!r}: set it to 0"
            )
        sides = [self.matrix_sides[name] for name in self.lora.matrices]
        least = min((size for pair in sides for size in pair), default=0)
        if self.lora.rank > least:
            found.append(
                f"rank={self.lora.rank} must be at most {least}, the smallest side of "
                f"the matrices of targets={self.lora.targets!r}"
            )
        return found

    @property
    def matrix_sides(self) -> dict[str, tuple[int, int]]:
        """Returns inputs and outputs of the matrices of a layer, by name."""
        embed, wide = self.hidden_size, self.feed_forward_size
        heads, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "query": (embed, heads),
            "key": (embed, kv),
            "value": (embed, kv),
            "output": (heads, embed),
            "gate": (embed, wide),
            "up": (embed, wide),
            "down": (wide, embed),
        }

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Returns the kinds of the first layers, which repeat over all of them."""
        full = LayerKind(0, self.rope_theta, self.rope_scaling)
        plain = self.window_rope_theta, RopeScaling()
        rope = plain if self.window_rope_theta else (full.rope_theta, full.rope_scaling)
        known = {FULL: full, WINDOW: LayerKind(self.window, *rope)}
        pattern = self.layer_pattern or FULL
        if pattern == pattern[0] * len(pattern):
            pattern = pattern[0]
        return tuple(known[letter] for letter in pattern[: self.num_layers])

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Returns the kind of each layer."""
        kinds = self.kinds
        return tuple(kinds[n % len(kinds)] for n in range(self.num_layers))


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

    def _wrong_parts(self) -> list[str]:
        found = super()._wrong_parts()
        for name in ("embedding_scale", "logit_scale"):
            if not 0 < getattr(self, name) < math.inf:
                found.append(f"{name}={getattr(self, name)} must be a number above 0")
        if not 0 <= self.logit_soft_cap < math.inf:
            found.append(f"logit_soft_cap={self.logit_soft_cap} must be at least 0")
        return found

    @property
    def logits(self) -> Logits:
        """Returns how hidden states and the head make logits."""
        return Logits(self.logit_scale, self.logit_soft_cap)
