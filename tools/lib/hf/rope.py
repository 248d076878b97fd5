"""RoPE in config.json: its fields of all versions, and ours."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from data.json_text import is_number, short
from models.rope import RopeScaling
from models.sizes import LanguageModelConfig
from tools.lib.hf.fields import LARGEST

# RoPE scalings of config.json, and ours.
_TYPES = {
    "default": "none",
    "linear": "linear",
    "yarn": "yarn",
    "llama3": "llama3",
}
_YARN = ("beta_fast", "beta_slow", "attention_factor", "truncate")
# Of ours, the fields that a scaling has, and those that it may lack.
_FIELDS = {
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", *_YARN),
    "llama3": (
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    ),
}
_OPTIONAL = {*_YARN}
_FULL, _WINDOW = "full_attention", "sliding_attention"


def read_rope(fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `rope_theta` and `rope_scaling` of a model, and its `window_rope_theta`.

    fields: of config.json.
    defaults: of a family: what a base is that is missing. `rope_local_base_freq` is
      there for families whose layers with a window have a base of their own.

    Raises:
      ValueError: a scaling that a model here has not, or fields that contradict each
        other.
    """
    has_two = "rope_local_base_freq" in defaults
    given = fields.get("rope_parameters") or {}
    if has_two and given.keys() - {_FULL, _WINDOW}:
        raise ValueError(
            f"config.json has rope_parameters={short(given)}, where {_FULL} and "
            f"{_WINDOW} are needed"
        )
    places = {
        "rope_theta": {"rope_theta": fields.get("rope_theta")},
        "rope_scaling": fields.get("rope_scaling"),
        "rope_parameters": given.get(_FULL) if has_two else given,
    }
    longest = fields.get("max_position_embeddings")
    theta, scaling = _scaling(_merged(places), defaults["rope_theta"], longest)
    if not has_two:
        return {"rope_theta": theta, "rope_scaling": scaling}
    places = {
        "rope_local_base_freq": {"rope_theta": fields.get("rope_local_base_freq")},
        _WINDOW: given.get(_WINDOW),
    }
    window_theta, window_scaling = _scaling(
        _merged(places), defaults["rope_local_base_freq"], longest
    )
    if window_scaling != RopeScaling():
        raise ValueError(
            f"config.json has RoPE scaling {window_scaling.rope_type!r} in layers with "
            "a window, where frequencies are unscaled here"
        )
    is_same = window_theta == theta and scaling == RopeScaling()
    return {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "window_rope_theta": 0.0 if is_same else window_theta,
    }


def rope_fields(config: LanguageModelConfig) -> dict[str, Any]:
    """Returns the RoPE fields of `config.json` for ours: undoes `read_rope`."""
    theta, scaling = config.rope_theta, config.rope_scaling
    base = {"rope_theta": theta, "rope_scaling": None}
    local = {"rope_local_base_freq": config.window_rope_theta or theta}
    names = _FIELDS.get(scaling.rope_type)
    if names is None:
        return base | local
    fields = {name: getattr(scaling, name) for name in ("rope_type", *names)}
    if not fields.get("attention_factor", 1):
        del fields["attention_factor"]  # that of the formula
    if fields.get("truncate"):
        del fields["truncate"]  # what versions do that lack it
    return base | local | {"rope_scaling": fields}


def without_ntk(config: LanguageModelConfig) -> LanguageModelConfig:
    """Returns the same model, its "ntk" scaling as the base that it is."""
    scaling, head_dim = config.rope_scaling, config.head_dim
    if scaling.rope_type != "ntk":
        return config
    theta = config.rope_theta * scaling.factor ** (head_dim / (head_dim - 2))
    return dataclasses.replace(config, rope_theta=theta, rope_scaling=RopeScaling())


def _merged(places: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of several places as one.

    Raises:
      ValueError: a place holds no object, two contradict each other, or only a part of
        each head is rotated.
    """
    rope: dict[str, Any] = {}
    for place, found in places.items():
        found = {} if found is None else found
        if not isinstance(found, Mapping):
            raise ValueError(f"config.json has {place}={short(found)}, no object")
        for name, value in found.items():
            if value is None:
                continue
            name = "rope_type" if name == "type" else name
            if rope.setdefault(name, value) != value:
                raise ValueError(
                    f"config.json has {short(name)} twice, as {short(rope[name])} "
                    f"and {short(value)}"
                )
    if rope.pop("partial_rotary_factor", 1) != 1:
        raise ValueError(
            "config.json has a partial_rotary_factor: only whole heads are rotated here"
        )
    return rope


def _scaling(
    rope: dict[str, Any], base: float, longest: Any
) -> tuple[float, RopeScaling]:
    """Returns base and scaling of merged fields.

    base: where they have none.
    longest: the context of config.json, which YaRN takes for the original one.

    Raises:
      ValueError: a scaling that a model here has not.
    """
    theta = rope.pop("rope_theta", base)
    kind = rope.pop("rope_type", None if rope else "default")
    if not isinstance(kind, str) or kind not in _TYPES:
        raise ValueError(
            f"config.json has RoPE scaling {short(kind)} (only {', '.join(_TYPES)})"
        )
    known = {field.name: field.type for field in dataclasses.fields(RopeScaling)}
    unknown = rope.keys() - {*_FIELDS.get(kind, ())}
    if unknown:
        raise ValueError(
            f"config.json has RoPE scaling {kind!r} with "
            f"{short(', '.join(sorted(unknown)))}, which models here have not"
        )
    if kind == "yarn" and longest is not None:
        rope.setdefault("original_max_position_embeddings", longest)
    missing = {*_FIELDS.get(kind, ())} - rope.keys() - _OPTIONAL
    if missing:
        raise ValueError(
            f"config.json has RoPE scaling {kind!r} without "
            f"{', '.join(sorted(missing))}: copy it again"
        )
    for name, value in {"rope_theta": theta, **rope}.items():
        if not _is_right(value, known.get(name, float)):
            raise ValueError(
                f"config.json has {name}={short(value)} of RoPE, where "
                f"{'true or false' if known.get(name) is bool else 'a number above 0'} "
                "is needed"
            )
    if kind == "default":
        return float(theta), RopeScaling()
    scaling = {name: known[name](value) for name, value in rope.items()}
    return float(theta), RopeScaling(**scaling | {"rope_type": _TYPES[kind]})


def _is_right(value: Any, kind: type) -> bool:
    if kind is bool:
        return isinstance(value, bool)
    if kind is int:
        return type(value) is int and 1 <= value <= LARGEST
    return is_number(value) and value > 0
