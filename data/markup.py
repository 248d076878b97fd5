"""Markup in texts, which a model would learn as if it were words.

Not all markup is a mistake: a text about chat templates names their tokens. So it is
reported, and only refused where most documents have it.
"""

import json
import re

SPECIAL = "names of special tokens, as <|im_start|>"
TAGS = "HTML or XML"
JSON = "JSON"

# Names between "<|" and "|>" are those of OpenAI's, Meta's, Alibaba's and Microsoft's
# tokens; the others are of Llama 2, Mistral and Gemma.
_SPECIAL = re.compile(
    r"<\|[a-z_]{2,30}\|>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>"
)
_TAGS = re.compile(r"\s*<(?:!doctype html|html|\?xml|svg)\b", re.IGNORECASE)


def find_markup(text: str) -> str | None:
    """Returns the kind of a text's markup; None: none."""
    if _SPECIAL.search(text):
        return SPECIAL
    if _TAGS.match(text):
        return TAGS
    return JSON if text.lstrip()[:1] in ("{", "[") and _is_json(text) else None


def _is_json(text: str) -> bool:
    """Returns whether it is a JSON value, or has one in its first line."""
    for part in (text, text.lstrip().split("\n", 1)[0]):
        try:
            return isinstance(json.loads(part), dict | list)
        except (ValueError, RecursionError):
            continue
    return False
