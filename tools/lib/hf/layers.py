"""Kinds of layers in config.json, by its fields of any version, and our pattern."""

from collections.abc import Mapping
from typing import Any

from tools.lib.hf import fields as table
from tools.lib.hf.fields import Family

DELTA_SIZES = {
    "linear_num_key_heads": "delta_key_heads",
    "linear_num_value_heads": "delta_value_heads",
    "linear_key_head_dim": "delta_key_dim",
    "linear_value_head_dim": "delta_value_dim",
    "linear_conv_kernel_dim": "delta_convolution",
}
"""Fields of layers with Gated DeltaNet, and ours."""
_KINDS = {ours: theirs for theirs, ours in table.LAYER_TYPES.items()}
_OF_LAYERS = frozenset(
    "num_hidden_layers sliding_window use_sliding_window max_window_layers "
    "sliding_window_pattern layer_types no_rope_layers no_rope_layer_interval "
    "full_attention_interval".split()
)


def read_layers(given: Mapping[str, Any], family: Family) -> tuple[str, int]:
    """Returns the kinds of the layers, which repeat, and the window; or "" and 0.

    transformers' config class makes types of layers of the fields of any version.

    given: fields of config.json.

    Raises:
      ValueError: not as many types as layers, or a window of 0 tokens.
    """
    if not family.fields & {"sliding_window", *DELTA_SIZES}:
        return "", 0
    names = given.keys() & _OF_LAYERS & family.fields
    fields = {name: family.value(name, given) for name in names}
    layers = fields["num_hidden_layers"]
    types = fields.get("layer_types")
    for name in ("layer_types", "no_rope_layers"):
        of_layers = fields.get(name)
        if of_layers is not None and len(of_layers) != layers:
            count = len(of_layers)
            raise ValueError(
                f"config.json has {count} {name} for num_hidden_layers={layers}"
            )
    theirs = family.config_class(**fields)
    uses_windows = getattr(theirs, "use_sliding_window", True)
    window = getattr(theirs, "sliding_window", None) if uses_windows else None
    # Mistral has a window in all layers, or none.
    their_types = getattr(theirs, "layer_types", [_KINDS["w"]] * layers)
    kinds = "".join(map(table.LAYER_TYPES.__getitem__, their_types))
    if "d" in kinds and not family.fields & DELTA_SIZES.keys():
        raise ValueError(
            "config.json has linear_attention in layer_types, which "
            f"{family.model_type} has not"
        )
    if "w" not in kinds or not (window or types):
        window = 0
        kinds = kinds.replace("w", "f")
    elif not window:
        used = family.value("use_sliding_window", given)
        raise ValueError(
            "config.json has sliding_attention in layer_types and sliding_window="
            f"{given.get('sliding_window')}, use_sliding_window={used}: a window needs "
            "a size"
        )
    # A kind in capitals has no RoPE.
    has_rope = getattr(theirs, "no_rope_layers", None) or [1] * layers
    pairs = zip(kinds, has_rope, strict=True)
    kinds = "".join(kind if rope else kind.upper() for kind, rope in pairs)
    if kinds == "f" * layers:
        return "", 0
    length = 1
    while _repeated(kinds[:length], layers) != kinds:
        length += 1
    return kinds[:length], window


def layer_fields(layers: int, pattern: str, window: int) -> dict[str, Any]:
    """Returns the fields of config.json for our pattern and window, of any family."""
    cased = _repeated(pattern or "f", layers)
    kinds = cased.lower()
    every = len(pattern)
    fields = {
        "sliding_window": window or None,
        "use_sliding_window": "w" in kinds,
        "max_window_layers": kinds.find("w") if "w" in kinds else layers,
        "layer_types": [_KINDS[kind] for kind in kinds],
        "no_rope_layers": [int(kind.islower()) for kind in cased],
    }
    if pattern == "w" * (every - 1) + "f":  # what older versions know
        fields["sliding_window_pattern"] = every
    return fields


def _repeated(pattern: str, layers: int) -> str:
    return (pattern * (layers // len(pattern) + 1))[:layers]
