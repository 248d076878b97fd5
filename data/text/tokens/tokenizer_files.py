"""The files beside a tokenizer: which tokens begin and end a text, and chat templates.

Published models say what ends one in three places: `eos_token` of
tokenizer_config.json, and `eos_token_id`, one id or a list, of generation_config.json
and of config.json. What begins one is the `bos_token` of tokenizer_config.json where
its `add_bos_token` is true; where it has none, what the tokenizer puts there by itself.
How chats are written is in chat_template.jinja, or in a field of other files.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.json_text import read_json_object, short
from data.text.tokens.tokenizer import Tokenizer

TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
SAMPLING = "temperature", "top_k", "top_p"
"""Keys of generation_config.json that are defaults of tools/generate.py."""
# Of the token that every text begins with. Gemma's "<s>" is a tag of HTML.
BEGIN_NAMES = ("<bos>", "<s>", "<|begin_of_text|>")
# In the order of their authority on what ends a document.
FILES = (
    (TOKENIZER_CONFIG, "eos_token"),
    (GENERATION_CONFIG, "eos_token_id"),
    ("config.json", "eos_token_id"),
)


def read_stop_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the ids, each once, the one that ends a document first; () if unknown.

    Raises:
      ValueError: a file is damaged, or names a token that the tokenizer lacks.
    """
    tokens: dict[int, None] = {}  # an ordered set
    for file, key in FILES:
        path = _beside(tokenizer, file)
        named = _name(_read(path).get(key))
        for name in named if isinstance(named, list) else [named]:
            # Early conversions of LLaMA have "" there.
            if name is None or name == "":
                continue
            token = tokenizer.token_id(name) if isinstance(name, str) else name
            if type(token) is not int or not 0 <= token < tokenizer.vocab_size:
                raise ValueError(
                    f"{path} has {key} {short(name)}, which is no token of "
                    f"{tokenizer.path}: name one of its tokens, or an id from 0 to "
                    f"{tokenizer.vocab_size - 1}"
                )
            tokens[token] = None
    return tuple(tokens)


def read_names(
    tokenizer: Tokenizer, own: Sequence[int]
) -> tuple[tuple[int, ...], dict[str, str]]:
    """Returns the ids that every text begins with, () for none, and tokens' names.

    These by their use, as {"bos_token": "<s>"}.

    own: ids that it puts before a text where no file says otherwise.

    Raises:
      ValueError: the file is damaged, or names a token that the tokenizer lacks.
    """
    file = _beside(tokenizer, TOKENIZER_CONFIG)
    config = _read(file)
    adds = config.get("add_bos_token")
    if adds not in (None, True, False):
        raise ValueError(f"{file} has add_bos_token {short(adds)}: say true or false")
    configured = {}
    for use, value in config.items():
        name = _name(value)
        if use.endswith("_token") and isinstance(name, str | None):
            configured[use] = name
    begin = () if adds is False else tuple(own)
    if adds and configured.get("bos_token"):
        name = configured["bos_token"]
        token = tokenizer.token_id(name)
        if token is None:
            raise ValueError(
                f"{file} has bos_token {short(name)}, which is no token of "
                f'{tokenizer.path}: name one of its tokens, or say "add_bos_token": '
                "false"
            )
        begin = (token,)
    begins = [*map(tokenizer.token_name, begin)]
    begins += [name for name in BEGIN_NAMES if name in tokenizer.special]
    names = {"bos_token": begins[0]} if begins else {}
    names["eos_token"] = tokenizer.token_name(tokenizer.end_of_document)
    names |= configured
    return begin, {use: name for use, name in names.items() if name}


def read_sampling(tokenizer: Path) -> dict[str, float]:
    """Reads a model's defaults for drawing texts: those of `SAMPLING` that it has.

    tokenizer: file that generation_config.json lies beside.

    Raises:
      ValueError: the file is damaged, or says something else than numbers.
    """
    path = tokenizer.with_name(GENERATION_CONFIG)
    defaults = {key: value for key, value in _read(path).items() if key in SAMPLING}
    for key, value in defaults.items():
        if type(value) not in (int, float):
            raise ValueError(f"{path} has {key} {short(value)}: say a number")
    return defaults


def read_chat_template(directory: Path) -> str | None:
    """Reads the Jinja template of a model's or a corpus' directory; None: it has none.

    Raises:
      ValueError: a file is damaged, or has several templates without a default.
    """
    path = directory / CHAT_TEMPLATE
    if path.is_file():
        try:
            return path.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not text: {error}") from error
    for file in (TOKENIZER_CONFIG, "chat_template.json"):
        path = directory / file
        template = _read(path).get("chat_template")
        if isinstance(template, list):  # of several uses
            for use in template:
                if isinstance(use, dict) and use.get("name") == "default":
                    template = use.get("template", template)
        if template is not None and not isinstance(template, str):
            raise ValueError(
                f"{path} has no chat_template that is a text, nor one of the name "
                f"default, but {short(template)}: name one of the formats"
            )
        if template is not None:
            return template
    return None


def write_tokenizer(
    directory: Path, tokenizer: Tokenizer, chat_template: str | None = None
) -> str | None:
    """Copies a tokenizer, with files that say what it says of itself.

    Returns the name of the copy; None: the tokenizer has no file.
    """
    files = {}
    copy = None
    if tokenizer.path is not None:
        copy = f"tokenizer{tokenizer.path.suffix}"
        of_texts = {"add_bos_token": bool(tokenizer.begin_of_document)}
        of_texts |= {"bos_token": None, **tokenizer.names}
        stop_tokens = {"eos_token_id": [*tokenizer.stop_tokens]}
        stop_tokens |= read_sampling(tokenizer.path)
        files = {
            copy: tokenizer.path.read_bytes(),
            TOKENIZER_CONFIG: f"{json.dumps(of_texts)}\n".encode(),
            GENERATION_CONFIG: f"{json.dumps(stop_tokens)}\n".encode(),
        }
    if chat_template is not None:
        files[CHAT_TEMPLATE] = chat_template.encode()
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return copy


def _beside(tokenizer: Tokenizer, name: str) -> Path:
    """Returns the path of a file beside a tokenizer's own, which has one."""
    assert tokenizer.path is not None
    return tokenizer.path.with_name(name)


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _name(named: Any) -> Any:
    """Returns a token's name, also where it stands with how it is matched in texts."""
    return named.get("content") if isinstance(named, dict) else named
