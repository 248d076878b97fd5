"""config.json of LLaMA 1, 2 and 3, as published, and what models here have not."""

import pytest

from models.llama import LlamaConfig
from models.rope import RopeScaling
from tools.hf_config import config_fields, has_tied_head, llama_config

# Only what bears on the model, of each published config.json.
LLAMA1_7B = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-06,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}
LLAMA2_70B = LLAMA1_7B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
LLAMA3_8B = LLAMA2_70B | {
    "attention_bias": False,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}


@pytest.mark.parametrize(
    "fields, expected",
    [
        (
            LLAMA1_7B,
            LlamaConfig(4096, 11008, 32, 32, 32, 128, 10_000.0, 1e-6, vocab_size=32000),
        ),
        (
            LLAMA2_70B,
            LlamaConfig(8192, 28672, 80, 64, 8, 128, 10_000.0, 1e-5, vocab_size=32000),
        ),
        (
            LLAMA3_8B,
            LlamaConfig(
                4096, 14336, 32, 32, 8, 128, 500_000.0, 1e-5, vocab_size=128256
            ),
        ),
        (
            LLAMA3_8B | {"head_dim": 64},
            LlamaConfig(4096, 14336, 32, 32, 8, 64, 500_000.0, 1e-5, vocab_size=128256),
        ),
    ],
)
def test_published_models_have_their_sizes(fields, expected):
    assert llama_config(fields) == expected
    assert not has_tied_head(fields)


def test_rope_is_read_from_old_and_new_fields():
    new = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    plain = {name: v for name, v in LLAMA3_8B.items() if name != "rope_theta"}
    assert llama_config(plain | new) == llama_config(LLAMA3_8B)


@pytest.mark.parametrize(
    "changed, complaint",
    [
        ({"model_type": "qwen2"}, "model_type='qwen2' (only 'llama')"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' (only 'silu')"),
        ({"attention_bias": True}, "attention_bias=True (only False)"),
        ({"mlp_bias": True}, "mlp_bias=True (only False)"),
        ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
        ({"vocab_size": None}, "vocab_size=None (a number is needed)"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "scaling 'dynamic'"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2, "mscale": 0.7}},
            "scaling 'yarn' with mscale",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3"}},
            "original_max_position_embeddings=0",
        ),
        ({"num_key_value_heads": 5}, "num_kv_heads=5"),
    ],
)
def test_what_models_here_have_not_is_refused_by_field(changed, complaint):
    with pytest.raises(ValueError) as caught:
        llama_config(LLAMA3_8B | changed)
    assert complaint in str(caught.value)


LLAMA31_8B = LLAMA3_8B | {
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
YARN = LLAMA3_8B | {
    "max_position_embeddings": 4096,
    "rope_scaling": {"type": "yarn", "factor": 16, "attention_factor": None},
}
LINEAR = LLAMA2_70B | {"rope_scaling": {"type": "linear", "factor": 4}}


@pytest.mark.parametrize(
    "fields, expected",
    [
        (LLAMA31_8B, RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)),
        (YARN, RopeScaling("yarn", 16.0, 4096)),
        (LINEAR, RopeScaling("linear", 4.0)),
    ],
)
def test_scaled_rope_is_read_as_published(fields, expected):
    scaling = llama_config(fields).rope_scaling
    assert scaling == expected
    assert isinstance(scaling.factor, float)


def test_ntk_is_written_as_the_theta_that_it_is():
    config = LlamaConfig(
        64,
        128,
        2,
        4,
        2,
        16,
        1e4,
        rope_scaling=RopeScaling("ntk", 8.0),
        vocab_size=300,
    )
    written = config_fields(config, "float32", {})
    assert written["rope_scaling"] is None
    plain = llama_config(written)
    frequencies = plain.rope_scaling.frequencies(16, plain.rope_theta)
    scaled = config.rope_scaling.frequencies(16, config.rope_theta)
    assert frequencies == pytest.approx(scaled, rel=1e-12)


@pytest.mark.parametrize(
    "fields", [LLAMA1_7B, LLAMA2_70B, LLAMA3_8B, LLAMA31_8B, YARN, LINEAR]
)
def test_what_is_written_is_read_as_the_same_model(fields):
    config = llama_config(fields)
    written = config_fields(config, "bfloat16", {})
    assert llama_config(written) == config
    assert written["torch_dtype"] == "bfloat16" and not has_tied_head(written)
    assert written["bos_token_id"] is written["eos_token_id"] is None


def test_fields_of_the_original_are_kept_but_for_the_models_own():
    original = LLAMA3_8B | {
        "bos_token_id": 128000,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "llama3"},
        "dtype": "float16",
    }
    config = LlamaConfig(64, 128, 2, 4, 2, 16, 1e6, vocab_size=300)
    written = config_fields(config, "float32", original)
    assert llama_config(written) == config
    assert (written["bos_token_id"], written["max_position_embeddings"]) == (
        128000,
        8192,
    )
    assert written["tie_word_embeddings"] is False
    assert written["torch_dtype"] == "float32"
    assert written.keys().isdisjoint({"rope_parameters", "dtype"})
