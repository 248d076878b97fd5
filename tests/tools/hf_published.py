"""Fields of config.json as published, one model of each family or more.

Only what bears on the model, and some of what does not.
"""

from models.rope import RopeScaling

LLAMA1_7B = {"model_type": "llama", "hidden_act": "silu", "torch_dtype": "float16"}
LLAMA1_7B |= {"hidden_size": 4096, "intermediate_size": 11008, "vocab_size": 32000}
LLAMA1_7B |= {"num_attention_heads": 32, "num_hidden_layers": 32, "rms_norm_eps": 1e-6}
LLAMA1_7B |= {"architectures": ["LlamaForCausalLM"], "max_sequence_length": 2048}
LLAMA1_7B |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA1_7B |= {"initializer_range": 0.02, "transformers_version": "4", "use_cache": True}

LLAMA2_70B = LLAMA1_7B | {"hidden_size": 8192, "intermediate_size": 28672}
LLAMA2_70B |= {"num_attention_heads": 64, "num_hidden_layers": 80}
LLAMA2_70B |= {"num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-5}
LLAMA2_70B |= {"rope_scaling": None, "tie_word_embeddings": False}

LLAMA3_8B = LLAMA2_70B | {"hidden_size": 4096, "intermediate_size": 14336}
LLAMA3_8B |= {"num_attention_heads": 32, "num_hidden_layers": 32, "mlp_bias": False}
LLAMA3_8B |= {"attention_bias": False, "rope_theta": 500000.0, "vocab_size": 128256}

LLAMA32_1B = LLAMA3_8B | {"hidden_size": 2048, "intermediate_size": 8192}
LLAMA32_1B |= {"num_hidden_layers": 16, "head_dim": 64, "tie_word_embeddings": True}

MISTRAL = LLAMA3_8B | {"model_type": "mistral", "sliding_window": 4096}
MISTRAL |= {"vocab_size": 32000, "rope_theta": 1e4, "max_position_embeddings": 32768}
del MISTRAL["num_key_value_heads"]  # 8, where it is missing
MISTRAL3 = MISTRAL | {"sliding_window": None, "rope_theta": 1e6, "vocab_size": 32768}
MISTRAL_NEMO = MISTRAL3 | {
    "head_dim": 128,
    "hidden_size": 5120,
    "num_hidden_layers": 40,
}

QWEN25_7B = {"model_type": "qwen2", "attention_dropout": 0.0, "hidden_act": "silu"}
QWEN25_7B |= {"hidden_size": 3584, "intermediate_size": 18944, "vocab_size": 152064}
QWEN25_7B |= {"max_position_embeddings": 131072, "max_window_layers": 28}
QWEN25_7B |= {"num_attention_heads": 28, "num_hidden_layers": 28, "rms_norm_eps": 1e-6}
QWEN25_7B |= {"num_key_value_heads": 4, "rope_theta": 1e6, "sliding_window": 131072}
QWEN25_7B |= {"use_sliding_window": False, "use_mrope": False}

QWEN3_8B = QWEN25_7B | {"model_type": "qwen3", "attention_bias": False, "head_dim": 128}
QWEN3_8B |= {"hidden_size": 4096, "intermediate_size": 12288, "vocab_size": 151936}
QWEN3_8B |= {"num_attention_heads": 32, "num_hidden_layers": 36, "sliding_window": None}
QWEN3_8B |= {"num_key_value_heads": 8, "rope_theta": 1000000, "rope_scaling": None}

GEMMA2_27B = {"model_type": "gemma2", "attention_bias": False, "attention_dropout": 0.0}
GEMMA2_27B |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GEMMA2_27B |= {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid"}
GEMMA2_27B |= {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 144}
GEMMA2_27B |= {"hidden_size": 4608, "intermediate_size": 36864, "vocab_size": 256000}
GEMMA2_27B |= {"num_attention_heads": 32, "num_hidden_layers": 46, "head_dim": 128}
GEMMA2_27B |= {"num_key_value_heads": 16, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
GEMMA2_27B |= {"sliding_window": 4096, "sliding_window_size": 4096}

GEMMA3_1B = {"model_type": "gemma3_text", "attn_logit_softcapping": None}
GEMMA3_1B |= {"final_logit_softcapping": None, "head_dim": 256, "hidden_size": 1152}
GEMMA3_1B |= {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256}
GEMMA3_1B |= {"intermediate_size": 6912, "num_attention_heads": 4, "vocab_size": 262144}
GEMMA3_1B |= {"num_hidden_layers": 26, "num_key_value_heads": 1, "rms_norm_eps": 1e-6}
GEMMA3_1B |= {
    "rope_local_base_freq": 10000,
    "rope_theta": 1000000,
    "rope_scaling": None,
}
GEMMA3_1B |= {"sliding_window": 512, "sliding_window_pattern": 6}

# All that is said of the text of the 12B, and of the images beside it.
GEMMA3_TEXT = {"model_type": "gemma3_text", "hidden_size": 3840, "sliding_window": 1024}
GEMMA3_TEXT |= {"intermediate_size": 15360, "num_attention_heads": 16}
GEMMA3_TEXT |= {"num_hidden_layers": 48, "num_key_value_heads": 8}
GEMMA3_TEXT |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
GEMMA3_12B = {"model_type": "gemma3", "text_config": GEMMA3_TEXT, "vision_config": {}}
GEMMA3_12B |= {"architectures": ["Gemma3ForConditionalGeneration"]}
GEMMA3_12B |= {"boi_token_index": 255999, "eoi_token_index": 256000}
GEMMA3_12B |= {"image_token_index": 262144, "mm_tokens_per_image": 256}
GEMMA3_12B |= {"eos_token_id": [1, 106], "torch_dtype": "bfloat16"}

OLMO2_7B = {"model_type": "olmo2", "attention_bias": False, "attention_dropout": 0.0}
OLMO2_7B |= {"hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008}
OLMO2_7B |= {"num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 100352}
OLMO2_7B |= {"num_key_value_heads": 32, "rms_norm_eps": 1e-6, "rope_theta": 500000}
OLMO2_7B |= {"rope_scaling": None, "tie_word_embeddings": False}

GEMMA = {"norms": "both", "norm_unit_offset": True, "activation": "gelu_tanh"}
GEMMA |= {"tied_embeddings": True}
GEMMA2 = GEMMA | {"layer_pattern": "wf", "attention_soft_cap": 50.0}
GEMMA2 |= {"logit_soft_cap": 30.0, "attention_scale": 1 / 12}
GEMMA3 = GEMMA | {
    "layer_pattern": "wwwwwf",
    "window_rope_theta": 1e4,
    "qk_norm": "head",
}
PUBLISHED = {
    "llama1": (LLAMA1_7B, (4096, 11008, 32, 32, 32, 128, 1e4, 1e-6), 32000, {}),
    "llama2": (LLAMA2_70B, (8192, 28672, 80, 64, 8, 128, 1e4, 1e-5), 32000, {}),
    "llama3": (LLAMA3_8B, (4096, 14336, 32, 32, 8, 128, 5e5, 1e-5), 128256, {}),
    "llama3.2": (
        LLAMA32_1B,
        (2048, 8192, 16, 32, 8, 64, 5e5, 1e-5),
        128256,
        {"tied_embeddings": True},
    ),
    "mistral": (
        MISTRAL,
        (4096, 14336, 32, 32, 8, 128, 1e4, 1e-5),
        32000,
        {"layer_pattern": "w", "window": 4096},
    ),
    "mistral3": (MISTRAL3, (4096, 14336, 32, 32, 8, 128, 1e6, 1e-5), 32768, {}),
    "nemo": (MISTRAL_NEMO, (5120, 14336, 40, 32, 8, 128, 1e6, 1e-5), 32768, {}),
    "qwen2.5": (
        QWEN25_7B,
        (3584, 18944, 28, 28, 4, 128, 1e6, 1e-6),
        152064,
        {"qkv_bias": True},
    ),
    "qwen3": (
        QWEN3_8B,
        (4096, 12288, 36, 32, 8, 128, 1e6, 1e-6),
        151936,
        {"qk_norm": "head"},
    ),
    "gemma2": (
        GEMMA2_27B,
        (4608, 36864, 46, 32, 16, 128, 1e4, 1e-6),
        256000,
        GEMMA2 | {"window": 4096, "embedding_scale": 4608**0.5},
    ),
    "gemma3_1b": (
        GEMMA3_1B,
        (1152, 6912, 26, 4, 1, 256, 1e6, 1e-6),
        262144,
        GEMMA3 | {"window": 512, "embedding_scale": 1152**0.5},
    ),
    "gemma3_12b": (
        GEMMA3_12B,
        (3840, 15360, 48, 16, 8, 256, 1e6, 1e-6),
        262208,
        GEMMA3
        | {"window": 1024, "embedding_scale": 3840**0.5}
        | {"rope_scaling": RopeScaling("linear", 8.0)},
    ),
    "olmo2": (
        OLMO2_7B,
        (4096, 11008, 32, 32, 32, 128, 5e5, 1e-6),
        100352,
        {"norms": "after", "qk_norm": "all"},
    ),
}
"""By name: config.json, sizes of the record in its order, vocabulary, and parts."""
