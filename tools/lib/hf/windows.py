"""Which layers see a window: the fields of config.json for it, and our pattern."""

from collections.abc import Mapping
from typing import Any

from tools.lib.hf.fields import LAYER_TYPES, Family

_NAMES = {ours: theirs for theirs, ours in LAYER_TYPES.items()}
_FIELDS = frozenset(
    "num_hidden_layers sliding_window use_sliding_window max_window_layers "
    "sliding_window_pattern layer_types".split()
)


def read_windows(said: Mapping[str, Any], family: Family) -> tuple[str, int]:
    """Returns the kinds of the layers, which repeat, and the window; or "" and 0.

    transformers' config class makes types of layers of the fields of any version.

    said: fields of config.json.

    Raises:
      ValueError: not as many types as layers, or a window of 0 tokens.
    """
    if "sliding_window" not in family.fields:
        return "", 0
    fields = {n: family.value(n, said) for n in said.keys() & _FIELDS & family.fields}
    layers, types = fields["num_hidden_layers"], fields.get("layer_types")
    if types is not None and len(types) != layers:
        raise ValueError(
            f"config.json has {len(types)} layer_types for num_hidden_layers={layers}"
        )
    theirs = family.config_class(**fields)
    window = theirs.sliding_window
    # Mistral has a window in all layers, or none.
    kinds = getattr(theirs, "layer_types", [_NAMES["w"]] * layers)
    kinds = "".join(LAYER_TYPES[kind] for kind in kinds)
    if "w" not in kinds or not (window or types):
        return "", 0
    if not window:
        used = family.value("use_sliding_window", said)
        raise ValueError(
            "config.json has sliding_attention in layer_types and sliding_window="
            f"{said.get('sliding_window')}, use_sliding_window={used}: a window needs "
            "a size"
        )
    lengths = range(1, layers + 1)
    found = (kinds[:n] for n in lengths if _repeated(kinds[:n], layers) == kinds)
    return next(found), window


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
