"""Which layers see a window: the fields of config.json for it, and our pattern."""

from collections.abc import Mapping
from typing import Any

from tools.lib.hf.fields import LAYER_TYPES

_NAMES = {ours: theirs for theirs, ours in LAYER_TYPES.items()}


def layer_pattern(values: Mapping[str, Any]) -> str:
    """Returns the kinds of the layers, "w" or "f", which repeat; "" where none is "w".

    values: of the fields of a family. `layer_types` says it all; where it is missing,
    the layers from `max_window_layers` on have a window (all, in families without the
    field), but for every `sliding_window_pattern`-th.

    Raises:
      ValueError: not as many types as layers, or a window of 0 tokens.
    """
    layers, types = values["num_hidden_layers"], values.get("layer_types")
    has_window = values.get("use_sliding_window", True) and values.get("sliding_window")
    if types is None:
        first = values.get("max_window_layers", 0)
        every = values.get("sliding_window_pattern", layers + 1)
        kinds = "".join(
            "w" if has_window and i >= first and (i + 1) % every else "f"
            for i in range(layers)
        )
    else:
        kinds = "".join(LAYER_TYPES[kind] for kind in types)
    if len(kinds) != layers:
        raise ValueError(
            f"config.json has {len(kinds)} layer_types for num_hidden_layers={layers}"
        )
    if "w" not in kinds:
        return ""
    if not has_window:
        used, size = (values.get(n) for n in ("use_sliding_window", "sliding_window"))
        raise ValueError(
            "config.json has sliding_attention in layer_types and "
            f"sliding_window={size}, use_sliding_window={used}: a window needs a size"
        )
    return _shortest(kinds)


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


def _shortest(kinds: str) -> str:
    """Returns the shortest pattern that repeats to these kinds."""
    lengths = range(1, len(kinds) + 1)
    return next(kinds[:n] for n in lengths if _repeated(kinds[:n], len(kinds)) == kinds)


def _repeated(pattern: str, layers: int) -> str:
    return (pattern * (layers // len(pattern) + 1))[:layers]
