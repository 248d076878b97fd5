"""Conversations of people, assistants and tools, and groups of them.

A row (see data/text/reading/row_files.py) has one of the forms of row_forms.py, with
turns as in turns.py: one from "system" (or "developer") before all others, if any; a
content may be a list of {"type": "text", "text": "…"}. An assistant may call tools,
think, and speak several times in a row. As in FastChat, an assistant's turn before the
first of the user is left out, and so are last ones that have no reply. Rows with
anything else that cannot be learned are refused.

A reply's "weight", and the other fields of `LEARNED`, multiply its loss; each reply is
learned once, those of a prompt not at all. Fields that are not read are counted.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

from data.chat.row_forms import (
    FIELDS,
    NOTHING,
    SYSTEM,
    TOOLS,
    RowForm,
    TurnPath,
    find_form,
    find_paths,
    read_tools,
    renamed,
)
from data.chat.turns import MEDIA, READ, Message, Turn, read_turn
from data.text.reading.row_files import FORMATS, TABLES, InputFile, ending, read_rows
from data.text.reading.skipped import BadRow

SPEAKS_NEXT = {
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "assistant", "tool"),
    "tool": ("assistant", "tool", "user"),
}
"""Who may speak after whom."""
ID_LETTERS = 80


@dataclass(frozen=True)
class Conversation:
    """A conversation of a person and an assistant.

    messages: its turns, as a chat template takes them.
    weights: of the replies' losses; () for 1.
    tools: what the assistant may call, as the row describes it; None: nothing.
    """

    messages: tuple[Message, ...]
    weights: tuple[float, ...] = ()
    tools: list[Any] | None = None

    @property
    def exchanges(self) -> list[tuple[Message, ...]]:
        """Returns the turns from each of the user up to the next one."""
        roles = [message["role"] for message in self.messages]
        begins = [number for number, role in enumerate(roles) if role == "user"]
        bounds = pairwise([*begins, len(roles)])
        return [self.messages[begin:end] for begin, end in bounds]

    def part(self, begin: int, end: int | None) -> "Conversation":
        """Returns some of the exchanges, behind the system's words."""
        exchanges = self.exchanges
        before = count_replies(chain.from_iterable(exchanges[:begin]))
        turns = (*chain.from_iterable(exchanges[begin:end]),)
        weights = self.weights[before : before + count_replies(turns)]
        has_system = self.messages[0]["role"] == "system"
        return Conversation((*self.messages[:has_system], *turns), weights, self.tools)

    @property
    def text(self) -> str:
        """Joins all that was said; equal only where the words are."""
        return json.dumps([self.messages, self.tools])


def count_replies(messages: Iterator[Message] | Sequence[Message]) -> int:
    return [message["role"] for message in messages].count("assistant")


@dataclass(frozen=True)
class Row:
    """A conversation; or several that begin alike, of a group or a tree.

    where: file and number of the row, and its id.
    paths: each from the first turn to a last reply; what they share has its weight in
      the first of them.
    split: as of `InputFile`.
    unread: how often there was what is not read, by its name.
    turns: of all paths, what they share once.
    """

    where: str
    paths: tuple[Conversation, ...]
    split: str | None = None
    unread: Mapping[str, int] = field(default_factory=dict)
    turns: int = 0

    @property
    def text(self) -> str:
        """Joins all that was said, as of `Conversation`."""
        texts = [path.text for path in self.paths]
        return json.dumps(texts) if len(texts) > 1 else texts[0]


def read_conversations(
    files: Sequence[InputFile], names: Mapping[str, str] | None = None
) -> Iterator[Row | BadRow]:
    """Yields every row of the files, in their order.

    names: what fields of rows are called in the files, by our names; "": not read.

    Raises:
      OSError, ValueError: a file does not hold rows, or is damaged.
    """
    names = names or {}
    columns = [name for name in (*FIELDS, *names.values()) if name]
    for file in files:
        if ending(file.path) not in FORMATS:
            raise ValueError(
                f"{file.path} is of no known format of rows, {', '.join(FORMATS)} (and "
                ".gz, .zst): give it the ending of its own, convert it, or name the "
                'files to read (--pattern "*.parquet")'
            )
        for where, row in read_rows(file.path, columns, file.span):
            if not isinstance(row, BadRow):
                if ending(file.path) in TABLES:
                    row = _without_nulls(row)
                row = parse_conversation(renamed(row, names), where, file.split)
            yield row


def _without_nulls(value: Any) -> Any:
    """Leaves out the fields that a table's column has for the sake of other rows."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {n: _without_nulls(item) for n, item in value.items() if item is not None}


def parse_conversation(row: Any, where: str, split: str | None = None) -> Row | BadRow:
    """Parses one row.

    row: what JSON made of it, or a table's row.
    where: its file and number, for messages. split: of its file.
    """
    if not isinstance(row, dict):
        return BadRow(where, f"{type(row).__name__}, and no object with messages")
    if isinstance(row.get("id"), str | int):
        where = f"{where} (id {' '.join(str(row['id']).split())[:ID_LETTERS]})"
    try:
        return _parse(row, where, split)
    except RecursionError:
        return BadRow(where, "turns that lie too deep in each other")
    except ValueError as error:
        return BadRow(where, str(error))


def _parse(row: Mapping[str, Any], where: str, split: str | None) -> Row | BadRow:
    form = find_form(row)
    unlearned = [name for name in MEDIA if row.get(name) not in NOTHING]
    if unlearned:
        raise ValueError(f"a row with {unlearned[0]}, which is not learned")
    tools = read_tools(row)
    paths, seen, read = find_paths(row, form)
    unread = _unread(row, {*read, *SYSTEM, *TOOLS, "id"}, form, paths)
    conversations: list[Conversation] = []
    for path in paths:
        turns = []
        for name, turn in path:
            try:
                checked = read_turn(turn, strips=not form.is_group)
            except ValueError as error:
                return BadRow(f"{where}, {name}", str(error))
            is_seen = id(turn) in seen
            turns.append(checked._replace(weight=0.0) if is_seen else checked)
            seen.add(id(turn))
        conversation = _conversation(turns, tools, unread)
        if conversation is not None:
            conversations.append(conversation)
    if not conversations:
        raise ValueError("no reply of the assistant to learn")
    return Row(where, tuple(conversations), split, unread, len(seen))


def _unread(
    row: Mapping[str, Any], read: set[str], form: RowForm, paths: Sequence[TurnPath]
) -> Counter[str]:
    """Counts the fields of a row and of its turns that are not read, by their names."""
    counts = Counter[str]()
    for name, value in row.items():
        if name not in read and value not in NOTHING:
            is_other = name == form.other
            why = f", as the {form.answer} side alone is learned" if is_other else ""
            counts[f"{str(name)[:ID_LETTERS]} of rows{why}"] += 1
    # Paths share turns: each counts once.
    turns = {id(turn): turn for _, turn in chain.from_iterable(paths)}
    for turn in turns.values():
        for name, value in turn.items() if isinstance(turn, dict) else ():
            if name not in READ and value not in NOTHING:
                counts[f"{str(name)[:ID_LETTERS]} of turns"] += 1
    return counts


def _conversation(
    turns: list[Turn], tools: list[Any] | None, unread: Counter[str]
) -> Conversation | None:
    """Checks the order of turns; None: there is no reply to learn.

    unread: counts the turns that are left out.

    Raises:
      ValueError: somebody speaks out of turn.
    """
    if [turn.role for turn in turns].count("system") > 1:
        raise ValueError("more than one prompt of the system")
    kept = list(turns)
    first = int(bool(kept) and kept[0].role == "system")
    while len(kept) > first and kept[first].role == "assistant":
        del kept[first]
    for before, turn in pairwise([None, *kept]):
        expected = SPEAKS_NEXT[before.role] if before else ("system", "user")
        if turn and turn.role not in expected:
            should = " or ".join(expected)
            raise ValueError(f"{turn.speaker} speaks where {should} should")
    while kept and kept[-1].role != "assistant":
        kept.pop()
    weights = [turn.weight for turn in kept if turn.role == "assistant"]
    if not any(weights):
        return None
    if left_out := len(turns) - len(kept):
        unread["turns before a question or behind the last reply"] += left_out
    given = () if {*weights} == {1.0} else tuple(weights)
    return Conversation(tuple(turn.message for turn in kept), given, tools)
