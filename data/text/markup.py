"""Markup in texts, which a model would learn as if it were words.

Not all markup is a mistake: a text about chat templates names their tokens. So it is
reported, and only refused where most documents have it.
"""

import json
import re

from data.text.skipped import Skipped

MOST = 0.5
"""Share of documents with one kind of markup beyond which it is refused."""
SPECIAL = "names of special tokens, as <|im_start|>"
TAGS = "HTML or XML"
JSON = "JSON"

# Tokens of OpenAI, Meta, Alibaba and Microsoft have names between "<|" and "|>"; the
# other names are of Llama 2, Mistral and Gemma.
_SPECIAL = re.compile(
    r"<\|[a-z_]{2,30}\|>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>"
)
_PARTS = "<|", "INST]", "SYS>>", "_of_turn>"  # of names, that are found fast
_TAGS = re.compile(r"\s*<(?:!doctype html|html|\?xml|svg)\b", re.IGNORECASE)


def find_markup(text: str) -> str | None:
    """Returns the kind of a text's markup; None: none."""
    if names_special_tokens(text):
        return SPECIAL
    if _TAGS.match(text):
        return TAGS
    return JSON if text.lstrip()[:1] in ("{", "[") and _is_json(text) else None


def names_special_tokens(text: str) -> bool:
    """Returns whether a text has the name of a special token, as <|im_start|>."""
    has_part = any(part in text for part in _PARTS)
    return has_part and _SPECIAL.search(text) is not None


def check_markup(found: Skipped, documents: int) -> None:
    """Refuses documents that are mostly markup.

    found: documents with markup, by its kind. documents: how many there are in all.

    Raises:
      ValueError: more than `MOST` of them have one kind.
    """
    for kind, count in found.counts.items():
        if count > MOST * documents:
            raise ValueError(
                f"{count} of {documents} documents have markup ({kind}), as "
                f"{found.first[kind]}, which would be learned as text: prepare "
                "conversations as rows of their turns (tools.prepare_chat), take the "
                "markup out of texts, or keep it (--keep-markup)"
            )


def _is_json(text: str) -> bool:
    """Returns whether it is a JSON value, or has one in its first line."""
    for part in (text, text.lstrip().split("\n", 1)[0]):
        try:
            return isinstance(json.loads(part), dict | list)
        except (ValueError, RecursionError):
            continue
    return False
