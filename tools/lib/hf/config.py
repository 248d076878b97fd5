"""A LLaMA's config.json, read to the sizes of a model here and written from them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from data.json_text import is_number, short
from models.rope import RopeScaling
from models.sizes import LanguageModelConfig

# Field of config.json: field of LanguageModelConfig.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "feed_forward_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}
# Those that are others if they are missing.
_MORE_SIZES = ("num_key_value_heads", "head_dim")
LARGEST = (1 << 31) - 1
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
_ROPE_OPTIONAL = {"beta_fast", "beta_slow", "attention_factor"}
# Fields that older and newer versions write in the place of ours.
_REPLACED = ("rope_parameters", "dtype")


def llama_config(fields: Mapping[str, Any]) -> LanguageModelConfig:
    """Returns the model that `config.json` describes.

    Raises:
      ValueError: it is not a LLaMA, lacks a size, or asks for what models here lack;
        every such field is named.
    """
    sizes = {theirs: fields.get(theirs) for theirs in _SIZES}
    sizes |= {n: fields[n] for n in _MORE_SIZES if fields.get(n) is not None}
    epsilon = _or_default(fields, "rms_norm_eps", 1e-6)
    wrong = [
        f"{name}={short(fields.get(name, default))} (only "
        f"{' or '.join(map(repr, values))})"
        for name, (values, default) in _FIXED.items()
        if fields.get(name, default) not in values
    ]
    wrong += [
        f"{name}={short(size)} (a whole number from 1 to {LARGEST} is needed)"
        for name, size in sizes.items()
        if not _is_size(size)
    ]
    if not is_number(epsilon):
        wrong.append(f"rms_norm_eps={short(epsilon)} (a number is needed)")
    if wrong:
        raise ValueError(
            f"config.json describes no LLaMA that can be read: {'; '.join(wrong)}"
        )
    heads = sizes["num_attention_heads"]
    return LanguageModelConfig(
        **{ours: sizes[theirs] for theirs, ours in _SIZES.items()},
        num_kv_heads=sizes.get("num_key_value_heads", heads),
        head_dim=sizes.get("head_dim", sizes["hidden_size"] // heads),
        norm_epsilon=float(epsilon),
        **_rope_fields(fields),
    )


def has_tied_head(fields: Mapping[str, Any]) -> bool:
    """Returns whether the head is the embedding where there is no tensor for it.

    Raises:
      ValueError: the field is neither true nor false.
    """
    tied = _or_default(fields, "tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise ValueError(
            f"config.json has tie_word_embeddings={short(tied)}, not true or false"
        )
    return tied


def config_fields(
    config: LanguageModelConfig, dtype: str, original: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the `config.json` of a model.

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
    """Returns the fields of `LanguageModelConfig` for RoPE.

    Raises:
      ValueError: a scaling that a model here has not.
    """
    rope = _rope_given(fields)
    theta = rope.pop("rope_theta", 10_000.0)
    kind = rope.pop("rope_type", None if rope else "default")
    if not isinstance(kind, str) or kind not in _ROPE_TYPES:
        raise ValueError(
            f"config.json has RoPE scaling {short(kind)} (only "
            f"{', '.join(_ROPE_TYPES)})"
        )
    known = {field.name: field.type for field in dataclasses.fields(RopeScaling)}
    unknown = rope.keys() - known.keys()
    if unknown:
        raise ValueError(
            f"config.json has RoPE scaling {kind!r} with "
            f"{short(', '.join(sorted(unknown)))}, which models here have not"
        )
    if kind == "yarn" and fields.get("max_position_embeddings") is not None:
        longest = fields["max_position_embeddings"]
        rope.setdefault("original_max_position_embeddings", longest)
    missing = {*_ROPE_FIELDS.get(kind, ())} - rope.keys() - _ROPE_OPTIONAL
    if missing:
        raise ValueError(
            f"config.json has RoPE scaling {kind!r} without "
            f"{', '.join(sorted(missing))}: copy it again"
        )
    for name, value in {"rope_theta": theta, **rope}.items():
        is_right = _is_size if known.get(name) is int else is_number
        if not is_right(value):
            raise ValueError(
                f"config.json has {name}={short(value)} of RoPE, where a number is "
                "needed"
            )
    theta = float(theta)
    if kind == "default":
        return {"rope_theta": theta}
    scaling = {name: known[name](value) for name, value in rope.items()}
    return {
        "rope_theta": theta,
        "rope_scaling": RopeScaling(**scaling | {"rope_type": _ROPE_TYPES[kind]}),
    }


def _rope_given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the RoPE fields of `config.json`, one field since transformers 5.

    Raises:
      ValueError: a field is not an object, two contradict each other, or only a part
        of each head is rotated.
    """
    rope: dict[str, Any] = {}
    plain = {n: fields.get(n) for n in ("rope_theta", "partial_rotary_factor")}
    places = {
        n: _or_default(fields, n, {}) for n in ("rope_scaling", "rope_parameters")
    }
    for place, found in {"": plain, **places}.items():
        if not isinstance(found, Mapping):
            raise ValueError(f"config.json has {place}={short(found)}, no object")
        for name, value in found.items():
            if value is None:
                continue
            name = "rope_type" if name == "type" else name
            if rope.setdefault(name, value) != value:
                raise ValueError(
                    f"config.json has {short(name)} twice, as {short(rope[name])} "
                    f"and {short(value)}"
                )
    if rope.pop("partial_rotary_factor", 1) != 1:
        raise ValueError(
            "config.json has a partial_rotary_factor: only whole heads are rotated here"
        )
    return rope


def _rope_json(config: LanguageModelConfig) -> dict[str, Any]:
    """Returns the RoPE fields of `config.json` for ours: undoes `_rope_given`."""
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


def _or_default(fields: Mapping[str, Any], name: str, default: Any) -> Any:
    """Returns a field, or the default where it is missing or null."""
    value = fields.get(name)
    return default if value is None else value


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= LARGEST
