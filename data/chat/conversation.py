"""Conversations in the formats of ShareGPT and of OpenAI, and groups of them.

A row (see data/text/reading/row_files.py) is one of

    {"id": "…", "conversations": [{"from": "human", "value": "…"},
                                  {"from": "gpt", "value": "…"}, …]}
    {"messages": [{"role": "user", "content": "…"},
                  {"role": "assistant", "content": "…"}, …]}
    {"prompt": "…", "completions": ["…", {"text": "…", "weight": 0.5}, …]}
    {"prompt": {"role": "prompter", "text": "…",
                "replies": [{"role": "assistant", "text": "…", "replies": […]}, …]}}

with a turn from "system" (or "developer") before all others, if any, or its words
beside the turns, as "system" or "system_prompt"; a content may be a list of
{"type": "text", "text": "…"}. As in FastChat, an assistant's turn before the first of
the user is left out, and so is a last one of the user that has no reply. Rows with
calls of tools or with anything else that cannot be learned are refused.

The third is a group: a prompt, which may also be a list of messages, and answers to it;
the fourth a tree of messages, as of OpenAssistant. A reply's "weight", and the other
fields of `LEARNED`, multiply its loss; each reply is learned once, those of a prompt
not at all. Other fields of turns are counted.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle
from typing import Any, NamedTuple

from data.json_text import is_unicode, short
from data.text.reading.row_files import FORMATS, InputFile, ending, read_rows
from data.text.reading.skipped import BadRow


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
GROUP = TurnFormat("completions", "role", "content", "user", "assistant")
TREE = TurnFormat("prompt", "role", "text", "prompter", "assistant")
PROMPT, REPLIES = "prompt", "replies"
SYSTEM = ("system", "system_prompt")
"""Fields of a row, beside its turns, with the words of the system."""
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
UNLEARNED = ("tools", "functions", *MEDIA)
"""Fields of a row with what would be left out."""
FIELDS = ("id", "conversations", "messages", PROMPT, "completions")
FIELDS += (*SYSTEM, *UNLEARNED)
"""Fields of a row that are read."""
UNSAID = ("tool_calls", "function_call", "tool_call_id", "refusal", *MEDIA)
UNSAID += ("reasoning_content", "reasoning", "thinking")
"""Fields of a turn whose content is not in its words, and would be left out."""
LEARNED = ("weight", "train", "loss", "trainable", "training")
LEARNED += ("loss_weight", "loss_mask")
"""Fields of a turn: factors of the weight of its loss."""
MOST_WEIGHT = 1_000_000
ID_LETTERS = 80

TurnPath = list[tuple[str, Any]]
"""Turns from the first to a last one: of each its name, for messages, and itself."""


class Turn(NamedTuple):
    """Its speaker, "system", "user" or "assistant"; its words; its loss's weight."""

    role: str
    words: str
    weight: float


@dataclass(frozen=True)
class Conversation:
    """A conversation of a person and an assistant.

    system: the system prompt; None: none.
    exchanges: of each, what the person said and what the assistant replied.
    weights: of the replies' losses; () for 1.
    """

    system: str | None
    exchanges: tuple[tuple[str, str], ...]
    weights: tuple[float, ...] = ()

    @property
    def messages(self) -> list[dict[str, str]]:
        """Returns the turns, as a chat template takes them."""
        turns = []
        if self.system is not None:
            turns.append({"role": "system", "content": self.system})
        for user, reply in self.exchanges:
            turns.append({"role": "user", "content": user})
            turns.append({"role": "assistant", "content": reply})
        return turns

    def part(self, some: slice) -> "Conversation":
        """Returns some of the exchanges, behind the system's words."""
        return Conversation(self.system, self.exchanges[some], self.weights[some])

    @property
    def text(self) -> str:
        """Joins all that was said; equal only where the words are."""
        return json.dumps([self.system, self.exchanges])


@dataclass(frozen=True)
class Row:
    """A conversation; or several that begin alike, of a group or a tree.

    where: file and number of the row, and its id.
    paths: each from the first turn to a last reply; what they share has its weight in
      the first of them.
    split: as of `InputFile`.
    unread: turns with a field that is not read, by its name.
    """

    where: str
    paths: tuple[Conversation, ...]
    split: str | None = None
    unread: Mapping[str, int] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Joins all that was said, as of `Conversation`."""
        texts = [path.text for path in self.paths]
        return json.dumps(texts) if len(texts) > 1 else texts[0]


def read_conversations(files: Sequence[InputFile]) -> Iterator[Row | BadRow]:
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
        for where, row in read_rows(file.path, FIELDS, file.span):
            if not isinstance(row, BadRow):
                row = parse_conversation(row, where, file.split)
            yield row


def parse_conversation(row: Any, where: str, split: str | None = None) -> Row | BadRow:
    """Parses one row.

    row: what JSON made of it, or a table's row.
    where: its file and number, for messages. split: of its file.
    """
    try:
        return _parse(row, where, split)
    except RecursionError:
        return BadRow(where, "turns that lie too deep in each other")


def _parse(row: Any, where: str, split: str | None) -> Row | BadRow:
    if not isinstance(row, dict):
        return BadRow(where, f"{type(row).__name__}, and no object with messages")
    if isinstance(row.get("id"), str | int):
        where = f"{where} (id {' '.join(str(row['id']).split())[:ID_LETTERS]})"
    formats = [f for f in (SHAREGPT, OPENAI, GROUP) if row.get(f.turns) is not None]
    if len(formats) > 1:
        names = " and ".join(its_format.turns for its_format in formats)
        return BadRow(where, f"both {names}")
    if not formats and isinstance(row.get(PROMPT), dict):
        formats = [TREE]
    if not formats:
        return BadRow(where, "no list of conversations, messages or completions")
    its_format = formats[0]
    if its_format is not TREE and not isinstance(row[its_format.turns], list):
        return BadRow(where, f"{its_format.turns} that are no list")
    unlearned = [n for n in UNLEARNED if row.get(n) not in (None, "", "[]", [])]
    if unlearned:
        return BadRow(where, f"a row with {unlearned[0]}, which is not learned")
    if not row[its_format.turns]:
        return BadRow(where, "no turns")
    conversations: list[Conversation] = []
    paths, seen = _paths(row, its_format)
    for path in paths:
        conversation = _conversation(path, its_format, where, seen)
        if isinstance(conversation, BadRow):
            return conversation
        if conversation is not None:
            conversations.append(conversation)
    if not conversations:
        return BadRow(where, f"no reply of {its_format.assistant} to learn")
    unread = _unread(paths, its_format)
    return Row(where, tuple(conversations), split, unread)


def _unread(paths: Sequence[TurnPath], its_format: TurnFormat) -> Counter[str]:
    """Counts the turns with a field that is not read, by its name."""
    read = {its_format.role, its_format.content, REPLIES, "text", *LEARNED, *UNSAID}
    # Paths share turns: each counts once.
    turns = {id(turn): turn for _, turn in chain.from_iterable(paths)}
    counts = Counter[str]()
    for turn in turns.values():
        for name, value in turn.items():
            if name not in read and value not in (None, "", [], {}):
                counts[name[:ID_LETTERS]] += 1
    return counts


def _conversation(
    path: TurnPath, its_format: TurnFormat, where: str, seen: set[int]
) -> Conversation | BadRow | None:
    """Checks the turns of a path; None: it has no reply to learn.

    seen: ids of turns whose loss counts elsewhere; those of the path join them.
    """
    turns: list[Turn] = []
    for name, turn in path:
        checked = _turn(turn, its_format)
        if isinstance(checked, str):
            return BadRow(f"{where}, {name}", checked)
        turns.append(checked._replace(weight=0.0) if id(turn) in seen else checked)
        seen.add(id(turn))
    if [turn.role for turn in turns].count("system") > 1:
        return BadRow(where, "more than one prompt of the system")
    system = turns.pop(0).words if turns[0].role == "system" else None
    if turns and turns[0].role == "assistant":
        turns.pop(0)
    names = {ours: theirs for theirs, ours in its_format.roles.items()}
    names["system"] = "system"
    for turn, expected in zip(turns, cycle(("user", "assistant")), strict=False):
        if turn.role != expected:
            speaks = f"{names[turn.role]} speaks where {names[expected]} should"
            return BadRow(where, speaks)
    exchanges = []
    weights = []
    # The last turn may have no reply.
    for user, reply in zip(turns[::2], turns[1::2], strict=False):
        exchanges.append((user.words, reply.words))
        weights.append(reply.weight)
    if not any(weights):
        return None
    given = () if {*weights} == {1.0} else tuple(weights)
    return Conversation(system, tuple(exchanges), given)


def _paths(
    row: Mapping[str, Any], its_format: TurnFormat
) -> tuple[list[TurnPath], set[int]]:
    """Returns the paths from a row's first turn to its last ones, and what has no loss.

    Words of the system that lie beside the turns come first. What has no loss are ids
    of turns.
    """
    turns = row[its_format.turns]
    begin: TurnPath = []
    for name in SYSTEM:
        if row.get(name):
            turn = {its_format.role: "system", its_format.content: row[name]}
            begin.append((name, turn))
    if its_format is TREE:
        return [begin + path for path in _below("prompt", turns)], set()
    if its_format is not GROUP:
        return [begin + _numbered("turn", turns)], set()
    prompt = row.get(PROMPT)
    if isinstance(prompt, list):
        begin += _numbered("prompt, turn", prompt)
    else:
        begin.append(("prompt", {"role": "user", "content": prompt}))
    answers = []
    for number, text in enumerate(turns, 1):
        fields = text if isinstance(text, dict) and "text" in text else {"text": text}
        answer = {"content": fields["text"], **fields, "role": "assistant"}
        answers.append([*begin, (f"completion {number}", answer)])
    return answers, {id(turn) for _, turn in begin}


def _numbered(name: str, turns: Sequence[Any]) -> TurnPath:
    return [(f"{name} {number}", turn) for number, turn in enumerate(turns, 1)]


def _below(name: str, turn: Any) -> list[TurnPath]:
    """Returns the paths from a turn of a tree of messages to its last ones."""
    replies = turn.get(REPLIES) if isinstance(turn, dict) else None
    replies = replies if isinstance(replies, list) else []
    paths = []
    for reply_name, reply in _numbered(f"{name}, reply", replies):
        for path in _below(reply_name, reply):
            paths.append([(name, turn), *path])
    return paths or [[(name, turn)]]


def _turn(turn: Any, its_format: TurnFormat) -> Turn | str:
    """Checks a turn; returns the reason to refuse it otherwise."""
    if not isinstance(turn, dict):
        return "a turn that is not an object"
    role = turn.get(its_format.role)
    value = turn.get(its_format.content)
    if not isinstance(role, str) or role not in its_format.roles:
        known = ", ".join(its_format.roles)
        return f"a turn from {short(role)}, not one of {known}"
    if its_format is TREE and not isinstance(turn.get(REPLIES, []), list | None):
        return "a turn whose replies are no list"
    unsaid = [name for name in UNSAID if turn.get(name)]
    if unsaid:
        return f"a turn with {unsaid[0]}, which is not learned"
    words = _words(value)
    if words is None:
        return f"a turn that says {_kind(value)}, not text"
    if not words.strip():
        return "an empty turn"
    if not is_unicode(words):
        return "a turn with half a surrogate pair"
    weight = _weight(turn)
    if isinstance(weight, str):
        return weight
    # Answers of a group go on behind their prompt as they are.
    words = words if its_format is GROUP else words.strip()
    return Turn(its_format.roles[role], words, weight)


def _weight(turn: Mapping[str, Any]) -> float | str:
    """Returns the weight of a turn's loss, 1 without any; or why it has none."""
    weight = 1.0
    for name in LEARNED:
        value = 1 if turn.get(name) is None else turn[name]
        try:
            weight *= float(value)
        except (TypeError, ValueError, OverflowError):
            weight = -1.0
        if not 0 <= weight <= MOST_WEIGHT:
            return f"a turn whose {name} is {short(value)}, not from 0 to {MOST_WEIGHT}"
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
