"""Models of today's families in the sizes of tests: the fields in which they differ."""

LAYERS = {"model__num_layers": 3, "model__window": 5}

FAMILIES = {
    "llama": {},
    "mistral": LAYERS | {"model__layer_pattern": "w"},
    "qwen2": {"model__qkv_bias": True, "model__tied_embeddings": True},
    "qwen3": {"model__qk_norm": "head", "model__rope_theta": 1e6},
    "gemma2": LAYERS
    | {
        "model__layer_pattern": "wf",
        "model__attention_scale": 0.3,
        "model__attention_soft_cap": 2.0,
        "model__norms": "both",
        "model__norm_unit_offset": True,
        "model__activation": "gelu_tanh",
        "model__tied_embeddings": True,
        "model__embedding_scale": 6.0,
        "model__logit_soft_cap": 3.0,
    },
    "gemma3": LAYERS
    | {
        "model__layer_pattern": "wwf",
        "model__num_layers": 4,
        "model__window_rope_theta": 1e3,
        "rope_scaling__rope_type": "linear",
        "rope_scaling__factor": 8.0,
        "model__qk_norm": "head",
        "model__norms": "both",
        "model__norm_unit_offset": True,
        "model__activation": "gelu_tanh",
        "model__tied_embeddings": True,
        "model__embedding_scale": 6.0,
    },
    "qwen3_5": {
        "model__num_layers": 4,
        "model__layer_pattern": "dfd",
        "model__delta_key_heads": 2,
        "model__delta_value_heads": 4,
        "model__delta_key_dim": 6,
        "model__delta_value_dim": 5,
        "model__delta_convolution": 4,
        "model__attention_gate": True,
        # Else norms of states that are nearly empty make rounding large.
        "model__norm_epsilon": 1e-2,
        "model__rotary_fraction": 0.5,
        "model__qk_norm": "head",
        "model__norm_unit_offset": True,
    },
    "olmo2": {"model__norms": "after", "model__qk_norm": "all"},
    "smollm3": LAYERS
    | {
        "model__layer_pattern": "fW",
        "model__rotary_fraction": 0.5,
        "model__residual_scale": 0.5,
    },
    "gpt_oss": LAYERS
    | {
        "model__layer_pattern": "wf",
        "model__attention_sinks": True,
        "model__qkv_bias": True,
        "model__output_bias": True,
        "model__logit_scale": 0.5,
        "rope_scaling__rope_type": "yarn",
        "rope_scaling__factor": 4.0,
        "rope_scaling__original_max_position_embeddings": 64,
        "rope_scaling__truncate": False,
    },
}
"""By name; gpt-oss and SmolLM3 have factors and RoPE here that only others have."""
FAMILIES["every_part"] = FAMILIES["gpt_oss"] | FAMILIES["gemma3"] | FAMILIES["gemma2"]
