"""Models of the papers and of today's families on pods and hosts of accelerators.

Command, on every host: python train.py --config=configs/models.py:MODEL/PLACE
  --config.workdir=gs://BUCKET/RUN --config.data.corpus=CORPUS
MODEL is one of llama3_8b, qwen3_8b, gemma3_12b, olmo3_7b, qwen3_30b_a3b and
gpt_oss_20b, whose weights convert_hf imports (--config.init_from=WEIGHTS), or a LLaMA
of the papers, with one sequence a step:
  llama3_8b/v5p   64 chips,  1 Mi tokens of context, ring 64
  llama3_8b/v6e   64 chips,  1 Mi tokens of context, ring 64
  llama3_8b/tpu7x  128 devices,  1 Mi tokens of context, ring 128
  llama3_8b/h200  8 GPUs,    128 Ki tokens of context, ring 8
  gemma3_12b/v5p   64 chips,  1 Mi tokens of context, ring 32 x tensor 2
  gemma3_12b/v6e   64 chips,  1 Mi tokens of context, ring 32 x tensor 2
  gemma3_12b/tpu7x  128 devices,  1 Mi tokens of context, ring 64 x tensor 2
  gemma3_12b/h200  8 GPUs,    128 Ki tokens of context, ring 4 x tensor 2
  qwen3_30b_a3b/v5p   64 chips,  1 Mi tokens of context, ring 64
  qwen3_30b_a3b/h200  8 GPUs,    128 Ki tokens of context, ring 8
  gpt_oss_20b/v5p   64 chips,  1 Mi tokens of context, ring 64
  gpt_oss_20b/h200  8 GPUs,    128 Ki tokens of context, ring 8
  1b/v4   64 chips,  256 Ki tokens of context, ring 64
  3b/v4   128 chips, 1 Mi tokens of context, ring 128
  7b/v4   512 chips, 4 Mi tokens of context, ring 512
  13b/v4  512 chips, 2 Mi tokens of context, ring 512
  30b/v4  512 chips, 1 Mi tokens of context, ring 512
  65b/v4  512 chips, 1 Mi tokens of context, ring 512
qwen3_8b has the places of llama3_8b. olmo3_7b has the published recipe's contexts, of
which the second begins with the parameters of the first and scales RoPE by YaRN in
layers without a window; a device has 8 Ki tokens. Learning rates are those of
OLMo-core's scripts (src/scripts/official/OLMo3, midtrain and long-context), which fall
linearly, here along a cosine; a step there has 2 and 4 Mi tokens:
  olmo3_7b/v5e_8k   32 chips, 8 Ki tokens of context, fsdp 32
  olmo3_7b/v5e      32 chips, 64 Ki tokens of context, fsdp 4 x ring 8
  olmo3_7b/h200_8k  8 GPUs,   8 Ki tokens of context, fsdp 8
  olmo3_7b/h200     8 GPUs,   64 Ki tokens of context, ring 8
Adapters alone (LoRA) on one host:
  llama3_8b/lora_h200  1 GPUs,  128 Ki tokens of context, ring 1
  llama3_8b/lora_v5e   8 chips, 128 Ki tokens of context, ring 8
  llama3_8b/lora_v6e   8 chips, 128 Ki tokens of context, ring 8
(python train.py --config=configs/models.py is llama3_8b/v5p.)
Hardware: v5p:4x4x4, v6e:8x8, tpu7x:4x4x4, v5e:4x8, a host of H200s, or a TPU v4 slice
  of as many chips; others with --config.mesh.ring=DEVICES.
Expected: planned and not run; see results/2026-11-23-families.md and
  results/2026-11-23-fine-tuning.md; olmo3_7b in results/2026-11-28-olmo3.md; models
  with experts in results/2026-11-29-experts.md (gpt_oss_20b/v5p on 8 chips, not 64).
"""

from typing import Any

from ml_collections import ConfigDict

from configs import base, fine_tune

_SIZES = "hidden_size", "feed_forward_size", "num_layers"
_HEADS = "num_heads", "num_kv_heads", "head_dim", "vocab_size"

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_GEMMA3 = {
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
}

_OLMO3 = {
    "rope_theta": 500_000.0,
    "layer_pattern": "wwwf",
    "window": 4096,
    "window_rope_theta": 500_000.0,
    "qk_norm": "all",
    "norms": "after",
}

_GPT_OSS = {
    "rope_theta": 150_000.0,
    "norm_epsilon": 1e-5,
    "layer_pattern": "wf",
    "window": 128,
    "attention_sinks": True,
    "qkv_bias": True,
    "output_bias": True,
    "activation": "clamped",
    "experts": 32,
    "experts_per_token": 4,
    "expert_bias": True,
}

# Values of _SIZES and _HEADS, other fields of config.model, and config.rope_scaling.
# The papers' vocabulary has 32,000 ids; --config.model.vocab_size=0 takes the corpus's.
MODELS: dict[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    "1b": ((2048, 5504, 22, 16, 16, 128, 32_000), {}, {}),
    "3b": ((3200, 8640, 26, 32, 32, 100, 32_000), {}, {}),
    "7b": ((4096, 11008, 32, 32, 32, 128, 32_000), {}, {}),
    "13b": ((5120, 13824, 40, 40, 40, 128, 32_000), {}, {}),
    "30b": ((6656, 17920, 60, 52, 52, 128, 32_000), {}, {}),
    "65b": ((8192, 22016, 80, 64, 64, 128, 32_000), {}, {}),
    # meta-llama/Llama-3.1-8B: 128 Ki tokens.
    "llama3_8b": (
        (4096, 14336, 32, 32, 8, 128, 128_256),
        {"rope_theta": 500_000.0, "norm_epsilon": 1e-5},
        _LLAMA3_ROPE,
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
        _GEMMA3,
        {"rope_type": "linear", "factor": 8.0},
    ),
    # allenai/Olmo-3-1025-7B: 64 Ki tokens.
    "olmo3_7b": (
        (4096, 11008, 32, 32, 32, 128, 100_278),
        _OLMO3,
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
    ),
    # Qwen/Qwen3-30B-A3B: 40 Ki tokens, with YaRN 128 Ki.
    "qwen3_30b_a3b": (
        (2048, 768, 48, 32, 4, 128, 151_936),
        {
            **{"rope_theta": 1_000_000.0, "norm_epsilon": 1e-6, "qk_norm": "head"},
            **{"experts": 128, "experts_per_token": 8},
        },
        {},
    ),
    # openai/gpt-oss-20b: 128 Ki tokens.
    "gpt_oss_20b": (
        (2880, 2880, 24, 64, 8, 64, 201_088),
        _GPT_OSS,
        {
            **{"rope_type": "yarn", "factor": 32.0, "truncate": False},
            "original_max_position_embeddings": 4096,
        },
    ),
}

# place: (devices, Ki tokens of context)
_PODS = {
    "v5p": (64, 1024),
    "v6e": (64, 1024),
    "tpu7x": (128, 1024),
    "h200": (8, 128),
}
_HOSTS = {"lora_h200": (1, 128), "lora_v5e": (8, 128), "lora_v6e": (8, 128)}
_WITH_EXPERTS = {"v5p": (64, 1024), "h200": (8, 128)}
PLACES = {
    "1b": {"v4": (64, 256)},
    "3b": {"v4": (128, 1024)},
    "7b": {"v4": (512, 4096)},
    "13b": {"v4": (512, 2048)},
    "30b": {"v4": (512, 1024)},
    "65b": {"v4": (512, 1024)},
    "llama3_8b": _PODS | _HOSTS,
    "qwen3_8b": _PODS,
    "gemma3_12b": _PODS,
    "qwen3_30b_a3b": _WITH_EXPERTS,
    "gpt_oss_20b": _WITH_EXPERTS,
    "olmo3_7b": {
        **{"v5e_8k": (32, 8), "v5e": (32, 64)},
        **{"h200_8k": (8, 8), "h200": (8, 64)},
    },
}
"""Places of every model, with their devices and Ki tokens of context."""
_NAMES = [f"{model}/{place}" for model, places in PLACES.items() for place in places]


def fields_of(name: str) -> dict[str, Any]:
    """Returns the fields of `config.model` that a model sets."""
    sizes, parts, _ = MODELS[name]
    return dict(zip(_SIZES + _HEADS, sizes, strict=True)) | parts


def get_config(name: str = "llama3_8b/v5p") -> ConfigDict:
    """Returns the config of a model in a place, of one sequence a step (of each ring).

    Wide heads of models with windows are shared out to two devices.

    Raises:
      ValueError: the model or the place is unknown.
    """
    base.check_name(name, _NAMES)
    model, place = name.split("/")
    devices, context = PLACES[model][place]
    config = base.changed(
        workdir=f"runs/{name}",
        attention="auto",
        remat="attention" if place in _HOSTS else "auto",
        model=fields_of(model),
        rope_scaling=MODELS[model][2],
        data=dict(context_tokens=context * 1024, batch_rows=1),
    )
    if place in _HOSTS:
        config.update(fine_tune.LORA)
    # 32 GiB a chip, or 16.
    if place in ("v4", "v5e", "v5e_8k") or name == "gemma3_12b/v6e":
        config.remat = "nothing"
    if place == "v4":
        config.attention_parts = 4
    if config.model.window:
        config.mesh.tensor = 2 if config.model.head_dim == 256 else 1
    config.mesh.ring = devices // config.mesh.tensor
    if model == "olmo3_7b":
        config.mesh.ring = context // 8
        config.mesh.fsdp = config.data.batch_rows = devices // config.mesh.ring
        config.optimizer.update(peak_lr=2.0712e-4, end_lr=0.0, warmup_steps=0)
        if f"{place}_8k" in PLACES[model]:
            config.init_from = f"runs/{name}_8k"
            config.optimizer.warmup_steps = 200
            config.may_change = ("rope_scaling", "window_rope_theta")
        else:
            config.rope_scaling = base.get_config().rope_scaling
    return config
