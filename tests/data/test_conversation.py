"""Rows of ShareGPT: what is read of them, and what is refused and named."""

import json

import pytest

from data.chat.conversation import Conversation, read_conversations
from data.chat.conversation import parse_conversation as parse
from data.text.input_files import InputFile
from data.text.skipped import BadRow
from tests.cases import pairs


def row(*turns, **fields):
    said = [dict(zip(("from", "value"), turn, strict=True)) for turn in turns]
    return {"conversations": said} | fields


def read(*paths):
    """Rows of named files."""
    files = [InputFile(path, None, True) for path in paths]
    return [*read_conversations(files)]


HELLO = [("human", " Hello \n"), ("gpt", "Hi!")]


def test_turns_become_exchanges():
    more = [("human", "And you?"), ("gpt", "Well.")]
    parsed = parse(row(("system", "Be kind."), *HELLO, *more, id="x7"), "f")
    exchanges = ("Hello", "Hi!"), ("And you?", "Well.")
    assert parsed == Conversation("f (id x7)", "Be kind.", exchanges)
    assert parse(row(*HELLO), "f").system is None


@pytest.mark.parametrize("name", ["system", "system_prompt"])
def test_words_of_the_system_may_lie_beside_the_turns(name):
    found = row(*HELLO, **{name: "Be kind.", "images": [], "audio": None, "other": 1})
    assert parse(found, "f") == parse(row(("system", "Be kind."), *HELLO), "f")
    assert parse(row(*HELLO, **{name: ""}), "f") == parse(row(*HELLO), "f")


def test_a_reply_without_question_and_a_question_without_reply_are_left_out():
    turns = [("gpt", "First?"), *HELLO, ("human", "Bye")]
    assert parse(row(*turns), "f").exchanges == (("Hello", "Hi!"),)
    turns = [("system", "Be kind."), *turns]
    assert parse(row(*turns), "f").exchanges == (("Hello", "Hi!"),)


@pytest.mark.parametrize("text, said", pairs("bad_conversations.txt"))
def test_bad_rows_are_named_with_their_reason(text, said):
    parsed = parse(json.loads(text), "f")
    assert isinstance(parsed, BadRow) and str(parsed) == said


def test_a_reply_that_is_learned_may_say_so():
    found = row(*HELLO)
    found["conversations"][1] |= {"weight": 1, "train": True, "loss": None}
    assert parse(found, "f") == parse(row(*HELLO), "f")


def test_lists_and_lines_are_read_in_order_each_row_by_its_place(tmp_path):
    good, bad = row(*HELLO, id="a"), row(id="b")
    whole, lines = tmp_path / "whole.json", tmp_path / "lines.jsonl"
    whole.write_text(json.dumps([good, bad]))
    deep, twice = "[" * 100_000, '{"id": 1, "id": 2}'
    found = json.dumps(good), "", "{broken", json.dumps(bad), deep, twice
    lines.write_text("\n".join(found))
    rows = read(whole, lines)
    assert "lie too deep" in rows.pop(5).reason
    assert "'id' stands twice" in rows.pop().reason
    assert [r.where for r in rows] == [
        f"{whole}[0] (id a)",
        f"{whole}[1] (id b)",
        f"{lines}:1 (id a)",
        f"{lines}:3",
        f"{lines}:4 (id b)",
    ]
    assert [isinstance(r, Conversation) for r in rows] == [True, 0, True, 0, 0]
    assert rows[3].reason.startswith("no JSON (Expecting property name")
    assert rows[0].text == rows[2].text


def test_files_that_hold_no_rows_are_refused(tmp_path):
    path = tmp_path / "rows.json"
    path.with_suffix(".txt").write_text("[]")
    with pytest.raises(ValueError, match=r"rows.txt is of no known format .*jsonl"):
        read(path.with_suffix(".txt"))
    for text in ("[", "[" * 100_000, f"[{'9' * 5000}]"):
        path.write_text(text)
        with pytest.raises(
            ValueError, match="rows.json cannot be read as a .json"
        ) as caught:
            read(path)
        assert str(caught.value).isprintable()
