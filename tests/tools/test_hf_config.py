"""config.json of every family, as published, and what models here have not."""

import dataclasses
import json

import pytest

from data.json_text import parse_json
from models.rope import RopeScaling
from models.sizes import LanguageModelConfig
from tests.cases import pairs
from tests.fuzzing import altered, fuzz
from tests.tools import hf_published
from tests.tools.hf_published import (
    GEMMA2_27B,
    GEMMA3_1B,
    LLAMA2_70B,
    LLAMA3_8B,
    MISTRAL3,
    PUBLISHED,
    QWEN25_7B,
)
from tools.lib.hf.config import config_fields, model_config
from tools.lib.hf.families import BY_TYPE
from tools.lib.hf.multimodal import text_fields


@pytest.mark.parametrize(
    ("fields", "sizes", "vocab_size", "parts"), PUBLISHED.values(), ids=PUBLISHED
)
def test_published_models_are_read(fields, sizes, vocab_size, parts):
    expected = LanguageModelConfig(*sizes, vocab_size=vocab_size, **parts)
    assert model_config(fields) == expected
    # And as transformers 5 writes its fields.
    with_two = (
        "rope_local_base_freq" in BY_TYPE[text_fields(fields)["model_type"]].fields
    )
    if not with_two:
        rope = {"rope_type": "default", "rope_theta": fields.get("rope_theta", 1e4)}
        others = {n: v for n, v in fields.items() if n != "rope_theta"}
        others.pop("rope_scaling", None)
        assert model_config(others | {"rope_parameters": rope}) == expected


@pytest.mark.parametrize("fields", [case[0] for case in PUBLISHED.values()])
def test_what_is_written_is_read_as_the_same_model(fields):
    """With the original, and as the first family that has such a model."""
    config = model_config(fields)
    for original in (fields, {}):
        written = config_fields(config, "bfloat16", original)
        assert model_config(written) == config
        assert written["torch_dtype"] == "bfloat16" and "dtype" not in written
        text = text_fields(fields)
        if original or text["model_type"] != "mistral" or config.window:
            assert written["model_type"] == text["model_type"]
        family = BY_TYPE[written["model_type"]]
        assert written["architectures"] == [family.architecture]
        kept = {"bos_token_id", "eos_token_id", "pad_token_id"}
        assert {n: written[n] for n in kept} == {
            n: text_fields(original).get(n) for n in kept
        }


def kinds(types: str) -> list[str]:
    names = {"w": "sliding_attention", "f": "full_attention"}
    return [names[kind] for kind in types]


WINDOWS = [
    # Qwen's windows begin at a layer; where types are given, they count.
    ({"use_sliding_window": True, "max_window_layers": 3}, "fffww", "fffww"),
    ({"use_sliding_window": True, "max_window_layers": 0}, "wwwww", "w"),
    ({"use_sliding_window": True, "max_window_layers": 5}, "fffff", ""),
    ({"use_sliding_window": True, "layer_types": kinds("wwfww")}, "wwfww", "wwf"),
    ({"use_sliding_window": True, "layer_types": kinds("wfffw")}, "wfffw", "wfff"),
    ({"use_sliding_window": True, "layer_types": kinds("wffwf")}, "wffwf", "wff"),
    ({"use_sliding_window": False, "max_window_layers": 1}, "fffff", ""),
    ({"use_sliding_window": False, "layer_types": kinds("fffff")}, "fffff", ""),
]


@pytest.mark.parametrize(("changed", "layers", "pattern"), WINDOWS)
def test_kinds_of_layers_are_the_shortest_pattern_that_repeats(
    changed, layers, pattern
):
    fields = QWEN25_7B | {"num_hidden_layers": 5, "sliding_window": 7} | changed
    config = model_config(fields)
    window = 7 if pattern else 0
    assert (config.layer_pattern, config.window) == (pattern, window)
    written = config_fields(config, "float32", fields)
    assert written["layer_types"] == kinds(layers)
    assert model_config(written) == config and written["sliding_window"] == 7
    alone = config_fields(config, "float32", {})
    assert alone["use_sliding_window"] is bool(pattern)
    # Layers that see all of the longest context still have a window.
    wide = fields | {"sliding_window": 1 << 20, "max_position_embeddings": 4096}
    assert model_config(wide).window == (1 << 20 if pattern else 0)


def test_gemma_3_has_two_bases_of_rope():
    full = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    local = {"rope_type": "default", "rope_theta": 5e4}
    both = {"full_attention": full, "sliding_attention": local}
    old = {"rope_scaling": {"type": "linear", "factor": 8.0}, "rope_theta": 1e6}
    config = model_config(GEMMA3_1B | old | {"rope_local_base_freq": 5e4})
    assert config.window_rope_theta == 5e4
    assert config.rope_scaling == RopeScaling("linear", 8.0)
    others = {n: v for n, v in GEMMA3_1B.items() if not n.startswith("rope_")}
    assert model_config(others | {"rope_parameters": both}) == config
    written = config_fields(config, "float32", {})
    assert written["rope_local_base_freq"] == 5e4 and written["rope_theta"] == 1e6


def scaled(**scaling):
    return {"rope_scaling": scaling}


BAD = [
    (LLAMA3_8B | {"layer_types": kinds("f" * 32)}, "which llama has not"),
    (LLAMA3_8B | {"hidden_size": 10**400}, "(a whole number from 1 to 2147483647 is"),
    (LLAMA3_8B | {"rope_theta": 10**400}, "(a number above 0 is needed)"),
]
for case, said in pairs("model_configs.txt"):
    model, changes = case.split(" ", 1)
    BAD.append((getattr(hf_published, model) | json.loads(changes), said))


@pytest.mark.parametrize(("fields", "complaint"), BAD)
def test_what_models_here_have_not_is_refused_by_field(fields, complaint):
    with pytest.raises(ValueError) as caught:
        model_config(fields)
    assert complaint in str(caught.value) and "\n" not in str(caught.value)


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
    config = model_config(fields)
    assert config.rope_scaling == expected
    assert isinstance(config.rope_scaling.factor, float)
    assert model_config(config_fields(config, "float32", {})) == config


def test_null_is_none_where_a_family_has_another_default():
    none = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    config = model_config(GEMMA2_27B | none)
    assert (config.attention_soft_cap, config.logit_soft_cap) == (0, 0)
    missing = {n: v for n, v in GEMMA2_27B.items() if n not in none}
    assert model_config(missing) == model_config(GEMMA2_27B)
    no_window = {n: v for n, v in MISTRAL3.items() if n != "sliding_window"}
    assert model_config(no_window).window == 4096


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
        return model_config(said)

    def check(config):
        known = {name: value for name, value in said.items() if value is not None}
        size, heads = known["hidden_size"], known["num_attention_heads"]
        fields = {"num_key_value_heads": heads, "head_dim": size // heads}
        fields |= {"rms_norm_eps": 1e-6, "rope_theta": 1e4} | known
        assert {theirs: getattr(config, ours) for theirs, ours in NAMES.items()} == {
            theirs: fields[theirs] for theirs in NAMES
        }
        assert config.tied_embeddings is known.get("tie_word_embeddings", False)
        scaling = dataclasses.asdict(config.rope_scaling)
        fields = {"rope_type": "none"} | known.get("rope_scaling", {})
        fields = {name: value for name, value in fields.items() if value is not None}
        assert scaling | fields == scaling
        assert all(type(value) in (int, float, str, bool) for value in scaling.values())
        assert model_config(config_fields(config, "float32", said)) == config

    fuzz(attempts, attempt, check, most_bytes=20 << 20)


def test_ntk_is_written_as_the_theta_that_it_is():
    ntk = RopeScaling("ntk", 8.0)
    config = LanguageModelConfig(
        64, 128, 2, 4, 2, 16, 1e4, rope_scaling=ntk, vocab_size=300
    )
    written = config_fields(config, "float32", {})
    assert written["rope_scaling"] is None
    plain = model_config(written)
    frequencies = plain.rope_scaling.frequencies(16, plain.rope_theta)
    scaled = config.rope_scaling.frequencies(16, config.rope_theta)
    assert frequencies == pytest.approx(scaled, rel=1e-12)


def test_fields_of_the_original_are_kept_but_for_the_models_own():
    original = LLAMA3_8B | {
        "bos_token_id": 128000,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "llama3"},
        "dtype": "float16",
        "attention_dropout": 0.0,
        "use_cache": False,
    }
    config = LanguageModelConfig(64, 128, 2, 4, 2, 16, 1e6, vocab_size=300)
    written = config_fields(config, "float32", original)
    assert model_config(written) == config
    others = {"tie_word_embeddings": False, "torch_dtype": "float32"}
    others |= {"bos_token_id": 128000, "max_position_embeddings": 8192}
    others |= {"attention_dropout": 0.0, "use_cache": False}
    assert {name: written[name] for name in others} == others
    assert written.keys().isdisjoint({"rope_parameters", "dtype"})


SIZES = (64, 128, 2, 4, 2, 16, 1e6)
NOT_WRITTEN = [
    ({"attention_sinks": True}, {}, "attention_sinks=True, there False"),
    (
        {"logit_scale": 0.5},
        {},
        "written as llama (the nearest family): logit_scale=0.5",
    ),
    (
        {"norms": "both", "qk_norm": "all"},
        {},
        "as olmo2 (the nearest family): norms='both', there 'after'",
    ),
    ({"qk_norm": "head"}, LLAMA3_8B, "as llama: qk_norm='head', there ''"),
    ({"layer_pattern": "w", "window": 8}, LLAMA3_8B, "as llama: layer_pattern='w'"),
    ({}, LLAMA3_8B | {"clip_qkv": 8}, "of the original: 'clip_qkv' not known here"),
]


@pytest.mark.parametrize(("parts", "original", "complaint"), NOT_WRITTEN)
def test_a_model_that_no_family_has_is_not_written(parts, original, complaint):
    config = LanguageModelConfig(*SIZES, vocab_size=300, **parts)
    with pytest.raises(ValueError) as caught:
        config_fields(config, "float32", original)
    assert complaint in str(caught.value)
