"""Conversations in the format of ShareGPT, checked one by one.

A file is a JSON list, or JSON lines, of

    {"id": "…", "conversations": [{"from": "human", "value": "…"},
                                  {"from": "gpt", "value": "…"}, …]}

with a turn from "system" before all others, if any. As in FastChat, a turn of "gpt"
before the first of "human" is left out, and so is a last one of "human" that has no
reply.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from data.json_text import parse_json, short

ROLES = ("system", "human", "gpt")
ID_LETTERS = 80


@dataclass(frozen=True)
class Conversation:
    """A conversation of a person and an assistant.

    where: file and number of the row, and its id.
    system: the system prompt; None: none.
    exchanges: of each, what the person said and what the assistant replied.
    """

    where: str
    system: str | None
    exchanges: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """Joins all that was said; equal only where the conversations are."""
        return json.dumps([self.system, self.exchanges])


@dataclass(frozen=True)
class BadRow:
    """A row that is not a conversation: where it is, and the reason."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


def read_conversations(paths: Sequence[Path]) -> Iterator[Conversation | BadRow]:
    """Yields every row of the files, in their order.

    Raises:
      FileNotFoundError: a file does not exist.
      ValueError: a file is neither `.jsonl` nor a JSON list.
    """
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"input {path} does not exist")
    for path in paths:
        rows = _json_lines(path) if path.suffix == ".jsonl" else _json_list(path)
        for where, row in rows:
            yield row if isinstance(row, BadRow) else parse_conversation(row, where)


def parse_conversation(row: Any, where: str) -> Conversation | BadRow:
    """Parses one row.

    row: what JSON made of it.
    where: its file and number, for messages.
    """
    if isinstance(row, dict) and isinstance(row.get("id"), str | int):
        where = f"{where} (id {' '.join(str(row['id']).split())[:ID_LETTERS]})"
    turns = row.get("conversations") if isinstance(row, dict) else None
    if not isinstance(turns, list):
        return BadRow(where, "no list of conversations")
    if not turns:
        return BadRow(where, "no turns")
    for number, turn in enumerate(turns, 1):
        wrong = _fault(turn)
        if wrong:
            return BadRow(f"{where}, turn {number}", wrong)
    said = [(turn["from"], turn["value"].strip()) for turn in turns]
    system = said.pop(0)[1] if said[0][0] == "system" else None
    if said and said[0][0] == "gpt":
        said.pop(0)
    if said and said[-1][0] == "human":
        said.pop()
    for (role, _), expected in zip(said, cycle(("human", "gpt")), strict=False):
        if role != expected:
            return BadRow(where, f"{role} speaks where {expected} should")
    if not said:
        return BadRow(where, "no reply of gpt")
    values = [value for _, value in said]
    exchanges = tuple(zip(values[::2], values[1::2], strict=True))
    return Conversation(where, system, exchanges)


def _fault(turn: Any) -> str | None:
    """Returns what is wrong with a turn by itself, None if nothing."""
    if not isinstance(turn, dict):
        return "a turn that is not an object"
    role, value = turn.get("from"), turn.get("value")
    if role not in ROLES:
        return f"a turn from {short(role)}, not one of {', '.join(ROLES)}"
    if not isinstance(value, str):
        return f"a turn that says {type(value).__name__}, not text"
    if not value.strip():
        return "an empty turn"
    if not _is_unicode(value):
        return "a turn with half a surrogate pair"
    return None


def _is_unicode(value: str) -> bool:
    try:
        value.encode("utf-8")  # JSON can spell half a surrogate pair
    except UnicodeEncodeError:
        return False
    return True


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                yield where, parse_json(line)
            except ValueError as error:
                yield where, BadRow(where, f"no JSON ({error})")


def _json_list(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        rows = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not a JSON file ({error}): mend it") from error
    if not isinstance(rows, list):
        raise ValueError(
            f"{path} holds no list of rows, but {type(rows).__name__}: give it the "
            "ending .jsonl if each line is a row"
        )
    for number, row in enumerate(rows):
        yield f"{path}[{number}]", row
