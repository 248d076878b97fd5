"""The families of published models that are read and written, a record each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

_NO_FIELDS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Family:
    """What the models of a family have in common.

    model_type: of config.json.
    architecture: the class of transformers that computes its logits.
    fields: those of config.json that its models are made from, each with the value that
      transformers takes where it is missing; None for what must be there, or follows.
    always: fields of config.json that are one value in all of its models.
    fixed: fields of a model here that all of its models have.
    has_scaled_embeddings: whether embeddings are multiplied by sqrt(hidden_size).
    """

    model_type: str
    architecture: str
    fields: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default=_NO_FIELDS)
    always: Mapping[str, Any] = field(default=_NO_FIELDS)
    has_scaled_embeddings: bool = False


_SIZES = dict.fromkeys(
    ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    + ("num_attention_heads", "num_key_value_heads", "head_dim")
)
_ALL = _SIZES | {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "max_position_embeddings": None,
}
_QWEN = _ALL | {
    "hidden_act": "silu",
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_GEMMA = _ALL | {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
}
_GEMMA_NORMS = {"norms": "both", "norm_unit_offset": True}

FAMILIES = (
    Family(
        "llama",
        "LlamaForCausalLM",
        _ALL | {"hidden_act": "silu", "attention_bias": False},
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        _ALL | {"hidden_act": "silu", "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    Family("qwen2", "Qwen2ForCausalLM", _QWEN, {"qkv_bias": True}),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        _QWEN | {"head_dim": 128, "attention_bias": False},
        {"qk_norm": "head"},
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        _GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        _GEMMA_NORMS,
        always={"sliding_window_pattern": 2},
        has_scaled_embeddings=True,
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _GEMMA
        | {
            "vocab_size": 262_208,
            "final_logit_softcapping": None,
            "sliding_window_pattern": 6,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        _GEMMA_NORMS | {"qk_norm": "head"},
        has_scaled_embeddings=True,
    ),
    Family(
        "olmo2",
        "Olmo2ForCausalLM",
        _ALL | {"hidden_act": "silu", "attention_bias": False, "rms_norm_eps": 1e-5},
        {"norms": "after", "qk_norm": "all"},
    ),
)
BY_TYPE = {family.model_type: family for family in FAMILIES}

EXPERTS = (
    *("gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe"),
    *("deepseek_v2", "deepseek_v3", "llama4", "llama4_text", "phimoe", "glm4_moe"),
)
"""Types of models whose feed-forward is a mixture of experts."""
