"""Turns of conversations as people write them: who speaks, the words, calls, thoughts.

A turn is an object with one of `ROLE_FIELDS` and one of `WORDS`, as OpenAI's ("role",
"content"), ShareGPT's ("from", "value") and OpenAssistant's ("role", "text").
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from data.json_text import is_unicode, parse_json, short

Message = Mapping[str, Any]
"""A turn as templates take it: its "role" and "content", and what is in `HANDED_ON`."""

SPEAKERS = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "function_call"),
    "tool": ("tool", "function", "observation"),
}
ROLES = {theirs: ours for ours, names in SPEAKERS.items() for theirs in names}
"""Our names of the speakers, by theirs."""
ROLE_FIELDS = ("role", "from")
WORDS = ("content", "value", "text")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
CALLS = ("tool_calls", "function_call")
SAID = ("tool_calls", *THOUGHTS)
"""Fields of what an assistant says besides its words."""
HANDED_ON = (*SAID, "tool_call_id", "name")
"""Fields of a turn that a template may read besides its role and words."""
REPLIES = "replies"
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
UNLEARNED = ("refusal", *MEDIA)
"""Fields of a turn whose content is not in its words, and would be left out."""
LEARNED = ("weight", "train", "loss", "trainable", "training")
LEARNED += ("loss_weight", "loss_mask")
"""Fields of a turn: factors of the weight of its loss."""
READ = {*ROLE_FIELDS, *WORDS, *CALLS, *HANDED_ON, REPLIES, *UNLEARNED, *LEARNED}
PLAIN = ("list", "dict", "str")
"""Kinds of what is in lists that tools return."""
MOST_WEIGHT = 1_000_000


class Turn(NamedTuple):
    """A turn that was read. speaker: as the row names it. weight: of its loss."""

    speaker: str
    message: Message
    weight: float

    @property
    def role(self) -> str:
        return self.message["role"]


def read_turn(turn: Any, *, strips: bool) -> Turn:
    """Reads a turn.

    strips: whether blanks at both ends of words are taken off; of tools' never.

    Raises:
      ValueError: it is no turn, or has what is not learned.
    """
    if not isinstance(turn, dict):
        raise ValueError("a turn that is not an object")
    speaker = _first(turn, ROLE_FIELDS)
    if not isinstance(speaker, str) or speaker not in ROLES:
        raise ValueError(f"a turn from {short(speaker)}, not one of {', '.join(ROLES)}")
    if not isinstance(turn.get(REPLIES, []), list | None):
        raise ValueError("a turn whose replies are no list")
    role = ROLES[speaker]
    others = () if role == "assistant" else (*CALLS, *THOUGHTS)
    for name in (*UNLEARNED, *others):
        if turn.get(name):
            raise ValueError(f"a turn with {name}, which is not learned")
    message = {name: turn[name] for name in HANDED_ON if turn.get(name)}
    for name, value in message.items():
        if name != "tool_calls" and not isinstance(value, str):
            raise ValueError(f"a turn whose {name} is {_kind(value)}, not text")
    if calls := _calls(turn, speaker):
        message["tool_calls"] = calls
    content = _content(turn, speaker, is_alone=not {*SAID} & {*message})
    message["content"] = content.strip() if strips and role != "tool" else content
    if not is_unicode(json.dumps(message, ensure_ascii=False)):
        raise ValueError("a turn with half a surrogate pair")
    return Turn(speaker, {"role": role, **message}, _weight(turn))


def parsed(value: Any, what: str) -> Any:
    """Returns a value, or what JSON makes of a text that holds one.

    Raises:
      ValueError: the text is not JSON.
    """
    try:
        return parse_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"{what} that is no JSON ({error})") from error


def _calls(turn: Mapping[str, Any], speaker: str) -> list[dict[str, Any]]:
    """Returns the calls of a turn, [] for none, as OpenAI writes them today.

    Raises:
      ValueError: they are not objects with a name.
    """
    given = _first(turn, WORDS if speaker == "function_call" else CALLS)
    given = parsed(given, "a turn with a call") or []
    calls = []
    for call in given if isinstance(given, list) else [given]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"a turn with the call {short(call)}, which has no name")
        is_bare = function is call and not turn.get("tool_calls")
        calls.append({"type": "function", "function": call} if is_bare else call)
    return calls


def _content(turn: Mapping[str, Any], speaker: str, *, is_alone: bool) -> Any:
    """Returns the words of a turn; of a tool, also objects and lists of its own.

    is_alone: whether the turn says nothing else, and so must have words.

    Raises:
      ValueError: it has other words, or none.
    """
    value = None if speaker == "function_call" else _first(turn, WORDS)
    is_tool = ROLES[speaker] == "tool"
    words = _words(value)
    if is_tool and (isinstance(value, dict) or words is None and _kind(value) in PLAIN):
        return value
    may_be_empty = is_tool or not is_alone
    if words is None and not (may_be_empty and value in (None, [])):
        raise ValueError(f"a turn that says {_kind(value)}, not text")
    if not may_be_empty and not (words or "").strip():
        raise ValueError("an empty turn")
    return words or ""


def _first(turn: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """Returns the first value that there is of some fields, or None."""
    given = [turn[name] for name in names if turn.get(name) is not None]
    return given[0] if given else None


def _weight(turn: Mapping[str, Any]) -> float:
    """Returns the weight of a turn's loss, 1 without any.

    Raises:
      ValueError: it has none.
    """
    weight = 1.0
    for name in LEARNED:
        value = 1 if turn.get(name) is None else turn[name]
        try:
            weight *= float(value)
        except (TypeError, ValueError, OverflowError):
            weight = -1.0
        if not 0 <= weight <= MOST_WEIGHT:
            allowed = f"not from 0 to {MOST_WEIGHT}"
            raise ValueError(f"a turn whose {name} is {short(value)}, {allowed}")
    return weight


def _words(value: Any) -> str | None:
    """Returns a content's text; None: it has other parts, or none."""
    if isinstance(value, str):
        return value
    texts = []
    for part in value if isinstance(value, list) else []:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or _kind(part) != "text":
            return None
        texts.append(text)
    return "".join(texts) if texts else None


def _kind(value: Any) -> str:
    """Returns the kind of a value that is not text, as "image_url" or a type."""
    if isinstance(value, dict) and isinstance(value.get("type"), str):
        return short(value["type"])[1:-1]
    for part in value if isinstance(value, list) else []:
        kind = _kind(part)
        if kind != "text":
            return kind
    return type(value).__name__
