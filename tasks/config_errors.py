"""Errors of a config name its fields as a user does."""

import functools
import re
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

OTHER_NAMES = {
    "total_steps": "config.train.steps",
    "granule": "config.stripe_granule",
    "feed_forward_chunk": "config.feed_forward_chunk_tokens",
    "loss_chunk": "config.loss_chunk_tokens",
    "last_layers": "config.remat_budget_gib",
    "kv_heads": "config.model.num_kv_heads",
}
"""Fields of a config, by what they are called in what is made of it."""


def names_fields[**P, R](make: Callable[P, R]) -> Callable[P, R]:
    """Wraps `make(config, ...)`, or a method of what has a config, so that errors call
    fields by their names in the config.

    What is made of a config has fields of its own: where its error says `fsdp=0`, that
    of the result says `config.mesh.fsdp=0`.
    """

    @functools.wraps(make)
    def named(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return make(*args, **kwargs)
        except ValueError as error:
            owner: Any = args[0]
            config = getattr(owner, "config", owner)
            raise ValueError(in_words_of(config, str(error))) from error

    return named


def in_words_of(config: ConfigDict, text: str) -> str:
    """Returns a text in which `field=`, or a field of several words, is named whole."""
    names = {n.split(".")[-1]: f"config.{n}" for n in fields_by_name(config)}
    names |= OTHER_NAMES

    def whole(match: re.Match[str]) -> str:
        name = names[match["name"]]
        sections = [f"{part}." for part in name.split(".")[1:-1]]  # as in `agent.heads`
        is_ours = match["before"] in ("", "self.", *sections)
        return name if is_ours else match[0]

    patterns = []
    for name in sorted(names, key=len, reverse=True):  # of two, the longer one matches
        patterns.append(rf"{name}\b" if "_" in name else rf"{name}(?==)")
    known = "|".join(patterns)
    return re.sub(rf"(?<![\w./-])(?P<before>(?:\w+\.)*)(?P<name>{known})", whole, text)


def fields_by_name(config: ConfigDict) -> dict[str, Any]:
    """Values of a config's fields, and those of its sections, by dotted name."""
    fields = {}
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            for inner_name, inner_value in fields_by_name(value).items():
                fields[f"{name}.{inner_name}"] = inner_value
        else:
            fields[name] = value
    return fields
