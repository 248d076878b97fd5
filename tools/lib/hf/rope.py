"""RoPE in config.json: its fields of all versions, and ours."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from data.json_text import short
from models.rope import RopeScaling
from models.sizes import LanguageModelConfig
from tools.lib.hf.fields import LAYER_TYPES, NUMBER, NUMBERS, SIZE, TRUTH

_WINDOW, _FULL, _ = LAYER_TYPES
_ORIGINAL = "original_max_position_embeddings"
_PART = "partial_rotary_factor"
_BETA = "llama_4_scaling_beta"
_LONG = "longrope"
# The fields that each scaling must have, and those that it may lack.
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", _ORIGINAL),
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
    _LONG: ("factor", _ORIGINAL, "short_factor", "long_factor"),
}
_OPTIONAL = {
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate"),
    _LONG: ("attention_factor",),
}
_OURS = {_BETA: "query_scale"}
"""Our names of fields, where they are others."""
_OLD_KINDS = {"mrope": "default", "su": _LONG}
"""Scalings of older versions; mrope, where tokens have one position each, is none."""
NOT_APPLIED = "attn_factor"
"""Field of YaRN that transformers does not read, and vLLM multiplies by."""
_UNREAD = (NOT_APPLIED, "max_position_embeddings", "mrope_section", "mrope_interleaved")
_TYPES = {field.name: field.type for field in dataclasses.fields(RopeScaling)}
_KINDS = {int: SIZE, float: NUMBER, bool: TRUTH, tuple[float, ...]: NUMBERS}


class RopeKinds(NamedTuple):
    """What RoPE is in a family.

    theta: transformers' `default_theta`: of all layers, or of "global" and of "local"
      ones, which have a window.
    scalings: names of those that it has.
    rotated_part: of each head where none is said; 0 where whole heads are rotated.
    has_query_scale: whether queries are multiplied by a factor of their position.
    """

    theta: float | Mapping[str, float]
    scalings: tuple[str, ...] = ("default", "linear", "yarn", "llama3")
    rotated_part: float = 0.0
    has_query_scale: bool = False


def read_rope(fields: Mapping[str, Any], kinds: RopeKinds) -> dict[str, Any]:
    """Returns `rope_theta` and `rope_scaling` of a model, and its `window_rope_theta`.

    With a rotated part, its `rotary_fraction` too. transformers would take one of
    fields that contradict each other.

    fields: of config.json.

    Raises:
      ValueError: a scaling that the family has not, or fields that contradict each
        other.
    """
    given = fields.get("rope_parameters") or {}
    longest = fields.get("max_position_embeddings")
    own = {name: fields.get(name) for name in ("rope_theta", _PART)}
    if _LONG in kinds.scalings:
        own[_ORIGINAL] = fields.get(_ORIGINAL)
    of_all = [own, fields.get("rope_scaling")]
    theta = kinds.theta
    if not isinstance(theta, Mapping):
        return _read([*of_all, given], kinds, theta, longest)
    types = set(map(type, given.values()))
    if given.keys() - {_FULL, _WINDOW} or types - {dict, type(None)}:
        raise ValueError(
            f"config.json has rope_parameters={short(given)}, where {_FULL} and "
            f"{_WINDOW} are needed, two objects"
        )
    ours = _read([*of_all, given.get(_FULL)], kinds, theta["global"], longest)
    base = {"rope_theta": fields.get("rope_local_base_freq")}
    local = _read([base, given.get(_WINDOW)], kinds, theta["local"], longest)
    if local["rope_scaling"] != RopeScaling():
        raise ValueError(
            f"config.json has RoPE scaling {local['rope_scaling'].rope_type!r} in "
            "layers with a window, where frequencies are unscaled here"
        )
    return ours | {"window_rope_theta": 0.0 if ours == local else local["rope_theta"]}


def _merged(sources: Sequence[Any]) -> dict[str, Any]:
    """Returns the fields of objects of config.json, or of None.

    Raises:
      ValueError: two of them contradict each other.
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
    return rope


def _read(
    sources: Sequence[Any], kinds: RopeKinds, theta: float, longest: int | None
) -> dict[str, Any]:
    """Returns base and scaling.

    sources: objects of config.json that say them, or None.
    theta: the base where none is said.
    longest: the context of config.json, which YaRN takes for the original one.
    """
    rope = _merged(sources)
    theta = rope.pop("rope_theta", theta)
    part = rope.pop(_PART, kinds.rotated_part or 1)
    if part != 1 and not kinds.rotated_part:
        raise ValueError(
            "config.json has a partial_rotary_factor: only whole heads are rotated here"
        )
    is_said = rope.keys() - {_ORIGINAL}
    kind = rope.pop("rope_type", None if is_said else "default")
    if isinstance(kind, str):
        kind = _OLD_KINDS.get(kind, kind)
    if not isinstance(kind, str) or kind not in kinds.scalings:
        raise ValueError(
            f"config.json has RoPE scaling {short(kind)} (only "
            f"{', '.join(kinds.scalings)})"
        )
    rope = {name: value for name, value in rope.items() if name not in _UNREAD}
    if kind == "default" and _LONG in kinds.scalings:
        rope.pop(_ORIGINAL, None)
    if kind == "yarn":
        _complete_yarn(rope, longest)
    if kind == _LONG and _is_size(longest) and _is_size(rope.get(_ORIGINAL)):
        rope.setdefault("factor", max(longest / rope[_ORIGINAL], 1.0))
    needed = (*_NEEDED[kind], *((_BETA,) if kinds.has_query_scale else ()))
    unknown = rope.keys() - {*needed, *_OPTIONAL.get(kind, ())}
    wrong = [f"with {short(n)}, which models here have not" for n in sorted(unknown)]
    wrong += [f"without {name}" for name in needed if name not in rope]
    for name, value in {"rope_theta": theta, _PART: part, **rope}.items():
        right = _KINDS[_TYPES.get(name, float)]
        if name not in unknown and not right.is_right(value):
            wrong.append(f"with {name}={short(value)} ({right.needed})")
    if wrong:
        raise ValueError(f"config.json has RoPE scaling {kind!r} {', '.join(wrong)}")
    scaling = {}
    for name, value in rope.items():
        ours = _OURS.get(name, name)
        is_list = isinstance(value, list)
        scaling[ours] = tuple(map(float, value)) if is_list else _TYPES[ours](value)
    scaling["rope_type"] = "none" if kind == "default" else kind
    read = {"rope_theta": float(theta), "rope_scaling": RopeScaling(**scaling)}
    return read | ({"rotary_fraction": float(part)} if kinds.rotated_part else {})


def _is_size(value: Any) -> bool:
    return SIZE.is_right(value)


def _complete_yarn(rope: dict[str, Any], longest: int | None) -> None:
    """Adds to the fields of YaRN what transformers takes where they lack it.

    `mscale` and `mscale_all_dim`, of DeepSeek, say the factor on queries and keys
    together, as a quotient: alone neither is read.
    """
    if longest is not None:
        rope.setdefault(_ORIGINAL, longest)
    sizes = [rope.pop(name, None) for name in ("mscale", "mscale_all_dim")]
    factor = rope.get("factor")
    if all(map(NUMBER.is_right, (*sizes, factor))) and factor > 1:
        over, under = (0.1 * size * math.log(factor) + 1 for size in sizes)
        rope.setdefault("attention_factor", over / under)


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
    if fields and kind == _LONG:
        # Versions before 5 know these alone; the contexts, and so the factor, are
        # outside.
        original = fields.pop(_ORIGINAL)
        written[_ORIGINAL] = original
        written["max_position_embeddings"] = round(fields.pop("factor") * original)
        fields["type"] = fields.pop("rope_type")
        for name in "short_factor", "long_factor":
            fields[name] = list(fields[name])
    if fields and scaling.query_scale:
        own = {"rope_theta": theta, _BETA: scaling.query_scale}
        written["rope_scaling"] = None
        written["rope_parameters"] = fields | own
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
