"""config.json of LLaMA 1, 2 and 3, as published, and what models here have not."""

import dataclasses

import pytest

from data.json_text import parse_json
from models.rope import RopeScaling
from models.sizes import LanguageModelConfig
from tests.fuzzing import altered, fuzz
from tools.lib.hf.config import config_fields, has_tied_head, llama_config

# Only what bears on the model, of each published config.json.
LLAMA1_7B = {"model_type": "llama", "hidden_act": "silu", "torch_dtype": "float16"}
LLAMA1_7B |= {"hidden_size": 4096, "intermediate_size": 11008, "vocab_size": 32000}
LLAMA1_7B |= {"num_attention_heads": 32, "num_hidden_layers": 32, "rms_norm_eps": 1e-6}

LLAMA2_70B = LLAMA1_7B | {"hidden_size": 8192, "intermediate_size": 28672}
LLAMA2_70B |= {"num_attention_heads": 64, "num_hidden_layers": 80}
LLAMA2_70B |= {"num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-5}
LLAMA2_70B |= {"rope_scaling": None, "tie_word_embeddings": False}

LLAMA3_8B = LLAMA2_70B | {"hidden_size": 4096, "intermediate_size": 14336}
LLAMA3_8B |= {"num_attention_heads": 32, "num_hidden_layers": 32}
LLAMA3_8B |= {"attention_bias": False, "rope_theta": 500000.0, "vocab_size": 128256}


@pytest.mark.parametrize(
    "fields, sizes, vocab_size",
    [
        (LLAMA1_7B, (4096, 11008, 32, 32, 32, 128, 1e4, 1e-6), 32000),
        (LLAMA2_70B, (8192, 28672, 80, 64, 8, 128, 1e4, 1e-5), 32000),
        (LLAMA3_8B, (4096, 14336, 32, 32, 8, 128, 5e5, 1e-5), 128256),
        (LLAMA3_8B | {"head_dim": 64}, (4096, 14336, 32, 32, 8, 64, 5e5, 1e-5), 128256),
    ],
)
def test_published_models_have_their_sizes(fields, sizes, vocab_size):
    assert llama_config(fields) == LanguageModelConfig(*sizes, vocab_size=vocab_size)
    assert not has_tied_head(fields)


def test_rope_is_read_from_old_and_new_fields():
    new = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    plain = {name: v for name, v in LLAMA3_8B.items() if name != "rope_theta"}
    assert llama_config(plain | new) == llama_config(LLAMA3_8B)


def scaled(**scaling):
    return {"rope_scaling": scaling}


# Fields that are others than those of LLaMA 3 8B, and what is said of them.
BAD = [
    ({"model_type": "qwen2"}, "model_type='qwen2' (only 'llama')"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu' (only 'silu')"),
    ({"attention_bias": True}, "attention_bias=True (only False)"),
    ({"mlp_bias": True}, "mlp_bias=True (only False)"),
    ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
    ({"vocab_size": None}, "vocab_size=None (a whole number from 1"),
    ({"num_key_value_heads": 5}, "num_kv_heads=5"),
    # Neither text nor truth values are numbers, and nothing is divided by 0.
    ({"vocab_size": "32000"}, "vocab_size='32000' (a whole number"),
    ({"num_hidden_layers": True}, "num_hidden_layers=True (a whole number"),
    ({"hidden_size": 10**400}, "(a whole number from 1 to 2147483647 is needed)"),
    ({"num_attention_heads": 0}, "num_attention_heads=0 (a whole number"),
    ({"num_key_value_heads": 0}, "num_key_value_heads=0 (a whole number"),
    ({"num_key_value_heads": 8.0}, "num_key_value_heads=8.0 (a whole number"),
    ({"head_dim": "128"}, "head_dim='128' (a whole number"),
    ({"head_dim": -2}, "head_dim=-2 (a whole number"),
    (
        {"tie_word_embeddings": "false"},
        "tie_word_embeddings='false', not true or false",
    ),
    ({"tie_word_embeddings": 0}, "tie_word_embeddings=0, not true or false"),
    ({"tie_word_embeddings": []}, "tie_word_embeddings=[], not true or false"),
    ({"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6' (a number is needed)"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps=inf (a number is needed)"),
    ({"rope_theta": "10000"}, "rope_theta='10000' of RoPE"),
    ({"rope_theta": 10**400}, "of RoPE, where a number is needed"),
    ({"partial_rotary_factor": 0.5}, "has a partial_rotary_factor: only whole"),
    ({"rope_scaling": ["linear"]}, "rope_scaling=['linear'], no object"),
    ({"rope_scaling": False}, "rope_scaling=False, no object"),
    (scaled(type="dynamic", factor=2), "scaling 'dynamic'"),
    (scaled(type=["yarn"]), "RoPE scaling ['yarn'] (only"),
    (scaled(factor=8.0), "RoPE scaling None (only default, linear, yarn, llama3)"),
    (scaled(full_attention={"rope_type": "default"}), "RoPE scaling None (only def"),
    (scaled(type="default", odd=1), "RoPE scaling 'default' with 'odd'"),
    (scaled(rope_type="yarn", factor=2, mscale=0.7), "scaling 'yarn' with 'mscale'"),
    (scaled(type="linear"), "scaling 'linear' without factor"),
    (
        {"rope_parameters": {"rope_type": "llama3", "factor": 8}},
        "without high_freq_factor, low_freq_factor, original_max",
    ),
    (scaled(type="linear", factor="4"), "factor='4' of RoPE"),
    (scaled(type="linear", factor=True), "factor=True of RoPE"),
    (
        scaled(type="yarn", factor=4) | {"max_position_embeddings": "4096"},
        "original_max_position_embeddings='4096' of RoPE",
    ),
    (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "'rope_theta' twice, as 500000.0 and 10000.0",
    ),
    (scaled(type="linear", rope_type="yarn"), "'rope_type' twice, as 'linear' and 'ya"),
]


@pytest.mark.parametrize("changed, complaint", BAD)
def test_what_models_here_have_not_is_refused_by_field(changed, complaint):
    with pytest.raises(ValueError) as caught:
        llama_config(LLAMA3_8B | changed)
        has_tied_head(LLAMA3_8B | changed)
    assert complaint in str(caught.value)


LLAMA31_8B = LLAMA3_8B | {"max_position_embeddings": 131072}
LLAMA31_8B |= scaled(
    factor=8.0,
    high_freq_factor=4.0,
    low_freq_factor=1.0,
    original_max_position_embeddings=8192,
    rope_type="llama3",
)
YARN = LLAMA3_8B | {"max_position_embeddings": 4096}
YARN |= scaled(type="yarn", factor=16, attention_factor=None)
LINEAR = LLAMA2_70B | scaled(type="linear", factor=4)
SCALED = [
    (LLAMA31_8B, RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)),
    (YARN, RopeScaling("yarn", 16.0, 4096)),
    (LINEAR, RopeScaling("linear", 4.0)),
]


@pytest.mark.parametrize("fields, expected", SCALED)
def test_scaled_rope_is_read_as_published(fields, expected):
    scaling = llama_config(fields).rope_scaling
    assert scaling == expected
    assert isinstance(scaling.factor, float)


def test_null_is_as_good_as_missing():
    more = ("num_key_value_heads", "head_dim", "rope_theta", "rope_scaling")
    more += ("rope_parameters", "rms_norm_eps", "tie_word_embeddings")
    nothing = dict.fromkeys(more) | {"partial_rotary_factor": 1.0}
    assert llama_config(LLAMA1_7B | nothing) == llama_config(LLAMA1_7B)
    assert not has_tied_head(LLAMA1_7B | nothing)


# Fields of config.json, and ours.
NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "feed_forward_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_epsilon",
    "rope_theta": "rope_theta",
}


@pytest.mark.parametrize(
    "attempts", [300, pytest.param(10_000, marks=pytest.mark.slow)]
)
def test_an_altered_config_is_what_it_says_or_refused(attempts):
    whole = LLAMA31_8B | {"head_dim": 128, "tie_word_embeddings": False}
    said = {}

    def attempt(rng):
        said.clear()
        said.update(parse_json(altered(whole, rng)))
        return llama_config(said), has_tied_head(said)

    def check(found):
        config, is_tied = found
        known = {name: value for name, value in said.items() if value is not None}
        size, heads = known["hidden_size"], known["num_attention_heads"]
        told = {"num_key_value_heads": heads, "head_dim": size // heads}
        told |= {"rms_norm_eps": 1e-6, "rope_theta": 1e4} | known
        assert {theirs: getattr(config, ours) for theirs, ours in NAMES.items()} == {
            theirs: told[theirs] for theirs in NAMES
        }
        assert is_tied is known.get("tie_word_embeddings", False)
        scaling = dataclasses.asdict(config.rope_scaling)
        told = {"rope_type": "none"} | known.get("rope_scaling", {})
        told = {name: value for name, value in told.items() if value is not None}
        assert scaling | told == scaling
        assert all(type(value) in (int, float, str, bool) for value in scaling.values())

    fuzz(attempts, attempt, check, most_bytes=20 << 20)


def test_ntk_is_written_as_the_theta_that_it_is():
    ntk = RopeScaling("ntk", 8.0)
    config = LanguageModelConfig(
        64, 128, 2, 4, 2, 16, 1e4, rope_scaling=ntk, vocab_size=300
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
    config = LanguageModelConfig(64, 128, 2, 4, 2, 16, 1e6, vocab_size=300)
    written = config_fields(config, "float32", original)
    assert llama_config(written) == config
    others = {"tie_word_embeddings": False, "torch_dtype": "float32"}
    others |= {"bos_token_id": 128000, "max_position_embeddings": 8192}
    assert {name: written[name] for name in others} == others
    assert written.keys().isdisjoint({"rope_parameters", "dtype"})
