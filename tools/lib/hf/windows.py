"""Which layers see a window: the fields of config.json for it, and our pattern."""

from collections.abc import Mapping
from typing import Any

from tools.lib.hf.fields import LAYER_TYPES

_NAMES = {ours: theirs for theirs, ours in LAYER_TYPES.items()}


def layer_pattern(theirs: Any, said: Mapping[str, Any]) -> str:
    """Returns the kinds of the layers, "w" or "f", which repeat; "" where none is "w".

    theirs: transformers' config, which has a type for each layer, or a window of all.
    said: fields of config.json.

    Raises:
      ValueError: a window of 0 tokens.
    """
    window = getattr(theirs, "sliding_window", None)
    all_layers = [_NAMES["w"]] * theirs.num_hidden_layers
    types = getattr(theirs, "layer_types", all_layers)
    kinds = "".join(LAYER_TYPES[kind] for kind in types)
    if "w" not in kinds or not (window or said.get("layer_types")):
        return ""
    if not window:
        used, size = (said.get(n) for n in ("use_sliding_window", "sliding_window"))
        raise ValueError(
            "config.json has sliding_attention in layer_types and "
            f"sliding_window={size}, use_sliding_window={used}: a window needs a size"
        )
    lengths = range(1, len(kinds) + 1)
    return next(kinds[:n] for n in lengths if _repeated(kinds[:n], len(kinds)) == kinds)


def window_fields(layers: int, pattern: str, window: int) -> dict[str, Any]:
    """Returns the fields of config.json for our pattern and window, of any family."""
    kinds = _repeated(pattern or "f", layers)
    every = len(pattern)
    fields = {
        "sliding_window": window or None,
        "use_sliding_window": "w" in kinds,
        "max_window_layers": kinds.find("w") if "w" in kinds else layers,
        "layer_types": [_NAMES[kind] for kind in kinds],
    }
    if pattern == "w" * (every - 1) + "f":  # what older versions know
        fields["sliding_window_pattern"] = every
    return fields


def _repeated(pattern: str, layers: int) -> str:
    return (pattern * (layers // len(pattern) + 1))[:layers]
