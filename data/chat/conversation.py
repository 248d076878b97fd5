"""Conversations in the formats of ShareGPT and of OpenAI, checked one by one.

A row (see data/text/row_files.py) is one of

    {"id": "…", "conversations": [{"from": "human", "value": "…"},
                                  {"from": "gpt", "value": "…"}, …]}
    {"messages": [{"role": "user", "content": "…"},
                  {"role": "assistant", "content": "…"}, …]}

with a turn from "system" (or "developer") before all others, if any, or its words
beside the turns, as "system" or "system_prompt"; a content may be a list of
{"type": "text", "text": "…"}. As in FastChat, an assistant's turn before the first of
the user is left out, and so is a last one of the user that has no reply. Rows with
calls of tools or with anything else that cannot be learned are refused.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from data.json_text import is_unicode, short
from data.text.row_files import FORMATS, InputFile, ending, read_rows
from data.text.skipped import BadRow


@dataclass(frozen=True)
class TurnFormat:
    """Names of a format's fields, and of its speakers beside the system."""

    turns: str
    role: str
    content: str
    user: str
    assistant: str

    @property
    def roles(self) -> dict[str, str]:
        """Our names of the speakers, by theirs."""
        system = {"system": "system", "developer": "system"}
        return system | {self.user: "user", self.assistant: "assistant"}


SHAREGPT = TurnFormat("conversations", "from", "value", "human", "gpt")
OPENAI = TurnFormat("messages", "role", "content", "user", "assistant")
SYSTEM = ("system", "system_prompt")
"""Fields of a row, beside its turns, with the words of the system."""
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
UNLEARNED = ("tools", "functions", *MEDIA)
"""Fields of a row with what would be left out."""
FIELDS = ("id", "conversations", "messages", *SYSTEM, *UNLEARNED)
"""Fields of a row that are read."""
UNSAID = ("tool_calls", "function_call", "tool_call_id", "refusal", *MEDIA)
UNSAID += ("reasoning_content", "reasoning", "thinking")
"""Fields of a turn whose content is not in its words, and would be left out."""
LEARNED = ("weight", "train", "loss")
"""Fields of a turn that are 0 or false where it is not to be learned."""
ID_LETTERS = 80


@dataclass(frozen=True)
class Conversation:
    """A conversation of a person and an assistant.

    where: file and number of the row, and its id.
    system: the system prompt; None: none.
    exchanges: of each, what the person said and what the assistant replied.
    split: as of `InputFile`.
    """

    where: str
    system: str | None
    exchanges: tuple[tuple[str, str], ...]
    split: str | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        """Returns the turns, as a chat template takes them."""
        said = [] if self.system is None else [("system", self.system)]
        for user, reply in self.exchanges:
            said += [("user", user), ("assistant", reply)]
        return [{"role": role, "content": words} for role, words in said]

    @property
    def text(self) -> str:
        """Joins all that was said; equal only where the words are."""
        return json.dumps([self.system, self.exchanges])


def read_conversations(
    files: Sequence[InputFile],
) -> Iterator[Conversation | BadRow]:
    """Yields every row of the files, in their order.

    Raises:
      OSError, ValueError: a file does not hold rows, or is damaged.
    """
    for file in files:
        if ending(file.path) not in FORMATS:
            raise ValueError(
                f"{file.path} is of no known format of rows, {', '.join(FORMATS)} (and "
                ".gz, .zst): give it the ending of its own, or convert it"
            )
        for where, row in read_rows(file.path, FIELDS):
            if not isinstance(row, BadRow):
                row = parse_conversation(row, where, file.split)
            yield row


def parse_conversation(
    row: Any, where: str, split: str | None = None
) -> Conversation | BadRow:
    """Parses one row.

    row: what JSON made of it, or a table's row.
    where: its file and number, for messages. split: of its file.
    """
    if not isinstance(row, dict):
        return BadRow(where, f"{type(row).__name__}, and no object with messages")
    if isinstance(row.get("id"), str | int):
        where = f"{where} (id {' '.join(str(row['id']).split())[:ID_LETTERS]})"
    formats = [f for f in (SHAREGPT, OPENAI) if row.get(f.turns) is not None]
    if len(formats) > 1:
        return BadRow(where, "both conversations and messages")
    if not formats or not isinstance(row[formats[0].turns], list):
        return BadRow(where, "no list of conversations or messages")
    its_format = formats[0]
    unlearned = [n for n in UNLEARNED if row.get(n) not in (None, "", "[]", [])]
    if unlearned:
        return BadRow(where, f"a row with {unlearned[0]}, which is not learned")
    if not row[its_format.turns]:
        return BadRow(where, "no turns")
    said = []
    for place, turn in _turns(row, its_format):
        role, words = _turn(turn, its_format)
        if role is None:
            return BadRow(f"{where}, {place}", words)
        said.append((role, words))
    if [role for role, _ in said].count("system") > 1:
        return BadRow(where, "more than one prompt of the system")
    system = said.pop(0)[1] if said[0][0] == "system" else None
    if said and said[0][0] == "assistant":
        said.pop(0)
    names = {ours: theirs for theirs, ours in its_format.roles.items()}
    names["system"] = "system"
    for (role, _), expected in zip(said, cycle(("user", "assistant")), strict=False):
        if role != expected:
            return BadRow(where, f"{names[role]} speaks where {names[expected]} should")
    if len(said) % 2:
        said.pop()
    if not said:
        return BadRow(where, f"no reply of {names['assistant']}")
    values = [value for _, value in said]
    exchanges = tuple(zip(values[::2], values[1::2], strict=True))
    return Conversation(where, system, exchanges, split)


def _turns(row: dict[str, Any], its_format: TurnFormat) -> Iterator[tuple[str, Any]]:
    """Yields the place of each turn, and the turn; first words beside the list."""
    for name in SYSTEM:
        if row.get(name):
            yield name, {its_format.role: "system", its_format.content: row[name]}
    for number, turn in enumerate(row[its_format.turns], 1):
        yield f"turn {number}", turn


def _turn(turn: Any, its_format: TurnFormat) -> tuple[str | None, str]:
    """Returns the speaker and the words; or None, and the reason to refuse the turn."""
    if not isinstance(turn, dict):
        return None, "a turn that is not an object"
    role, value = turn.get(its_format.role), turn.get(its_format.content)
    if not isinstance(role, str) or role not in its_format.roles:
        known = ", ".join(its_format.roles)
        return None, f"a turn from {short(role)}, not one of {known}"
    unsaid = [name for name in UNSAID if turn.get(name)]
    if unsaid:
        return None, f"a turn with {unsaid[0]}, which is not learned"
    is_learned = all(turn.get(name) not in (0, "0") for name in LEARNED)
    if its_format.roles[role] == "assistant" and not is_learned:
        return None, "a reply of weight 0, and all are learned"
    words = _words(value)
    if words is None:
        return None, f"a turn that says {_kind(value)}, not text"
    if not words.strip():
        return None, "an empty turn"
    if not is_unicode(words):
        return None, "a turn with half a surrogate pair"
    return its_format.roles[role], words.strip()


def _words(value: Any) -> str | None:
    """Returns a content's text; None: it has other parts, or none."""
    if isinstance(value, str):
        return value
    parts = value if isinstance(value, list) else []
    texts = [p.get("text") for p in parts if isinstance(p, dict) and _kind(p) == "text"]
    is_text = texts and len(texts) == len(parts)
    return (
        "".join(texts) if is_text and all(isinstance(t, str) for t in texts) else None
    )


def _kind(value: Any) -> str:
    """Returns the kind of a value that is not text, as "image_url" or a type."""
    if isinstance(value, dict) and isinstance(value.get("type"), str):
        return short(value["type"])[1:-1]
    parts = value if isinstance(value, list) else []
    kinds = [_kind(part) for part in parts if _kind(part) != "text"]
    return kinds[0] if kinds else type(value).__name__
