"""Families of published models, and every field of their config.json that is known.

A field shapes the model, may have one value only, or changes nothing.

Fields that are not here are refused, as are fields of other families whose value would
change the model. transformers would pass over both.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from data.json_text import is_number

LARGEST = (1 << 31) - 1
MOST_LAYERS = 1 << 16
LAYER_TYPES = {
    "sliding_attention": "w",
    "full_attention": "f",
    "linear_attention": "d",
}
"""Kinds of layers of config.json, and ours."""
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "swish": "silu"}


class Kind(NamedTuple):
    """Values that a field may have beside null, as a test and in words."""

    is_right: Callable[[Any], bool]
    needed: str


def _list_of(known: Collection[str] | Collection[int], names: str) -> Kind:
    types = set(map(type, known))

    def is_right(value: Any) -> bool:
        # Of its type too: true is no 1.
        return isinstance(value, list) and all(
            type(element) in types and element in known for element in value
        )

    return Kind(is_right, f"a list of {names} is needed")


def _whole(least: int, most: int) -> Kind:
    return Kind(
        lambda value: type(value) is int and least <= value <= most,
        f"a whole number from {least} to {most} is needed",
    )


LAYERS = _whole(0, MOST_LAYERS)
SIZE = _whole(1, LARGEST)
NUMBER = Kind(
    lambda value: is_number(value) and value > 0, "a number above 0 is needed"
)
NUMBERS = Kind(
    lambda value: isinstance(value, list) and all(map(NUMBER.is_right, value)),
    "a list of numbers above 0 is needed",
)
TRUTH = Kind(lambda value: isinstance(value, bool), "true or false is needed")
_OBJECT = Kind(lambda value: isinstance(value, dict), "an object is needed")
_SWITCHES = _list_of((0, 1), "0 and 1")
_TYPES = _list_of(LAYER_TYPES, " and ".join(LAYER_TYPES))
_ACTIVATION = Kind(
    lambda value: isinstance(value, str) and value in ACTIVATIONS,
    f"only {' or '.join(ACTIVATIONS)}",
)
_NAMES = {
    LAYERS: "num_hidden_layers max_window_layers num_nextn_predict_layers "
    "num_mtp_layers",
    SIZE: "vocab_size hidden_size intermediate_size num_attention_heads head_dim "
    "num_key_value_heads sliding_window sliding_window_size sliding_window_pattern "
    "_sliding_window_pattern max_position_embeddings no_rope_layer_interval "
    "original_max_position_embeddings "
    "full_attention_interval linear_num_key_heads linear_num_value_heads "
    "linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim "
    "num_experts num_local_experts num_experts_per_tok moe_intermediate_size "
    "shared_expert_intermediate_size n_routed_experts n_shared_experts "
    "first_k_dense_replace",
    NUMBER: "rms_norm_eps query_pre_attn_scalar attn_logit_softcapping "
    "final_logit_softcapping rope_theta rope_local_base_freq partial_rotary_factor "
    "embedding_multiplier logits_scaling residual_multiplier attention_multiplier "
    "routed_scaling_factor",
    TRUTH: "attention_bias attention_out_bias tie_word_embeddings use_sliding_window "
    "norm_topk_prob use_qk_norm",
    _OBJECT: "rope_scaling rope_parameters",
    _TYPES: "layer_types",
    _SWITCHES: "no_rope_layers",
    _ACTIVATION: "hidden_act hidden_activation",
}
MADE_FROM = {name: kind for kind, names in _NAMES.items() for name in names.split()}
HAVE_NULL = frozenset(
    "num_key_value_heads head_dim sliding_window attn_logit_softcapping "
    "final_logit_softcapping".split()
)
"""Fields whose null is a value of its own, and not as good as missing."""
SAME = {
    "hidden_act": "hidden_activation",
    "hidden_activation": "hidden_act",
    "sliding_window_size": "sliding_window",
    "_sliding_window_pattern": "sliding_window_pattern",
}
"""Other names of fields, which may say the same."""

DROPOUTS = "attention_dropout", "residual_dropout", "resid_pdrop", "embd_pdrop"
"""Fields that are named where they are not 0, and not applied."""

ONE_VALUE: dict[str, tuple[Any, str]] = {
    "mlp_bias": (False, "feed-forwards here have no biases"),
    "partial_rotary_factor": (1, "only whole heads are rotated here"),
    "use_bidirectional_attention": (False, "models here are causal"),
    "rope_interleaved": (False, "the pairs of RoPE are (i, i + D/2) here"),
    "attn_output_gate": (True, "attention with linear layers has a gate here"),
    "output_gate_type": ("swish", "the gate of linear layers is silu"),
    "mamba_ssm_dtype": ("float32", "states are float32 here"),
    "use_mrope": (False, "positions here are one number"),
    "is_encoder_decoder": (False, "models here are decoders"),
    "add_cross_attention": (False, "models here are decoders"),
    "cross_attention_hidden_size": (None, "models here are decoders"),
    "pruned_heads": ({}, "heads are whole here"),
    "per_layer_config": (None, "layers differ in their window only"),
    "quantization_config": (None, "only float32, bfloat16 and float16 are read"),
    "auto_map": (None, "its own program may compute anything"),
    "lm_head_bias": (False, "heads here have no bias"),
    "mlp_only_layers": ([], "all layers have experts here, or none"),
    "decoder_sparse_step": (1, "all layers have experts here, or none"),
    "router_jitter_noise": (0, "routers here have no noise"),
    "n_group": (1, "routers here choose among all experts"),
    "topk_group": (1, "routers here choose among all experts"),
    "swiglu_limit": (7, "the clamp is 7 here"),
    "swiglu_alpha": (1.702, "the factor in the sigmoid is 1.702 here"),
}
"""Fields that ask for what models here have not, but for this value and null."""

HARMLESS = frozenset(
    (
        # What it is, and who wrote it.
        "architectures _name_or_path name_or_path _commit_hash transformers_version "
        "unsloth_version unsloth_fixed tokenizer_class is_llama_config "
        "transformers.js_config "
        # Types of numbers: those of the tensors count. How random weights were drawn.
        "torch_dtype dtype use_bfloat16 initializer_range "
        # Ids of tokens, which the tokenizer's files give.
        "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id "
        "decoder_start_token_id tie_encoder_decoder is_decoder prefix "
        # How transformers computes the same, and what it returns.
        "use_cache cache_implementation pretraining_tp torchscript "
        "attn_implementation _attn_implementation _attn_implementation_autoset "
        "chunk_size_feed_forward output_attentions output_hidden_states "
        "output_scores return_dict return_dict_in_generate max_sequence_length "
        "tie_last_hidden_states "
        # Of heads for other tasks, whose tensors would be refused.
        "id2label label2id num_labels problem_type finetuning_task "
        "task_specific_params "
        # Defaults of transformers' generation; tools/generate.py has flags of its own.
        "max_length min_length do_sample early_stopping num_beams num_beam_groups "
        "diversity_penalty temperature top_k top_p typical_p repetition_penalty "
        "length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size "
        "bad_words_ids num_return_sequences forced_bos_token_id forced_eos_token_id "
        "remove_invalid_values exponential_decay_length_penalty suppress_tokens "
        "begin_suppress_tokens "
        # Which no program reads, or only one that trains.
        "tf_legacy_loss document_attention language_model_only full_attn_mod "
        "interpolate_factor initial_context_length experts_per_token "
        # Of the balance loss, which config.train.experts_balance asks for.
        "output_router_logits router_aux_loss_coef"
    ).split()
    + list(DROPOUTS)
)
"""Fields that change no logits and no training here; exports keep them."""

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
    has_rope_of_kinds: whether RoPE is scaled in layers without a window only.
    rotated_part: of heads, where RoPE may rotate a part; what a config.json says that
      says none.
    scalings: of RoPE, by their names in config.json.
    has_query_scale: whether queries are multiplied by a factor of their position.
    ignored: fields of published files that change no logits in this family.
    activations: names of older versions, with those of today.
    fused: matrices that lie in one tensor, by name, and the tensor.
    experts: of families with them, their sizes of config.json, and ours.
    experts_form: how their tensors are kept, of `names.EXPERTS`.
    """

    model_type: str
    architecture: str
    fixed: Mapping[str, Any] = _NO_FIELDS
    always: Mapping[str, Any] = _NO_FIELDS
    older: Mapping[str, Any] = _NO_FIELDS
    may_lack: tuple[str, ...] = ()
    has_scaled_embeddings: bool = False
    has_rope_of_kinds: bool = False
    rotated_part: float = 0.0
    scalings: tuple[str, ...] = ("default", "linear", "yarn", "llama3")
    has_query_scale: bool = False
    ignored: tuple[str, ...] = ()
    activations: Mapping[str, str] = _NO_FIELDS
    fused: Mapping[str, str] = _NO_FIELDS
    experts: Mapping[str, str] = _NO_FIELDS
    experts_form: str = "by_expert"

    @functools.cached_property
    def config_class(self) -> Any:
        """Returns transformers' class of the family's configs."""
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # no PyTorch is fine
        from transformers import AutoConfig

        return type(AutoConfig.for_model(self.model_type))

    @functools.cached_property
    def fields(self) -> frozenset[str]:
        """Returns the fields of config.json that its models may be made from."""
        own = {field.name for field in dataclasses.fields(self.config_class)}
        of_all = "head_dim", "rope_theta", "rope_scaling"
        return frozenset(own.union(of_all, self.older) - self.always.keys())

    def value(self, name: str, given: Mapping[str, Any]) -> Any:
        """Returns the value of a field of config.json, or what transformers takes.

        given: fields of config.json.
        """
        if given.get(name) is None and (name not in given or name not in HAVE_NULL):
            return self.older.get(name, getattr(self.config_class, name, None))
        value = given[name]
        is_older = name == "hidden_act" and isinstance(value, str)
        return self.activations.get(value, value) if is_older else value

    def thetas(self, given: Mapping[str, Any]) -> float | Mapping[str, float]:
        """Returns the base of RoPE where none is said: of all layers, or of kinds."""
        theta = self.config_class.default_theta
        if not self.has_rope_of_kinds:
            return theta
        # Versions before 5 wrote one for both kinds.
        return dict.fromkeys(("global", "local"), given.get("rope_theta") or theta)


FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Matrices of some families that hold others, one below the other."""
_GEMMA_NORMS = {"norms": "both", "norm_unit_offset": True}
_OLMO_NORMS = {"norms": "after", "qk_norm": "all"}
_CHOSEN = {"num_experts_per_tok": "experts_per_token"}
_EXPERTS = _CHOSEN | {"num_experts": "experts"}
_LOCAL_EXPERTS = _CHOSEN | {"num_local_experts": "experts"}
_NARROW_EXPERTS = _EXPERTS | {"moe_intermediate_size": "feed_forward_size"}
_DRAFTS = "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"
_HYBRID = {"qk_norm": "head", "norm_unit_offset": True, "attention_gate": True}

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
    Family("olmo2", "Olmo2ForCausalLM", _OLMO_NORMS),
    Family("olmo3", "Olmo3ForCausalLM", _OLMO_NORMS, has_rope_of_kinds=True),
    Family("ministral", "MinistralForCausalLM"),
    Family("ministral3", "Ministral3ForCausalLM", has_query_scale=True),
    Family("smollm3", "SmolLM3ForCausalLM", ignored=("max_window_layers",)),
    Family("granite", "GraniteForCausalLM"),
    Family(
        "gemma",
        "GemmaForCausalLM",
        {"norm_unit_offset": True},
        may_lack=("num_attention_heads",),
        has_scaled_embeddings=True,
        activations={"gelu": "gelu_pytorch_tanh"},
    ),
    Family("seed_oss", "SeedOssForCausalLM"),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        older={"partial_rotary_factor": 1.0},
        rotated_part=1.0,
        scalings=("default", "longrope"),
        fused={part: whole for whole, parts in FUSED.items() for part in parts},
    ),
    Family(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        _HYBRID,
        older={"partial_rotary_factor": 0.25, "full_attention_interval": 4},
        rotated_part=0.25,
        scalings=("default", "yarn"),
        ignored=_DRAFTS,
    ),
    Family(
        "mixtral", "MixtralForCausalLM", experts=_LOCAL_EXPERTS, experts_form="mixtral"
    ),
    Family("olmoe", "OlmoeForCausalLM", {"qk_norm": "all"}, experts=_EXPERTS),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {"qk_norm": "head"},
        ignored=("max_window_layers",),
        experts=_NARROW_EXPERTS,
    ),
    Family(
        "gpt_oss",
        "GptOssForCausalLM",
        {"attention_sinks": True, "expert_bias": True, "activation": "clamped"},
        experts=_LOCAL_EXPERTS,
        experts_form="gpt_oss",
    ),
    Family(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        _HYBRID | {"shared_expert_gate": True},
        older={"partial_rotary_factor": 0.25, "full_attention_interval": 4},
        rotated_part=0.25,
        scalings=("default", "yarn"),
        ignored=(*_DRAFTS, "intermediate_size"),
        experts=_NARROW_EXPERTS
        | {"shared_expert_intermediate_size": "shared_expert_size"},
    ),
    Family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        {"router": "sigmoid", "output_bias": False},
        always={"norm_topk_prob": True},
        older={"partial_rotary_factor": 0.5, "num_nextn_predict_layers": 0},
        rotated_part=0.5,
        scalings=("default", "yarn"),
        experts=_CHOSEN
        | {
            "n_routed_experts": "experts",
            "moe_intermediate_size": "feed_forward_size",
            "first_k_dense_replace": "dense_layers",
            "intermediate_size": "dense_feed_forward_size",
        },
        experts_form="glm",
    ),
)
BY_TYPE = {family.model_type: family for family in FAMILIES}

EXPERTS = "num_experts", "n_routed_experts", "num_local_experts"
"""Fields above 0 where the feed-forward is a mixture of experts."""

_LATENT = "its keys and values are of a latent state (MLA)"
LACKING = {
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "glm_moe_dsa": _LATENT,
    "kimi_k2": _LATENT,
    "nemotron_h": "its layers have a state space (Mamba)",
    "qwen3_next": "its linear layers' projections lie interleaved in one tensor",
    "exaone": "its tensors have names of its own",
    "exaone4": "its layers without a window have no RoPE",
    "gemma4": "layers have embeddings of their own, and share keys and values",
    "internlm2": "its program is its own, and queries, keys and values are interleaved",
    "mimo": "it has heads for tokens further ahead, of its own program",
    "stablelm": "its norms subtract the mean and have biases",
}
"""What types of models have that models here have not."""
