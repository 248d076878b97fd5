"""config.json of every family, as published, and what models here have not."""

import dataclasses
import json
import re
from typing import Any

import pytest
from transformers import AutoConfig

from models.rope import RopeScaling
from models.sizes import LanguageModelConfig
from tests.cases import pairs, table
from tools.lib.hf.config import (
    config_fields,
    context_change,
    model_config,
    not_applied,
    text_fields,
)
from tools.lib.hf.fields import BY_TYPE


def records(name: str) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Model, fields of config.json, and of its record, of each line."""
    found = []
    for case, said in pairs(name):
        (model, fields), parts = case.split(" ", 1), json.loads(said)
        if scaling := parts.pop("rope_scaling", None):
            for name in scaling.keys() & {"short_factor", "long_factor"}:
                scaling[name] = tuple(scaling[name])
            parts["rope_scaling"] = RopeScaling(**scaling)
        found.append((model, json.loads(fields), parts))
    return found


PUBLISHED, RECORDS = {}, {}
for name, fields, parts in records("published_configs.txt"):
    PUBLISHED[name], RECORDS[name] = fields, LanguageModelConfig(**parts)
LLAMA3_8B, QWEN25_7B = PUBLISHED["LLAMA3_8B"], PUBLISHED["QWEN25_7B"]


OTHERS_TOO = "MISTRAL3", "MISTRAL_NEMO", "SEED_OSS_36B", "PHI4"
"""Models that an earlier family has, too."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_read_and_written_as_the_same_model(name):
    """With the original, and as the first family that has such a model."""
    fields, config, is_of_others = PUBLISHED[name], RECORDS[name], name in OTHERS_TOO
    assert model_config(fields) == config
    for original in (fields, {}):
        written = config_fields(config, "bfloat16", original)
        assert model_config(written) == config
        # And as transformers reads it, and writes its own fields.
        assert model_config(AutoConfig.for_model(**written).to_dict()) == config
        assert written["torch_dtype"] == "bfloat16" and "dtype" not in written
        text = text_fields(fields)
        if original or not is_of_others:
            assert written["model_type"] == text["model_type"]
        family = BY_TYPE[written["model_type"]]
        assert written["architectures"] == [family.architecture]
        for name in "bos_token_id", "eos_token_id", "pad_token_id":
            assert written[name] == text_fields(original).get(name)


@pytest.mark.parametrize(("case", "said"), pairs("hub_configs.txt"))
def test_config_files_of_hubs_are_read_or_refused_with_what_decides(case, said):
    """And what is read is written as the same model, which transformers reads."""
    fields = json.loads(case.split(" ", 1)[1])
    if said.startswith("refused: "):
        with pytest.raises(ValueError, match=re.escape(said.removeprefix("refused: "))):
            model_config(fields)
        return
    config = model_config(fields)
    family, pattern, window, scaling = said.split(" without ")[0].split()
    assert text_fields(fields)["model_type"] == family
    assert (config.layer_pattern or "-") == pattern
    assert (config.window, config.rope_scaling.rope_type) == (int(window), scaling)
    assert ", ".join(not_applied(fields)) == said.partition(" without ")[2]
    written = config_fields(config, "bfloat16", fields)
    assert model_config(written) == config
    theirs = AutoConfig.for_model(**written)
    assert model_config(theirs.to_dict()) == config


@pytest.mark.parametrize(("name", "changes", "parts"), records("changed_configs.txt"))
def test_fields_of_other_versions_are_read(name, changes, parts):
    fields = (PUBLISHED[name] | changes).items()
    config = model_config({n: value for n, value in fields if value != "..."})
    assert config == dataclasses.replace(RECORDS[name], **parts)
    assert isinstance(config.rope_scaling.factor, float)
    assert model_config(config_fields(config, "float32", {})) == config


def kinds(types: str) -> list[str]:
    names = {"w": "sliding_attention", "f": "full_attention"}
    return [names[kind] for kind in types]


@pytest.mark.parametrize(("changes", "found"), pairs("layer_windows.txt"))
def test_kinds_of_layers_are_the_shortest_pattern_that_repeats(changes, found):
    changed, (layers, *shortest) = json.loads(changes), found.split()
    pattern = "".join(shortest)
    if types := changed.get("layer_types"):
        changed["layer_types"] = kinds(types)
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


BAD = [
    (LLAMA3_8B | {"layer_types": kinds("f" * 32)}, "which llama has not"),
    (LLAMA3_8B | {"hidden_size": 10**400}, "(a whole number from 1 to 2147483647 is"),
    (LLAMA3_8B | {"rope_theta": 10**400}, "(a number above 0 is needed)"),
]
for case, said in pairs("model_configs.txt"):
    model, changes = case.split(" ", 1)
    BAD.append((PUBLISHED[model] | json.loads(changes), said))


@pytest.mark.parametrize(("fields", "complaint"), BAD)
def test_what_models_here_have_not_is_refused_by_field(fields, complaint):
    with pytest.raises(ValueError) as caught:
        model_config(fields)
    assert complaint in str(caught.value) and "\n" not in str(caught.value)


SIZES = (64, 128, 2, 4, 2, 16, 1e6)


def test_ntk_is_written_as_the_theta_that_it_is():
    ntk = RopeScaling("ntk", 8.0)
    config = LanguageModelConfig(*SIZES, rope_scaling=ntk, vocab_size=300)
    written = config_fields(config, "float32", {})
    assert written["rope_scaling"] is None
    plain = model_config(written)
    frequencies = plain.rope_scaling.frequencies(16, plain.rope_theta)
    scaled = config.rope_scaling.frequencies(16, config.rope_theta)
    assert frequencies == pytest.approx(scaled, rel=1e-12)


def test_fields_of_the_original_are_kept_but_for_the_models_own():
    kept = {"bos_token_id": 128000, "max_position_embeddings": 8192}
    kept |= {"attention_dropout": 0.0, "use_cache": False}
    own = {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "llama3"}}
    original = LLAMA3_8B | kept | own | {"dtype": "float16"}
    config = LanguageModelConfig(*SIZES, vocab_size=300)
    written = config_fields(config, "float32", original)
    assert model_config(written) == config
    kept |= {"tie_word_embeddings": False, "torch_dtype": "float32"}
    assert written | kept == written
    assert written.keys().isdisjoint({"rope_parameters", "dtype"})


@pytest.mark.parametrize("tokens, scaling, longest", table("models.txt", "longest"))
def test_the_longest_context_is_that_of_the_run(tokens, scaling, longest):
    scaling = RopeScaling(*scaling)
    config = LanguageModelConfig(*SIZES, vocab_size=300, rope_scaling=scaling)
    for original in {}, LLAMA3_8B | {"max_position_embeddings": 64}:
        written = config_fields(config, "float32", original, tokens)
        wanted = longest if original or scaling.factor > 1 else tokens
        assert written["max_position_embeddings"] == wanted
        change = f"max_position_embeddings={longest}, which is 64 in the original"
        said = change if original and longest != 64 else ""
        assert context_change(written, original) == said


@pytest.mark.parametrize(("case", "complaint"), pairs("models_not_written.txt"))
def test_a_model_that_no_family_has_is_not_written(case, complaint):
    parts, changes = json.loads(case)
    original = {} if changes is None else LLAMA3_8B | changes
    config = LanguageModelConfig(*SIZES, vocab_size=300, **parts)
    with pytest.raises(ValueError) as caught:
        config_fields(config, "float32", original)
    assert complaint in str(caught.value)
