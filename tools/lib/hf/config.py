"""config.json of a published model, read to the sizes of one here, and written."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from data.json_text import short
from models.sizes import LanguageModelConfig
from tools.lib.hf import fields as table
from tools.lib.hf.experts import (
    WHOLE_FORMS,
    as_published,
    experts_fields,
    read_experts,
)
from tools.lib.hf.fields import Family
from tools.lib.hf.layers import DELTA_SIZES, layer_fields, read_layers
from tools.lib.hf.rope import (
    NOT_APPLIED,
    RopeKinds,
    read_rope,
    rope_fields,
    without_ntk,
)

# Field of config.json: field of ours that is the same number.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "feed_forward_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}
# Numbers that may be missing: what a model here has then is the same.
_NUMBERS = {
    "rms_norm_eps": "norm_epsilon",
    "attn_logit_softcapping": "attention_soft_cap",
    "final_logit_softcapping": "logit_soft_cap",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "routed_scaling_factor": "expert_scale",
}
_THEIR_ACTIVATIONS = {x: y for y, x in reversed(table.ACTIVATIONS.items())}
LONGEST = "max_position_embeddings"
WITH_IMAGES = {
    "gemma3": "gemma3_text",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3",
}
"""Models of text and images, and the text model that is read, if it says no other."""
_TEXT_TYPES = {"qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""Types of text models that are models of another type."""
_TEXT = "text_config"
_TIED = "tie_word_embeddings"
_OF_IMAGES = (
    *("vision_config", "mm_tokens_per_image", "image_token_index"),
    *("boi_token_index", "eoi_token_index", "image_token_id", "video_token_id"),
    *("vision_start_token_id", "vision_end_token_id", "vision_token_id"),
    *("multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size"),
    "vision_feature_layer",
)
# Fields that older and newer versions write in the place of ours.
_REPLACED = ("dtype", "torch_dtype", "architectures", "model_type")


def model_config(fields: Mapping[str, Any]) -> LanguageModelConfig:
    """Returns the model that `config.json` describes.

    Raises:
      ValueError: it is of no family that is read, lacks a size, has a field that is not
        known, or asks for what models here lack; every such field is named.
    """
    fields = text_fields(fields)
    family = _family(fields)
    wrong = _complaints(fields, family)
    for name in _sizes(family):
        if fields.get(name) is None and name not in family.may_lack:
            wrong.append(f"{name}=None ({table.MADE_FROM[name].needed})")
    if wrong:
        raise ValueError(
            f"config.json describes no model that can be read: {'; '.join(wrong)}"
        )
    values = {name: family.value(name, fields) for name in table.MADE_FROM}
    heads = values["num_attention_heads"]
    hidden = values["hidden_size"]
    head_dim = values["head_dim"] or hidden // heads
    pattern, window = read_layers(fields, family)
    rope = read_rope(fields, _rope_kinds(family, fields))
    if not pattern:
        rope.pop("window_rope_theta", None)
    activation = values["hidden_act"] or values["hidden_activation"]
    bias = values["attention_bias"] or False
    output_bias = values["attention_out_bias"]
    scalar = values["query_pre_attn_scalar"] or head_dim
    scale = float(values["attention_multiplier"] or scalar**-0.5)
    numbers: dict[str, Any] = {
        ours: float(values[theirs])
        for theirs, ours in _NUMBERS.items()
        if values[theirs]
    }
    if family.has_scaled_embeddings:
        numbers["embedding_scale"] = hidden**0.5
    sizes = _sizes(family) | (DELTA_SIZES if "d" in pattern else {})
    if values["use_qk_norm"]:
        numbers["qk_norm"] = "head"
    config = LanguageModelConfig(
        **{ours: values[theirs] for theirs, ours in sizes.items()},
        num_kv_heads=values["num_key_value_heads"] or heads,
        head_dim=head_dim,
        layer_pattern=pattern,
        window=window,
        attention_scale=0.0 if scale == head_dim**-0.5 else scale,
        activation=table.ACTIVATIONS[activation],
        tied_embeddings=values["tie_word_embeddings"],
        logit_scale=1 / (values["logits_scaling"] or 1),
        qkv_bias=bias,
        output_bias=bias if output_bias is None else output_bias,
        **numbers,
        **read_experts(values, family),
        **rope,
    )
    return dataclasses.replace(config, **family.fixed)


def config_fields(
    config: LanguageModelConfig,
    dtype: str,
    original: Mapping[str, Any],
    context_tokens: int = 0,
) -> dict[str, Any]:
    """Returns the `config.json` of a model, of the first family that has it.

    dtype: of the tensors, such as "bfloat16".
    original: fields of another config.json, whose family it is to be, for what the
      model does not know: ids of special tokens and others.
    context_tokens: that the model was trained with here; 0 where it was not.

    Raises:
      ValueError: the original's family, or without one all, cannot have the model; or
        the original cannot be read.
    """
    config = without_ntk(config)
    original = text_fields(original)
    families = (_family(original),) if original else table.FAMILIES
    if wrong := original and _complaints(original, families[0]):
        raise ValueError(f"config.json of the original: {'; '.join(wrong)}")
    tried = [_written(config, family) for family in families]
    lacking = [_differences(fields, config) for fields in tried]
    nearest = min(range(len(tried)), key=lambda number: len(lacking[number]))
    written = tried[nearest]
    if lacking[nearest]:
        among = "" if original else " (the nearest family)"
        raise ValueError(
            f"the model cannot be written as {written['model_type']}{among}: "
            f"{'; '.join(lacking[nearest])}"
        )
    for name in sorted(original.keys() & table.MADE_FROM.keys() - {"rope_parameters"}):
        as_there = written | {name: original[name]}
        if not _differences(as_there, config):
            written = as_there
    longest = original.get(LONGEST) or 0
    scaling = config.rope_scaling
    # transformers 4 takes their factor from it.
    if scaling.rope_type in ("yarn", "longrope"):
        longest = round(scaling.factor * scaling.original_max_position_embeddings)
    else:
        longest = max(longest, context_tokens)
    kept = original.keys() - table.MADE_FROM.keys() - {*_REPLACED}
    return {
        # Where they are missing, transformers takes its own.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **{name: value for name, value in original.items() if name in kept},
        **written,
        **({LONGEST: longest} if longest else {}),
        "torch_dtype": dtype,
    }


def context_change(fields: Mapping[str, Any], original: Mapping[str, Any]) -> str:
    """Says how the longest context differs from that of an original; "" for equal."""
    now = fields.get(LONGEST)
    before = text_fields(original).get(LONGEST)
    same = not original or now == before
    return "" if same else f"{LONGEST}={now}, which is {before} in the original"


def fused(fields: Mapping[str, Any]) -> Mapping[str, str]:
    """Returns the matrices of a config.json that lie in one tensor, and its name."""
    return _family(text_fields(fields)).fused


def experts_form(fields: Mapping[str, Any], tensors: Iterable[str] = ()) -> str:
    """Returns how a model's tensors of experts are kept: a name of `names.EXPERTS`.

    tensors: names of those that there are; of some models files have either form.
    """
    form = _family(text_fields(fields)).experts_form
    is_whole = any(name.endswith(".experts.gate_up_proj") for name in tensors)
    return WHOLE_FORMS.get(form, form) if is_whole else form


def not_applied(fields: Mapping[str, Any]) -> list[str]:
    """Returns what a config.json says that is not applied here, as dropouts."""
    fields = text_fields(fields)
    family = _family(fields)
    own = {field.name for field in dataclasses.fields(family.config_class)}
    said = []
    for name in table.DROPOUTS:
        default = getattr(family.config_class, name, 0) if name in own else 0
        if value := fields.get(name, default):
            said.append(f"{name}={short(value)}")
    rope = fields.get("rope_scaling") or {}
    if NOT_APPLIED in rope:
        said.append(f"{NOT_APPLIED}={short(rope[NOT_APPLIED])} of RoPE")
    return said


def text_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a config.json as that of the text model alone; others as they are.

    Raises:
      ValueError: there is no text model, or two fields of it contradict each other.
    """
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in WITH_IMAGES:
        return as_published(fields)
    text = fields.get(_TEXT)
    if text is None and "hidden_size" in fields:  # as older versions wrote it
        text = {}
    if not isinstance(text, Mapping):
        raise ValueError(
            f"config.json of model_type={kind!r} must have an object {_TEXT}, "
            f"got {short(text)}: copy it again"
        )
    own = (_TEXT, "model_type", "architectures", *_OF_IMAGES)
    outer = {name: value for name, value in fields.items() if name not in own}
    # Whether the head is tied is the whole model's: transformers reads it outside, and
    # writes the text model's default beside it.
    for name in outer.keys() & text.keys() & table.MADE_FROM.keys() - {_TIED}:
        if outer[name] != text[name]:
            raise ValueError(
                f"config.json has {name} twice, as {short(outer[name])} and "
                f"{short(text[name])}"
            )
    own_kind = text.get("model_type", WITH_IMAGES[kind])
    own_kind = _TEXT_TYPES.get(own_kind, own_kind)
    return as_published({**text, **outer, "model_type": own_kind})


def _family(fields: Mapping[str, Any]) -> Family:
    kind = fields.get("model_type")
    if isinstance(kind, str) and kind in table.BY_TYPE and table.BY_TYPE[kind].experts:
        return table.BY_TYPE[kind]
    if isinstance(kind, str) and kind in table.LACKING:
        raise ValueError(
            f"config.json has model_type={kind!r}, which cannot be read: "
            f"{table.LACKING[kind]}"
        )
    for part in (fields, fields.get(_TEXT)):
        for name in table.EXPERTS:
            experts = part.get(name) if isinstance(part, Mapping) else None
            if isinstance(experts, int) and experts > 0:
                raise ValueError(
                    f"config.json has {name}={experts} (model_type={short(kind)}): "
                    "its feed-forward is a mixture of experts, which is read of "
                    f"{', '.join(f.model_type for f in table.FAMILIES if f.experts)}"
                )
    if isinstance(kind, str) and kind in table.BY_TYPE:
        return table.BY_TYPE[kind]
    raise ValueError(
        f"config.json has model_type={short(kind)} (only {', '.join(table.BY_TYPE)}, "
        f"and the text of {', '.join(WITH_IMAGES)})"
    )


def _complaints(fields: Mapping[str, Any], family: Family) -> list[str]:
    """Returns a complaint for each field that is wrong."""
    wrong = []
    harmless = {*table.HARMLESS, *family.ignored}
    unknown = fields.keys() - {*table.MADE_FROM, *table.ONE_VALUE, *harmless}
    for name, value in fields.items():
        says_nothing = value is None or value == [] or value == {}
        if name in unknown or name in harmless:
            continue
        if says_nothing and (value is None or name in table.ONE_VALUE):
            continue
        text = f"{name}={short(value)}"
        if name in table.ONE_VALUE and name not in family.older:
            only, remedy = table.ONE_VALUE[name]
            is_own = name == "auto_map" and _is_own_program(value, family)
            if not is_own and not _is_same(value, only):
                wrong.append(f"{text} (only {only!r}: {remedy})")
        elif name in family.fields:
            if not table.MADE_FROM[name].is_right(family.value(name, fields)):
                wrong.append(f"{text} ({table.MADE_FROM[name].needed})")
        else:
            nothing = [family.always.get(name)]
            if table.MADE_FROM[name] is table.TRUTH and name not in family.always:
                nothing.append(False)
            if table.SAME.get(name) in family.fields:
                nothing.append(family.value(table.SAME[name], fields))
            if not any(_is_same(value, other) for other in nothing):
                wrong.append(f"{text}, which {family.model_type} has not")
    unknown -= {"model_type", *(n for n in unknown if fields[n] in (None, [], {}))}
    if unknown:
        wrong.append(
            f"{short(', '.join(sorted(unknown)))} not known here: remove what changes "
            "nothing in the model"
        )
    return wrong


def _is_own_program(auto_map: Any, family: Family) -> bool:
    """Returns whether `auto_map` names a copy of the family's own program."""
    named = auto_map.get("AutoModelForCausalLM") if isinstance(auto_map, dict) else None
    return isinstance(named, str) and named.split(".")[-1] == family.architecture


def _sizes(family: Family) -> Mapping[str, str]:
    """Returns fields of config.json, and of ours, that are one number in a family."""
    sizes = dict(_SIZES)
    if "moe_intermediate_size" in family.experts:
        del sizes["intermediate_size"]  # of dense layers
    return sizes | family.experts


def _rope_kinds(family: Family, fields: Mapping[str, Any]) -> RopeKinds:
    return RopeKinds(
        family.thetas(fields),
        family.scalings,
        family.rotated_part,
        family.has_query_scale,
    )


def _is_same(value: Any, other: Any) -> bool:
    """Returns whether two values are equal, of which true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _written(config: LanguageModelConfig, family: Family) -> dict[str, Any]:
    """Returns the fields of config.json that the family's models are made from."""
    activation = _THEIR_ACTIVATIONS.get(config.activation, "silu")
    scale = config.attention_scale or config.head_dim**-0.5
    sizes = _SIZES | DELTA_SIZES | family.experts
    fields = {
        **{name: getattr(config, ours) for name, ours in sizes.items()},
        **{name: getattr(config, ours) or None for name, ours in _NUMBERS.items()},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "tie_word_embeddings": config.tied_embeddings,
        "use_qk_norm": config.qk_norm == "head",
        **experts_fields(config),
        "hidden_act": activation,
        "hidden_activation": activation,
        "attention_bias": config.qkv_bias,
        "attention_out_bias": config.output_bias,
        "query_pre_attn_scalar": round(scale**-2),
        "attention_multiplier": scale,
        "logits_scaling": float(f"{1 / config.logit_scale:.12g}"),
        **layer_fields(config.num_layers, config.layer_pattern, config.window),
        **rope_fields(config, family.has_rope_of_kinds),
    }
    if not config.window and "layer_types" in family.fields:
        # None has a window, as the layers say: the size is what it would be.
        fields["sliding_window"] = family.value("sliding_window", {})
    written = {name: value for name, value in fields.items() if name in family.fields}
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "rope_scaling": None,
        **written,
    }


def _differences(written: Mapping[str, Any], config: LanguageModelConfig) -> list[str]:
    """Returns the parts of a model that its config.json does not say."""
    try:
        read = dataclasses.asdict(model_config(written))
    except ValueError as error:
        return [str(error)]
    return [
        f"{name}={short(value)}, there {short(read[name])}"
        for name, value in dataclasses.asdict(config).items()
        if read[name] != value
    ]
