"""Today's models and pods to train them on: data for configs, tools and tests.

Sizes and parts are those of the published files, as of Hugging Face's hub.
"""

from typing import Any

import ml_collections

from configs import base, fine_tune

_SIZES = "hidden_size", "feed_forward_size", "num_layers"
_HEADS = "num_heads", "num_kv_heads", "head_dim", "vocab_size"

# Values of _SIZES and _HEADS, other fields of config.model, and config.rope_scaling.
_FAMILIES: dict[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    # meta-llama/Llama-3.1-8B: 128 Ki tokens.
    "llama3_8b": (
        (4096, 14336, 32, 32, 8, 128, 128_256),
        {"rope_theta": 500_000.0, "norm_epsilon": 1e-5},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    # Qwen/Qwen3-8B: 32 Ki tokens, with YaRN 128 Ki.
    "qwen3_8b": (
        (4096, 12288, 36, 32, 8, 128, 151_936),
        {"rope_theta": 1_000_000.0, "norm_epsilon": 1e-6, "qk_norm": "head"},
        {},
    ),
    # google/gemma-3-12b-pt, its model of text: 128 Ki tokens.
    "gemma3_12b": (
        (3840, 15360, 48, 16, 8, 256, 262_208),
        {
            "rope_theta": 1_000_000.0,
            "norm_epsilon": 1e-6,
            "layer_pattern": "wwwwwf",
            "window": 1024,
            "window_rope_theta": 10_000.0,
            "qk_norm": "head",
            "norms": "both",
            "norm_unit_offset": True,
            "activation": "gelu_tanh",
            "tied_embeddings": True,
            "embedding_scale": 3840**0.5,
        },
        {"rope_type": "linear", "factor": 8.0},
    ),
}

# pod: (devices, Ki tokens of context)
_PODS = {"v5p": (64, 1024), "v6e": (64, 1024), "h200": (8, 128)}
# The same of hosts that train adapters.
_HOSTS = {"lora_h200": (1, 128), "lora_v5e": (8, 128), "lora_v6e": (8, 128)}

PODS = {name: _PODS for name in _FAMILIES} | {"llama3_8b": _PODS | _HOSTS}
"""Pods and hosts of every model, with their devices and Ki tokens of context."""


def config_of(name: str, pod: str) -> ml_collections.ConfigDict:
    """Returns the config of a model on a pod or a host, of one sequence a step.

    Models with windows are in zigzag, where few ring steps have visible keys in layers
    with a window; their wide heads are shared out to two devices.

    Raises:
      ValueError: there is no such pod.
    """
    if pod not in PODS[name]:
        raise ValueError(f"{pod=} must be one of {', '.join(PODS[name])}")
    devices, context = PODS[name][pod]
    sizes, parts, rope_scaling = _FAMILIES[name]
    config = base.get_config().unlock()
    config.workdir = f"runs/{name}/{pod}"
    if pod in _HOSTS:
        config.update_from_flattened_dict(fine_tune.LORA)
    config.model.update(dict(zip(_SIZES + _HEADS, sizes, strict=True)) | parts)
    config.rope_scaling.update(rope_scaling)
    if config.model.window:
        config.attention, config.mesh.tensor = "zigzag", 2
    config.mesh.ring = devices // config.mesh.tensor
    config.data.context_tokens = context * 1024
    config.data.batch_rows = 1
    return config.lock()
