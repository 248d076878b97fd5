"""A LLaMA's config.json, read to the sizes of a model here and written from them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from models.llama import LlamaConfig
from models.rope import RopeScaling

# Field of config.json: field of LlamaConfig.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "feed_forward_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}
# What a model here has in one way only: field, its values, and the value if missing.
_FIXED = {
    "model_type": (("llama",), None),
    "hidden_act": (("silu",), "silu"),
    "attention_bias": ((False,), False),
    "mlp_bias": ((False,), False),
    "quantization_config": ((None,), None),
}
# RoPE scalings of config.json, and ours.
_ROPE_TYPES = {
    "default": "none",
    "linear": "linear",
    "yarn": "yarn",
    "llama3": "llama3",
}
# Of ours, the fields that a scaling has.
_ROPE_FIELDS = {
    "linear": ("factor",),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
    ),
    "llama3": (
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    ),
}
# Fields that older and newer versions write in the place of ours.
_REPLACED = ("rope_parameters", "dtype")


def llama_config(fields: Mapping[str, Any]) -> LlamaConfig:
    """The model that `config.json` describes.

    Raises:
      ValueError: it is no LLaMA, lacks a size, or asks for what models here have not;
        every such field is named.
    """
    wrong = [
        f"{name}={fields.get(name, default)!r} (only {' or '.join(map(repr, values))})"
        for name, (values, default) in _FIXED.items()
        if fields.get(name, default) not in values
    ]
    sizes = {ours: fields.get(theirs) for theirs, ours in _SIZES.items()}
    wrong += [
        f"{theirs}={sizes[ours]!r} (a number is needed)"
        for theirs, ours in _SIZES.items()
        if not isinstance(sizes[ours], int)
    ]
    if wrong:
        raise ValueError(
            f"config.json describes no LLaMA that can be read: {'; '.join(wrong)}"
        )
    heads = sizes["num_heads"]
    return LlamaConfig(
        **sizes,
        num_kv_heads=fields.get("num_key_value_heads") or heads,
        head_dim=fields.get("head_dim") or sizes["hidden_size"] // heads,
        norm_epsilon=float(fields.get("rms_norm_eps", 1e-6)),
        **_rope_fields(fields),
    )


def has_tied_head(fields: Mapping[str, Any]) -> bool:
    """Whether the head is the embedding where there is no tensor for it."""
    return bool(fields.get("tie_word_embeddings", False))


def config_fields(
    config: LlamaConfig, dtype: str, original: Mapping[str, Any]
) -> dict[str, Any]:
    """The `config.json` of a model.

    dtype: of the tensors, such as "bfloat16".
    original: fields of another config.json, for what the model does not know: the
      longest context, ids of special tokens.
    """
    kept = {name: value for name, value in original.items() if name not in _REPLACED}
    return {
        # Not those that transformers takes where there are none.
        "bos_token_id": None,
        "eos_token_id": None,
        **kept,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: getattr(config, ours) for theirs, ours in _SIZES.items()},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_epsilon,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        **_rope_json(config),
    }


def _rope_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `LlamaConfig` that say how positions turn.

    Raises:
      ValueError: a scaling that a model here has not.
    """
    # One field of all since transformers 5, two before.
    rope = {
        "rope_theta": fields.get("rope_theta", 10_000.0),
        **(fields.get("rope_scaling") or {}),
        **(fields.get("rope_parameters") or {}),
    }
    theta = float(rope.pop("rope_theta"))
    older = rope.pop("type", "default")
    kind = rope.pop("rope_type", older)
    if kind not in _ROPE_TYPES:
        raise ValueError(
            f"config.json has RoPE scaling {kind!r} (only {', '.join(_ROPE_TYPES)})"
        )
    if kind == "default":
        return {"rope_theta": theta}
    rope = {name: value for name, value in rope.items() if value is not None}
    known = {field.name: field.type for field in dataclasses.fields(RopeScaling)}
    unknown = rope.keys() - known.keys()
    if unknown:
        raise ValueError(
            f"config.json has RoPE scaling {kind!r} with {', '.join(sorted(unknown))}, "
            "which models here have not"
        )
    if kind == "yarn":
        longest = fields.get("max_position_embeddings", 0)
        rope.setdefault("original_max_position_embeddings", longest)
    scaling = {name: known[name](value) for name, value in rope.items()}
    return {
        "rope_theta": theta,
        "rope_scaling": RopeScaling(**scaling | {"rope_type": _ROPE_TYPES[kind]}),
    }


def _rope_json(config: LlamaConfig) -> dict[str, Any]:
    """The other way round."""
    theta, scaling = config.rope_theta, config.rope_scaling
    if scaling.rope_type == "ntk":  # nothing but another theta
        theta *= scaling.factor ** (config.head_dim / (config.head_dim - 2))
    names = _ROPE_FIELDS.get(scaling.rope_type)
    if names is None:
        return {"rope_theta": theta, "rope_scaling": None}
    fields = {name: getattr(scaling, name) for name in ("rope_type", *names)}
    if not fields.get("attention_factor", 1):
        del fields["attention_factor"]  # that of the formula
    return {"rope_theta": theta, "rope_scaling": fields}
