"""Stop tokens: which ids end a text, by the files beside a tokenizer.

Published models say so in three places: `eos_token` of tokenizer_config.json, and
`eos_token_id`, one id or a list, of generation_config.json and of config.json.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from data.json_text import read_json_object, short

TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
# In the order of their authority on what ends a document.
FILES = (
    (TOKENIZER_CONFIG, "eos_token"),
    (GENERATION_CONFIG, "eos_token_id"),
    ("config.json", "eos_token_id"),
)


def read_stop_tokens(
    tokenizer: Path, vocab_size: int, token_id: Callable[[str], int | None]
) -> tuple[int, ...]:
    """Returns the ids, each once, that which ends a document first; () if none is told.

    tokenizer: file that the others lie beside. vocab_size: ids are below it.
    token_id: from a token's name to its id, None where there is no such token.

    Raises:
      ValueError: a file is damaged, or names a token that the tokenizer lacks.
    """
    found: dict[int, None] = {}  # an ordered set
    for file, key in FILES:
        path = tokenizer.with_name(file)
        named = read_json_object(path).get(key) if path.is_file() else None
        if isinstance(named, dict):  # a token and how it is matched in texts
            named = named.get("content")
        for name in named if isinstance(named, list) else [named]:
            # Early conversions of LLaMA have "" there.
            if name is None or name == "":
                continue
            token = token_id(name) if isinstance(name, str) else name
            if type(token) is not int or not 0 <= token < vocab_size:
                raise ValueError(
                    f"{path} has {key} {short(name)}, which is no token of {tokenizer}:"
                    f" name one of its tokens, or an id from 0 to {vocab_size - 1}"
                )
            found[token] = None
    return tuple(found)


def write_stop_tokens(directory: Path, tokens: Sequence[int]) -> str:
    """Writes the file that `read_stop_tokens` finds the ids in; returns its name."""
    content: dict[str, Any] = {"eos_token_id": [*tokens]}
    (directory / GENERATION_CONFIG).write_text(json.dumps(content) + "\n")
    return GENERATION_CONFIG
