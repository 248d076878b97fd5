"""Forms of rows: the fields that tell them, and the turns that a row of each has.

    {"messages": [turn, …]}                       OpenAI; "conversations": ShareGPT
    {"prompt": "…", "completion": "…"}            TRL; both may be lists of turns
    {"prompt": "…", "chosen": "…", "rejected": …} preferences: the chosen side alone
    {"instruction": "…", "input": "…", "output": "…"}                       Alpaca
    {"prompt": "…", "completions": ["…", {"text": "…", "weight": 0.5}, …]}  a group
    {"prompt": {"role": "prompter", "text": "…", "replies": [turn, …]}}     a tree

Beside them a row may have `SYSTEM`, `TOOLS` and "id".
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from data.chat.turns import MEDIA, REPLIES, ROLE_FIELDS, ROLES, parsed
from data.json_text import short


class RowForm(NamedTuple):
    """Which fields a form of rows has.

    answer: has the answer, or all turns; rows that have it are of this form.
    question: with the turns before the answer, or texts to be joined to one of them.
    other: has turns that are not learned.
    is_group: whether the answer is a list of several, with blanks at their ends.
    """

    answer: str
    question: tuple[str, ...] = ()
    other: str = ""
    is_group: bool = False

    @property
    def fields(self) -> list[str]:
        return [*self.question, self.answer, *filter(None, [self.other])]


TREE = RowForm("prompt")
FORMS = (
    RowForm("messages"),
    RowForm("conversations"),
    RowForm("completions", ("prompt",), is_group=True),
    RowForm("completion", ("prompt",)),
    RowForm("chosen", ("prompt",), other="rejected"),
    RowForm("output", ("instruction", "input")),
)
KNOWN = ", ".join(" + ".join(form.fields) for form in FORMS)
SYSTEM = ("system", "system_prompt")
"""Fields of a row, beside its turns, with the words of the system."""
TOOLS = ("tools", "functions")
_OF_FORMS = dict.fromkeys(name for form in FORMS for name in form.fields)
FIELDS = ("id", *_OF_FORMS, *SYSTEM, *TOOLS, *MEDIA)
"""Fields of a row that are read."""
NOTHING = (None, "", "[]", [], {})

TurnPath = list[tuple[str, Any]]
"""Turns from the first to a last one: of each its name, for messages, and itself."""


def renamed(row: Any, names: Mapping[str, str]) -> Any:
    """Returns a row whose fields have our names. names: theirs by ours; "": none."""
    if not isinstance(row, dict):
        return row
    given = {our: row[name] for our, name in names.items() if name in row}
    left_out = {our for our, name in names.items() if not name}
    left_out.update(names[our] for our in given)
    return {n: value for n, value in row.items() if n not in left_out} | given


def find_form(row: Mapping[str, Any]) -> RowForm:
    """Returns the form of a row.

    Raises:
      ValueError: it has none, or several.
    """
    forms = [form for form in FORMS if row.get(form.answer) not in NOTHING]
    if not forms and isinstance(row.get(TREE.answer), dict):
        return TREE
    empty = [form.answer for form in FORMS if form.answer in row]
    if not forms:
        raise ValueError(f"no {empty[0]}" if empty else _advice(row))
    if len(forms) > 1:
        both = " and ".join(form.answer for form in forms)
        remedy = f"leave one out, as by --fields {forms[-1].answer}="
        raise ValueError(f"both {both}: {remedy}")
    return forms[0]


def _advice(row: Mapping[str, Any]) -> str:
    """Returns which forms of rows there are, and what a field may be called there."""
    near = []
    for name in row:
        like = difflib.get_close_matches(str(name), [*_OF_FORMS], n=1)
        near += [f"{ours}={name}" for ours in like if ours != name]
    names = ",".join(near) or "OURS=THEIRS"
    return f"fields {short([*row])}, not of {KNOWN}: name them (--fields {names})"


def read_tools(row: Mapping[str, Any]) -> list[Any] | None:
    """Returns the tools of a row.

    Raises:
      ValueError: they are no list of objects.
    """
    given = [(name, row[name]) for name in TOOLS if row.get(name) not in NOTHING]
    for name, value in given:
        tools = parsed(value, name)
        if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
            raise ValueError(f"{name} that are no list of objects")
        if name == "functions":
            return [{"type": "function", "function": tool} for tool in tools]
        return tools or None
    return None


def find_paths(
    row: Mapping[str, Any], form: RowForm
) -> tuple[list[TurnPath], set[int], set[str]]:
    """Returns the paths from a row's first turn to its last ones.

    Words of the system that lie beside the turns come first.

    Returns:
      The paths; ids of the turns that have no loss; fields that were read.

    Raises:
      ValueError: the turns, or answers, are no list.
    """
    begin: TurnPath = []
    for name in SYSTEM:
        if row.get(name):
            begin.append((name, {"role": "system", "content": row[name]}))
    answer = row[form.answer]
    if form is TREE:
        return [begin + path for path in _below("prompt", answer)], set(), {"prompt"}
    if not form.question or form.is_group:
        if not isinstance(answer, list):
            raise ValueError(f"{form.answer} that are no list")
    if not form.question:
        return [begin + _numbered("turn", answer)], set(), {form.answer}
    if not form.is_group and _is_whole(answer):
        # The sides of a preference begin with the same turns.
        other = row.get(form.other)
        sides = zip(answer, other if isinstance(other, list) else [], strict=False)
        shared = [turn for turn, _ in takewhile(lambda pair: pair[0] == pair[1], sides)]
        path = begin + _numbered(f"{form.answer}, turn", answer)
        return [path], {*map(id, shared)}, {form.answer}
    begin += _question(row, form.question)
    paths = []
    for number, one in enumerate(answer if form.is_group else [answer], 1):
        name = f"completion {number}" if form.is_group else form.answer
        paths.append([*begin, *_answer(name, one)])
    return paths, {id(turn) for _, turn in begin}, {form.answer, *form.question}


def _is_whole(answer: Any) -> bool:
    """Returns whether an answer is a conversation, with the question in it."""
    first = answer[0] if isinstance(answer, list) and answer else None
    if not isinstance(first, dict):
        return False
    roles = [ROLES.get(str(first.get(name))) for name in ROLE_FIELDS]
    return "user" in roles or "system" in roles


def _question(
    row: Mapping[str, Any], names: Sequence[str]
) -> Iterator[tuple[str, Any]]:
    """Yields the turns that the fields of a question are."""
    given = {name: row[name] for name in names if row.get(name) not in NOTHING}
    values = [*given.values()] or [None]
    if isinstance(values[0], list):
        yield from _numbered(f"{names[0]}, turn", values[0])
        return
    is_text = all(isinstance(value, str) for value in values)
    words = "\n\n".join(values) if is_text else values[0]
    yield next(iter(given), names[0]), {"role": "user", "content": words}


def _answer(name: str, answer: Any) -> TurnPath:
    """Returns the turns of an answer: a text, one with a weight, or a list of turns."""
    if isinstance(answer, list):
        return _numbered(f"{name}, turn", answer)
    fields = answer if isinstance(answer, dict) else {"text": answer}
    if not fields.keys() & {"text", "content"}:
        fields = {"text": answer}
    return [(name, {**fields, "role": "assistant"})]


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
