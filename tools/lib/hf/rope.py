"""RoPE in config.json: its fields of all versions, and ours."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from data.json_text import short
from models.rope import RopeScaling
from models.sizes import LanguageModelConfig
from tools.lib.hf.fields import LAYER_TYPES, NUMBER, SIZE, TRUTH

_LONGEST, _ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
# Scalings that are read, and written but for the first: the fields that each must have,
# and those that it may lack.
_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", _ORIGINAL),
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
}
_OPTIONAL = {"yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate")}
_TYPES = {field.name: field.type for field in dataclasses.fields(RopeScaling)}
_KINDS = {int: SIZE, float: NUMBER, bool: TRUTH}
_WINDOW, _FULL = LAYER_TYPES


def rope_parameters(said: Mapping[str, Any], has_two: bool) -> dict[str, Any]:
    """Returns the field `rope_parameters` of transformers 5 for those of any version.

    said: fields of config.json.
    has_two: whether layers with a window have a base of their own.

    Raises:
      ValueError: a scaling that a model here has not, or fields that contradict each
        other, of which transformers would take one.
    """
    given = said.get("rope_parameters") or {}
    places = {
        "rope_theta": {"rope_theta": said.get("rope_theta")},
        "rope_scaling": said.get("rope_scaling"),
        "rope_parameters": given,
    }
    if not has_two:
        return _checked(_merged(places), said)
    if given.keys() - {_FULL, _WINDOW}:
        raise ValueError(
            f"config.json has rope_parameters={short(given)}, where {_FULL} and "
            f"{_WINDOW} are needed"
        )
    places["rope_parameters"] = given.get(_FULL)
    of_windows = {
        "rope_local_base_freq": {"rope_theta": said.get("rope_local_base_freq")},
        _WINDOW: given.get(_WINDOW),
    }
    both = {_FULL: _merged(places), _WINDOW: _merged(of_windows)}
    return {layers: _checked(rope, said) for layers, rope in both.items()}


def read_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Returns RoPE's fields of a model here for the `rope_parameters` of transformers.

    Raises:
      ValueError: RoPE of layers with a window is scaled, or a number is out of range.
    """
    if _FULL not in rope:
        return _ours(rope)
    ours, local = _ours(rope[_FULL]), _ours(rope[_WINDOW])
    if local["rope_scaling"] != RopeScaling():
        raise ValueError(
            f"config.json has RoPE scaling {local['rope_scaling'].rope_type!r} in "
            "layers with a window, where frequencies are unscaled here"
        )
    return ours | {"window_rope_theta": 0.0 if ours == local else local["rope_theta"]}


def rope_fields(config: LanguageModelConfig) -> dict[str, Any]:
    """Returns the RoPE fields of `config.json` for ours: undoes `read_rope`."""
    theta, scaling = config.rope_theta, config.rope_scaling
    kind, fields = scaling.rope_type, None
    if kind in _FIELDS:
        names = ("rope_type", *_FIELDS[kind], *_OPTIONAL.get(kind, ()))
        fields = {name: getattr(scaling, name) for name in names}
        if not fields.get("attention_factor", 1):
            del fields["attention_factor"]  # that of the formula
        if fields.get("truncate"):
            del fields["truncate"]  # what versions do that lack it
    local = config.window_rope_theta or theta
    return {"rope_theta": theta, "rope_scaling": fields, "rope_local_base_freq": local}


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
      ValueError: a place holds no object, or two contradict each other.
    """
    rope: dict[str, Any] = {}
    for place, found in places.items():
        found = {} if found is None else found
        if not isinstance(found, Mapping):
            raise ValueError(f"config.json has {place}={short(found)}, no object")
        for name, value in found.items():
            name = "rope_type" if name == "type" else name
            if value is not None and rope.setdefault(name, value) != value:
                raise ValueError(
                    f"config.json has {short(name)} twice, as {short(rope[name])} "
                    f"and {short(value)}"
                )
    return rope


def _checked(rope: dict[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """Returns merged fields.

    Raises:
      ValueError: a scaling, or a field of it, that a model here has not, a field that
        is missing, or only a part of each head is rotated.
    """
    if rope.pop("partial_rotary_factor", 1) != 1:
        raise ValueError(
            "config.json has a partial_rotary_factor: only whole heads are rotated here"
        )
    kind = rope.get("rope_type", None if rope.keys() - {"rope_theta"} else "default")
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise ValueError(
            f"config.json has RoPE scaling {short(kind)} (only {', '.join(_FIELDS)})"
        )
    if kind == "yarn" and said.get(_LONGEST) is not None:
        rope.setdefault(_ORIGINAL, said[_LONGEST])
    values = {name: value for name, value in rope.items() if name != "rope_type"}
    needed = {*_FIELDS[kind]}
    unknown = values.keys() - needed - {"rope_theta", *_OPTIONAL.get(kind, ())}
    if unknown:
        raise ValueError(
            f"config.json has RoPE scaling {kind!r} with "
            f"{short(', '.join(sorted(unknown)))}, which models here have not"
        )
    if missing := needed - rope.keys():
        raise ValueError(
            f"config.json has RoPE scaling {kind!r} without "
            f"{', '.join(sorted(missing))}: copy it again"
        )
    for name, value in values.items():
        right, wanted = _KINDS[_TYPES.get(name, float)]
        if not right(value):
            raise ValueError(
                f"config.json has {name}={short(value)} of RoPE, where {wanted}"
            )
    return rope


def _ours(rope: Mapping[str, Any]) -> dict[str, Any]:
    kind = rope.get("rope_type", "default")
    scaling = {name: _TYPES[name](rope[name]) for name in rope.keys() & _TYPES.keys()}
    scaling["rope_type"] = "none" if kind == "default" else kind
    return {
        "rope_theta": float(rope["rope_theta"]),
        "rope_scaling": RopeScaling(**scaling),
    }
