"""Rows of ShareGPT: what is read of them, and what is refused and named."""

import json

import pytest

from data.chat.conversation import Conversation, read_conversations
from data.chat.conversation import parse_conversation as parse
from data.text.input_files import InputFile
from data.text.skipped import BadRow


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


def reply(**fields):
    """Turns of which the last has these fields too."""
    found = row(*HELLO)
    found["conversations"][1] |= fields
    return found


def test_a_reply_that_is_learned_may_say_so():
    found = reply(weight=1, train=True, loss=None)
    assert parse(found, "f") == parse(row(*HELLO), "f")


def test_a_reply_without_question_and_a_question_without_reply_are_left_out():
    turns = [("gpt", "First?"), *HELLO, ("human", "Bye")]
    assert parse(row(*turns), "f").exchanges == (("Hello", "Hi!"),)
    turns = [("system", "Be kind."), *turns]
    assert parse(row(*turns), "f").exchanges == (("Hello", "Hi!"),)


def turns(*more, **fields):
    """A row of OpenAI's form, with more turns."""
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    return {"messages": [*said, *more]} | fields


@pytest.mark.parametrize(
    "bad, where, reason",
    [
        ([1, 2], "f", "list, and no object"),
        ("text", "f", "str, and no object"),
        ({"id": 3}, "f (id 3)", "no list of conversations"),
        ({"id": "a\nb"}, "f (id a b)", "no list of conversations"),
        ({"id": 3, "conversations": "Hi"}, "f (id 3)", "no list of conversations"),
        (row(id="e"), "f (id e)", "no turns"),
        (row(("bing", "Hi")), "f, turn 1", "a turn from 'bing', not one of system,"),
        (row(*HELLO, ([], "Hi")), "f, turn 3", "a turn from [], not one of system"),
        ({"conversations": ["Hi"]}, "f, turn 1", "a turn that is not an object"),
        (row(*HELLO, ("human", None)), "f, turn 3", "says NoneType, not text"),
        (row(("human", "Hi"), ("gpt", 5)), "f, turn 2", "says int, not text"),
        (row(("human", "Hi"), ("gpt", " \n")), "f, turn 2", "an empty turn"),
        (row(("human", "\ud83d"), ("gpt", "a")), "f, turn 1", "half a surrogate pair"),
        (row(HELLO[0], *HELLO), "f", "human speaks where gpt should"),
        (row(*HELLO, HELLO[1]), "f", "gpt speaks where human should"),
        (row(*HELLO, ("system", "No.")), "f", "system speaks where human should"),
        (row(("human", "Hello?")), "f", "no reply of gpt"),
        (row(("system", "Be kind.")), "f", "no reply of gpt"),
        (row(*HELLO, system=[7]), "f, system", "a turn that says int, not text"),
        (row(("system", "a"), *HELLO, system="b"), "f", "more than one prompt"),
        (row(*HELLO, system="a", system_prompt="b"), "f", "more than one prompt"),
        (row(*HELLO, image="x.png"), "f", "a row with image, which is not learned"),
        (row(*HELLO, videos=["x.mp4"]), "f", "a row with videos, which is not"),
        (reply(audios=["x.wav"]), "f, turn 2", "a turn with audios, which is not"),
        (reply(weight=0), "f, turn 2", "a reply of weight 0"),
        (reply(weight="0"), "f, turn 2", "a reply of weight 0"),
        (reply(train=False), "f, turn 2", "a reply of weight 0"),
        (reply(loss=False), "f, turn 2", "a reply of weight 0"),
        (turns({"role": "tool", "content": "7"}), "f, turn 3", "a turn from 'tool'"),
        (
            turns({"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]}),
            "f, turn 3",
            "a turn with tool_calls, which is not",
        ),
        (
            turns({"role": "user", "content": [{"type": "image_url"}]}),
            "f, turn 3",
            "a turn that says image_url, not text",
        ),
        (turns(tools=[{"name": "sum"}]), "f", "a row with tools, which is not learned"),
        (turns(conversations=[]), "f", "both conversations and messages"),
    ],
)
def test_bad_rows_are_named_with_their_reason(bad, where, reason):
    parsed = parse(bad, "f")
    assert isinstance(parsed, BadRow)
    assert parsed.where == where and reason in parsed.reason
    assert str(parsed) == f"{where}: {parsed.reason}"


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
