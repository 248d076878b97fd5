"""The families of published models that are read and written, a record each."""

import dataclasses
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tools.lib.hf.fields import HAVE_NULL

_NO_FIELDS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Family:
    """What the models of a family have in common, beside what transformers says of it.

    model_type: of config.json.
    architecture: the class of transformers that computes its logits.
    fixed: fields of a model here that all of its models have.
    always: fields of config.json that are one value in all of its models.
    older: fields that only older versions wrote, with what a missing one says.
    may_lack: sizes that files leave out where they are transformers' defaults.
    has_scaled_embeddings: whether embeddings are multiplied by sqrt(hidden_size).
    """

    model_type: str
    architecture: str
    fixed: Mapping[str, Any] = field(default=_NO_FIELDS)
    always: Mapping[str, Any] = field(default=_NO_FIELDS)
    older: Mapping[str, Any] = field(default=_NO_FIELDS)
    may_lack: tuple[str, ...] = ()
    has_scaled_embeddings: bool = False

    @functools.cached_property
    def config_class(self) -> Any:
        """Returns transformers' class of the family's configs."""
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # no PyTorch is fine
        from transformers import AutoConfig

        return type(AutoConfig.for_model(self.model_type))

    @functools.cached_property
    def fields(self) -> frozenset[str]:
        """Returns the fields of config.json that its models may be made from."""
        found = {field.name for field in dataclasses.fields(self.config_class)}
        of_all = "head_dim", "rope_theta", "rope_scaling"
        return frozenset(found.union(of_all, self.older) - self.always.keys())

    def value(self, name: str, said: Mapping[str, Any]) -> Any:
        """Returns the value of a field of config.json, or what transformers takes."""
        if said.get(name) is None and (name not in said or name not in HAVE_NULL):
            return self.older.get(name, getattr(self.config_class, name, None))
        return said[name]


_GEMMA_NORMS = {"norms": "both", "norm_unit_offset": True}

FAMILIES = (
    Family("llama", "LlamaForCausalLM"),
    Family("mistral", "MistralForCausalLM"),
    Family("qwen2", "Qwen2ForCausalLM", {"qkv_bias": True}),
    Family("qwen3", "Qwen3ForCausalLM", {"qk_norm": "head"}),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        _GEMMA_NORMS,
        always={"sliding_window_pattern": 2},
        may_lack=("num_attention_heads",),
        has_scaled_embeddings=True,
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _GEMMA_NORMS | {"qk_norm": "head"},
        always={"attn_logit_softcapping": None},  # a field that nothing reads
        older={"sliding_window_pattern": 6, "rope_local_base_freq": 10_000.0},
        may_lack=("vocab_size", "num_attention_heads"),
        has_scaled_embeddings=True,
    ),
    Family("olmo2", "Olmo2ForCausalLM", {"norms": "after", "qk_norm": "all"}),
)
BY_TYPE = {family.model_type: family for family in FAMILIES}

EXPERTS = (
    *("gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe"),
    *("deepseek_v2", "deepseek_v3", "llama4", "llama4_text", "phimoe", "glm4_moe"),
)
"""Types of models whose feed-forward is a mixture of experts."""
