"""Mixtures of experts in config.json: fields of any version, and ours."""

from collections.abc import Mapping
from typing import Any

from models.sizes import LanguageModelConfig
from tools.lib.hf import fields as table
from tools.lib.hf.fields import Family

WHOLE_FORMS = {"by_expert": "whole", "glm": "glm_whole"}
"""Of `names.EXPERTS`: forms of one tensor for each expert, and of one for all."""


def as_published(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a config.json with the number of experts under the family's own name.

    transformers 5 writes another. And without MXFP4, which is dequantised.
    """
    known = dict(fields)
    family = table.BY_TYPE.get(str(known.get("model_type")))
    if family is None or not family.experts:
        return known
    packed = known.get("quantization_config")
    if isinstance(packed, Mapping) and packed.get("quant_method") == "mxfp4":
        del known["quantization_config"]
    own = next(name for name in table.EXPERTS if name in family.experts)
    for other in table.EXPERTS:
        if own not in known and other in known:
            known[own] = known.pop(other)
    return known


def read_experts(values: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Returns our fields of experts that no field of a config.json holds as it is.

    values: its fields, with those that it lacks.
    """
    read: dict[str, Any] = {}
    if "norm_topk_prob" in family.fields:
        read["router"] = "chosen" if values["norm_topk_prob"] else "all"
    if "n_shared_experts" in family.fields:
        # Side by side they are one.
        width = values["n_shared_experts"] * values["moe_intermediate_size"]
        read["shared_expert_size"] = width
    return read


def experts_fields(config: LanguageModelConfig) -> dict[str, Any]:
    """Returns the fields of config.json that `read_experts` reads."""
    return {
        "norm_topk_prob": config.router == "chosen",
        "n_shared_experts": config.shared_expert_size // config.feed_forward_size,
    }


def draft_layers(fields: Mapping[str, Any]) -> range:
    """Returns the numbers of layers behind the last, which draft tokens further ahead.

    Files may have them, or not. transformers 5 writes another name of their number.
    """
    first = fields["num_hidden_layers"]
    drafts = fields.get("num_nextn_predict_layers") or fields.get("num_mtp_layers")
    return range(first, first + (drafts or 0))
