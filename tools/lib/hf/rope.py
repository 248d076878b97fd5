"""RoPE in config.json: its fields of all versions, and ours."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from data.json_text import short
from models.rope import RopeScaling
from models.sizes import LanguageModelConfig
from tools.lib.hf.fields import LAYER_TYPES, NUMBER, SIZE, TRUTH

_WINDOW, _FULL, _ = LAYER_TYPES
_ORIGINAL = "original_max_position_embeddings"
_PART = "partial_rotary_factor"
# The fields that each scaling must have, and those that it may lack.
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", _ORIGINAL),
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
}
_OPTIONAL = {"yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate")}
_TYPES = {field.name: field.type for field in dataclasses.fields(RopeScaling)}
_KINDS = {int: SIZE, float: NUMBER, bool: TRUTH}


def read_rope(
    fields: Mapping[str, Any],
    theta: float | Mapping[str, float],
    rotated_part: float = 0.0,
) -> dict[str, Any]:
    """Returns `rope_theta` and `rope_scaling` of a model, and its `window_rope_theta`.

    transformers would take one of fields that contradict each other.

    fields: of config.json.
    theta: transformers' `default_theta`: of all layers, or of "global" and of "local"
      ones, which have a window.
    rotated_part: of each head where none is said, by RoPE that is not scaled then: the
      result has its `rotary_fraction`. 0: only whole heads are rotated.

    Raises:
      ValueError: a scaling that a model here has not, or fields that contradict each
        other.
    """
    given = fields.get("rope_parameters") or {}
    longest = fields.get("max_position_embeddings")
    own = {name: fields.get(name) for name in ("rope_theta", _PART)}
    of_all = [own, fields.get("rope_scaling")]
    if not isinstance(theta, Mapping):
        return _read([*of_all, given], theta, longest, rotated_part)
    kinds = set(map(type, given.values()))
    if given.keys() - {_FULL, _WINDOW} or kinds - {dict, type(None)}:
        raise ValueError(
            f"config.json has rope_parameters={short(given)}, where {_FULL} and "
            f"{_WINDOW} are needed, two objects"
        )
    ours = _read([*of_all, given.get(_FULL)], theta["global"], longest)
    base = {"rope_theta": fields.get("rope_local_base_freq")}
    local = _read([base, given.get(_WINDOW)], theta["local"], longest)
    if local["rope_scaling"] != RopeScaling():
        raise ValueError(
            f"config.json has RoPE scaling {local['rope_scaling'].rope_type!r} in "
            "layers with a window, where frequencies are unscaled here"
        )
    return ours | {"window_rope_theta": 0.0 if ours == local else local["rope_theta"]}


def _read(
    sources: Sequence[Any],
    theta: float,
    longest: int | None,
    rotated_part: float = 0.0,
) -> dict[str, Any]:
    """Returns base and scaling.

    sources: objects of config.json that say them, or None.
    theta: the base where none is said.
    longest: the context of config.json, which YaRN takes for the original one.
    """
    rope: dict[str, Any] = {}
    for source in sources:
        for name, value in (source or {}).items():
            name = "rope_type" if name == "type" else name
            if value is not None and rope.setdefault(name, value) != value:
                raise ValueError(
                    f"config.json has {short(name)} twice, as {short(rope[name])} "
                    f"and {short(value)}"
                )
    theta = rope.pop("rope_theta", theta)
    part = rope.pop(_PART, rotated_part or 1)
    known = {"default"} if rotated_part else _NEEDED
    if rotated_part:  # of images and of text, whose tokens have one position each
        rope = {name: value for name, value in rope.items() if "mrope" not in name}
    if part != 1 and not rotated_part:
        raise ValueError(
            "config.json has a partial_rotary_factor: only whole heads are rotated here"
        )
    kind = rope.pop("rope_type", None if rope else "default")
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(
            f"config.json has RoPE scaling {short(kind)} (only {', '.join(known)})"
        )
    if kind == "yarn" and longest is not None:
        rope.setdefault(_ORIGINAL, longest)
    unknown = rope.keys() - {*_NEEDED[kind], *_OPTIONAL.get(kind, ())}
    wrong = [f"with {short(n)}, which models here have not" for n in sorted(unknown)]
    wrong += [f"without {name}" for name in _NEEDED[kind] if name not in rope]
    for name, value in {"rope_theta": theta, _PART: part, **rope}.items():
        right = _KINDS[_TYPES.get(name, float)]
        if name not in unknown and not right.is_right(value):
            wrong.append(f"with {name}={short(value)} ({right.needed})")
    if wrong:
        raise ValueError(f"config.json has RoPE scaling {kind!r} {', '.join(wrong)}")
    scaling = {name: _TYPES[name](value) for name, value in rope.items()}
    scaling["rope_type"] = "none" if kind == "default" else kind
    read = {"rope_theta": float(theta), "rope_scaling": RopeScaling(**scaling)}
    return read | ({"rotary_fraction": float(part)} if rotated_part else {})


def rope_fields(config: LanguageModelConfig, of_kinds: bool) -> dict[str, Any]:
    """Returns the RoPE fields of `config.json` for ours: undoes `read_rope`.

    of_kinds: whether to say it of each kind of layers, too.
    """
    theta = config.rope_theta
    scaling = config.rope_scaling
    kind = scaling.rope_type
    fields = None
    if kind in _NEEDED:
        names = ("rope_type", *_NEEDED[kind], *_OPTIONAL.get(kind, ()))
        fields = {name: getattr(scaling, name) for name in names}
        if not fields.get("attention_factor", 1):
            del fields["attention_factor"]  # that of the formula
        if fields.get("truncate"):
            del fields["truncate"]  # what versions do that lack it
    local = config.window_rope_theta or theta
    written = {"rope_theta": theta, "rope_scaling": fields}
    written["rope_local_base_freq"] = local
    if of_kinds:
        plain = {"rope_type": "default"}
        full = (fields or plain) | {"rope_theta": theta}
        window = plain | {"rope_theta": local}
        written["rope_parameters"] = {_FULL: full, _WINDOW: window}
    return written | {_PART: config.rotary_fraction}


def without_ntk(config: LanguageModelConfig) -> LanguageModelConfig:
    """Returns the same model, its "ntk" scaling as the base that it is."""
    scaling = config.rope_scaling
    head_dim = config.rotary_dim
    if scaling.rope_type != "ntk":
        return config
    theta = config.rope_theta * scaling.factor ** (head_dim / (head_dim - 2))
    return dataclasses.replace(config, rope_theta=theta, rope_scaling=RopeScaling())
