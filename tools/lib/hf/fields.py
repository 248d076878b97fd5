"""Every field of config.json that is known: made from, of one value only, or harmless.

A field that is not here is refused, as is one that the family has no use for and that
asks for something.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from data.json_text import is_number

LARGEST = (1 << 31) - 1
MOST_LAYERS = 1 << 16


@dataclass(frozen=True)
class Read:
    """A field that models of some families are made from.

    is_right: what it may be, beside null.
    needed: that in words.
    nothing: what it may be, beside null, in families that are not made from it.
    same_as: a field whose value it may have there too.
    has_null: whether null is a value of its own, and not as good as missing.
    """

    is_right: Callable[[Any], bool]
    needed: str
    nothing: Any = None
    same_as: str = ""
    has_null: bool = False


@dataclass(frozen=True)
class Only:
    """A field that asks for what models here have not, but for this value and null."""

    value: Any
    remedy: str


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= LARGEST


def _are_layers(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST_LAYERS


def _is_above_zero(value: Any) -> bool:
    return is_number(value) and value > 0


def _is_truth(value: Any) -> bool:
    return isinstance(value, bool)


LAYER_TYPES = {"sliding_attention": "w", "full_attention": "f"}
"""Kinds of layers of config.json, and ours."""
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def _are_layer_types(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(kind, str) and kind in LAYER_TYPES for kind in value
    )


def _is_activation(value: Any) -> bool:
    return isinstance(value, str) and value in ACTIVATIONS


_A_SIZE = f"a whole number from 1 to {LARGEST} is needed"
_SIZE = Read(_is_size, _A_SIZE)
_SIZE_OR_NULL = Read(_is_size, _A_SIZE, has_null=True)
_LAYERS = Read(_are_layers, f"a whole number up to {MOST_LAYERS} is needed")
_NUMBER = Read(_is_above_zero, "a number above 0 is needed")
_NUMBER_OR_NULL = Read(_is_above_zero, "a number above 0 is needed", has_null=True)
_TRUTH = Read(_is_truth, "true or false is needed", nothing=False)
_OBJECT = Read(lambda value: isinstance(value, dict), "an object is needed")
_AN_ACTIVATION = f"only {' or '.join(ACTIVATIONS)}"

MADE_FROM: dict[str, Read] = {
    "vocab_size": _SIZE,
    "hidden_size": _SIZE,
    "intermediate_size": _SIZE,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _SIZE,
    "num_key_value_heads": _SIZE_OR_NULL,
    "head_dim": _SIZE_OR_NULL,
    "rms_norm_eps": _NUMBER,
    "tie_word_embeddings": _TRUTH,
    "hidden_act": Read(_is_activation, _AN_ACTIVATION, same_as="hidden_activation"),
    "hidden_activation": Read(_is_activation, _AN_ACTIVATION, same_as="hidden_act"),
    "attention_bias": _TRUTH,
    "query_pre_attn_scalar": _NUMBER,
    "attn_logit_softcapping": _NUMBER_OR_NULL,
    "final_logit_softcapping": _NUMBER_OR_NULL,
    # Windows, as tools/lib/hf/windows.py reads them.
    "sliding_window": _SIZE_OR_NULL,
    "sliding_window_size": Read(_is_size, _A_SIZE, same_as="sliding_window"),
    "use_sliding_window": _TRUTH,
    "max_window_layers": _LAYERS,
    "sliding_window_pattern": _SIZE,
    "_sliding_window_pattern": Read(
        _is_size, _A_SIZE, same_as="sliding_window_pattern"
    ),
    "layer_types": Read(
        _are_layer_types, f"a list of {' and '.join(LAYER_TYPES)} is needed"
    ),
    # RoPE, as tools/lib/hf/rope.py reads it.
    "rope_theta": _NUMBER,
    "rope_local_base_freq": _NUMBER,
    "rope_scaling": _OBJECT,
    "rope_parameters": _OBJECT,
    "max_position_embeddings": _SIZE,  # for YaRN without its original context
}

ONE_VALUE: dict[str, Only] = {
    "attention_dropout": Only(0, "there is no dropout here: 0 trains without"),
    "mlp_bias": Only(False, "feed-forwards here have no biases"),
    "partial_rotary_factor": Only(1, "only whole heads are rotated here"),
    "use_bidirectional_attention": Only(False, "models here are causal"),
    "use_mrope": Only(False, "positions here are one number"),
    "is_encoder_decoder": Only(False, "models here are decoders"),
    "add_cross_attention": Only(False, "models here are decoders"),
    "cross_attention_hidden_size": Only(None, "models here are decoders"),
    "pruned_heads": Only({}, "heads are whole here"),
    "per_layer_config": Only(None, "layers differ in their window only"),
    "quantization_config": Only(None, "only float32, bfloat16 and float16 are read"),
    "auto_map": Only(None, "its own program may compute anything"),
}

HARMLESS = frozenset(
    # What it is, and who wrote it.
    ("architectures", "_name_or_path", "name_or_path", "_commit_hash")
    + ("transformers_version", "unsloth_version", "unsloth_fixed", "tokenizer_class")
    # Types of numbers: those of the tensors count. How random weights were drawn.
    + ("torch_dtype", "dtype", "use_bfloat16", "initializer_range")
    # Ids of tokens, which the tokenizer's files give.
    + ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id")
    + ("decoder_start_token_id", "tie_encoder_decoder", "is_decoder", "prefix")
    # How transformers computes the same, and what it returns.
    + ("use_cache", "cache_implementation", "pretraining_tp", "torchscript")
    + ("attn_implementation", "_attn_implementation", "_attn_implementation_autoset")
    + ("chunk_size_feed_forward", "output_attentions", "output_hidden_states")
    + ("output_scores", "return_dict", "return_dict_in_generate", "max_sequence_length")
    + ("tie_last_hidden_states",)
    # Of heads for other tasks, whose tensors would be refused.
    + ("id2label", "label2id", "num_labels", "problem_type", "finetuning_task")
    + ("task_specific_params",)
    # Defaults of transformers' generation; tools/generate.py has flags of its own.
    + ("max_length", "min_length", "do_sample", "early_stopping", "num_beams")
    + ("num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p")
    + ("typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size")
    + ("encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences")
    + ("forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values")
    + ("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens")
)
"""Fields that change no logits and no training here; exports keep them."""
