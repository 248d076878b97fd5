"""Conversations: rows that are read or refused, and documents of them with masks."""

import json
import re

import numpy as np
import pytest

from data.chat.chat_template import ChatTemplate, open_template
from data.chat.conversation import Conversation, Row, read_conversations
from data.chat.conversation import parse_conversation as parse
from data.chat.corpus import ChatEncoder, prepare_chats
from data.text.reading.parts import Counts
from data.text.reading.row_files import InputFile
from data.text.reading.skipped import BadRow
from data.text.tokens.token_file import TokenFile
from data.text.tokens.tokenizer import ByteTokenizer
from tests.cases import pairs
from tests.small import chats
from tests.support import tables

BYTES = ByteTokenizer()
END = "\0"
"""Stands for the end of a document in what `shown` gives."""


def talk(*exchanges, system="S"):
    return Row("here", (Conversation((*chats.talk(system, *exchanges),)),))


def encoder(context_tokens=1000, too_long="truncate"):
    options = {"context_tokens": context_tokens, "too_long": too_long}
    return ChatEncoder(open_template("vicuna", BYTES), **options)


def shown(document):
    """Text of bytes, and under every letter whether it is supervised."""
    text = "".join(END if t == 256 else chr(t) for t in document.tokens)
    return text, "".join(np.where(document.weights, "^", "_"))


def mask_of(text):
    """The mask of a Vicuna text in which no one says ASSISTANT:, by looking for it."""
    mask = ["_"] * len(text)
    for reply in re.finditer(f"(?<=ASSISTANT:)[^{END}]*{END}?", text):
        mask[slice(*reply.span())] = "^" * len(reply[0])
    return "".join(mask)


def test_replies_and_their_ends_are_supervised_and_nothing_else():
    ((document,),) = encoder().encode([talk(("ab", "c"), ("ASSISTANT:", "c d"))])
    text, mask = shown(document)
    assert text == f"S USER: ab ASSISTANT: c{END}USER: ASSISTANT: ASSISTANT: c d{END}"
    assert mask == "_" * 21 + "^^^" + "_" * 27 + "^^^^^"
    assert (document.tokens.dtype, document.weights.dtype) == (np.int32, bool)
    ((document,),) = encoder().encode([talk(("Hi?", "Ho"), system=None)])
    assert shown(document)[0] == (
        "A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's "
        f"questions. USER: Hi? ASSISTANT: Ho{END}"
    )


def test_a_turn_that_is_cut_is_supervised_as_far_as_it_goes():
    conversation = talk(("q", "first"), ("q", "second"))
    full = f"S USER: q ASSISTANT: first{END}USER: q ASSISTANT: second{END}"
    for context in range(24, len(full)):
        ((document,),) = encoder(context).encode([conversation])
        text, mask = shown(document)
        assert text == full[:context]
        assert mask == mask_of(full)[:context]
    ((document,),) = encoder(len(full)).encode([conversation])
    assert shown(document)[0] == full
    # Where no reply begins, there is nothing to learn.
    opening = len("S USER: q ASSISTANT:")
    lost = BadRow("here", "no reply within the context")
    assert encoder(opening).encode([conversation]) == [lost]
    assert len(encoder(opening + 1).encode([conversation])[0]) == 1


def test_long_conversations_are_split_between_exchanges():
    conversation = talk(("a", "one"), ("b", "two"), ("c", "three"), ("d", "x" * 90))
    opening = f"S USER: a ASSISTANT: one{END}USER: b ASSISTANT: two{END}"
    (documents,) = encoder(len(opening), "split").encode([conversation])
    texts, masks = zip(*map(shown, documents), strict=True)
    cut = f"S USER: d ASSISTANT: {'x' * 90}"[: len(opening)]
    assert texts == (opening, f"S USER: c ASSISTANT: three{END}", cut)
    assert masks == tuple(map(mask_of, texts))
    assert masks[2] == "_" * 20 + "^" * (len(opening) - 20)
    # One token fewer, and the second exchange begins a document of its own.
    short = talk(("a", "one"), ("b", "two"))
    (documents,) = encoder(len(opening) - 1, "split").encode([short])
    assert len(documents) == 2
    assert shown(documents[0])[0] == f"S USER: a ASSISTANT: one{END}"


def rows(count):
    return [
        {
            "id": f"r{number}",
            "conversations": [
                {"from": "human", "value": f"question {number}"},
                {"from": "gpt", "value": f"answer {number} " * (number % 5 + 1)},
            ]
            * (number % 3 + 1),
        }
        for number in range(count)
    ]


def write(path, found):
    path.write_text(json.dumps(found))
    return path


def test_supervised_tokens_are_those_of_all_replies_and_their_ends(tmp_path):
    source, output = write(tmp_path / "in.json", rows(60)), tmp_path / "out"
    summary = prepare_chats([source], output, encoder(400), validation_fraction=0.2)
    assert summary.rows == 60 and not summary.skipped.counts
    for split, counts in summary.writer.counts.items():
        corpus = TokenFile.open(output, split)
        assert summary.writer.supervised[split] == corpus.loss_mask[:].sum()
        assert counts.tokens == corpus.tokens.size
        assert counts.documents == corpus.starts.size
    assert sum(c.documents for c in summary.writer.counts.values()) == 60
    talks = [row["conversations"] for row in rows(60)]
    wanted = [len(turn["value"].strip()) + 2 for talk in talks for turn in talk[1::2]]
    assert summary.writer.supervised.total() == sum(wanted)


def test_answers_that_are_alike_count_twice(tmp_path):
    group = {"prompt": "Q", "completions": ["yes", "yes"]}
    source = write(tmp_path / "in.json", [group])
    summary = prepare_chats([source], tmp_path / "out", encoder())
    assert not summary.divided.counts  # they are one tree
    found = TokenFile.open(tmp_path / "out", "train")
    weights = found.weights(np.arange(found.tokens.size))
    assert weights.tolist() == [0] * (found.tokens.size - 5) + [2] * 5


def test_parts_of_a_conversation_stay_on_one_side(tmp_path):
    source = write(tmp_path / "in.json", rows(60))
    parts = encoder(250, "split")
    out = prepare_chats([source], tmp_path / "out", parts, validation_fraction=0.3)
    assert sum(counts.documents for counts in out.writer.counts.values()) > 60
    numbers = {}
    for split in ("train", "validation"):
        corpus = TokenFile.open(tmp_path / "out", split)
        documents = np.split(corpus.tokens[:], corpus.starts[1:])
        texts = [bytes(d[d < 256].astype(np.uint8)).decode() for d in documents]
        numbers[split] = {text.split("question ")[1].split()[0] for text in texts}
    assert numbers["train"].isdisjoint(numbers["validation"])
    assert len(numbers["train"] | numbers["validation"]) == 60


BEGIN, LONG = f"S USER: a ASSISTANT: b{END}", f"USER: b ASSISTANT: {'x' * 90}{END}"


@pytest.mark.parametrize(
    "too_long, cut, more",
    [
        ("truncate", f"{BEGIN}{LONG}USER: c ASSISTANT: d{END}", "--too-long split"),
        ("split", f"S {LONG}", "a larger --context-tokens"),
    ],
)
def test_what_is_cut_off_is_counted(tmp_path, too_long, cut, more):
    """But not of bad rows."""
    talks = ["ab"], ["ab", ("b", "x" * 90), "cd"], [("q" * 90, "not in the context")]
    found = [talk(*exchanges).paths[0].messages for exchanges in talks]
    source = write(tmp_path / "in.json", [{"messages": turns} for turns in found])

    def said(name, context):
        made = encoder(context, too_long)
        output = tmp_path / name
        return str(prepare_chats([source], output, made, on_bad_row=lambda row: None))

    why = f"{len(cut) - 45} tokens lost: 1, longer than 45 tokens ({more}"
    assert f"\ncut, {why}" in said("out", 45)
    assert "tokens lost" not in said("whole", 1000)


def test_a_template_that_drops_the_system_s_words_says_so(tmp_path):
    source = "{% for m in messages if m.role != 'system' %}{{ m.content }}"
    source += "{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    talks = [talk((f"{i}", "x"), system=s) for i, s in enumerate((*"SST", None))]
    rows = [{"messages": one.paths[0].messages} for one in talks]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    drops = ChatEncoder(ChatTemplate("x", source, BYTES), context_tokens=100)
    for name, one in ("drops", drops), ("writes", encoder()):
        said = str(prepare_chats([tmp_path / "in.jsonl"], tmp_path / name, one))
        words = "WARNING: not in the chat template: 3, the system's words; first "
        assert (words in said) == (one is drops)


def test_fields_of_turns_that_are_not_read_are_counted(tmp_path):
    turns = [{"role": "user", "content": "Q", "mask": 1, "name": ""}]
    turns += [{"role": "assistant", "content": "A", "mask": 0, "x": [1], "weight": 2}]
    node = {"role": "prompter", "text": "Q", "rank": 0}
    ends = [{"role": "assistant", "text": text, "rank": 1} for text in "ab"]
    rows = [{"messages": turns}, {"prompt": node | {"replies": ends}}]
    source = write(tmp_path / "in.json", rows)
    said = str(prepare_chats([source], tmp_path / "out", encoder()))
    assert [line for line in said.splitlines() if line.startswith("not read: ")] == [
        f"not read: 3, rank of turns; first {source}[1]",
        f"not read: 2, mask of turns; first {source}[0]",
        f"not read: 1, x of turns; first {source}[0]",
    ]


def test_names_of_this_tokenizers_special_tokens_are_reported(tmp_path):
    rows = [{"prompt": q, "completions": ["A"]} for q in ("<end>", "end", "x")]
    source = write(tmp_path / "in.json", rows)
    said = str(prepare_chats([source], tmp_path / "out", encoder()))
    assert "markup, learned as text: 1, names of special tokens" in said


def test_rows_that_lie_too_deep_are_bad_rows():
    turn = {"role": "assistant", "text": "a"}
    for n in range(3000):
        role = "prompter" if n % 2 == 0 else "assistant"
        turn = {"role": role, "text": "a", "replies": [turn]}
    assert parse({"prompt": turn}, "f") == BadRow(
        "f", "turns that lie too deep in each other"
    )
    content = "a"
    for _ in range(60):
        content = [content]
    bad = parse({"messages": [{"role": "user", "content": content}]}, "f")
    assert bad.reason == "a turn that says str, not text"


def row(*turns, **fields):
    said = [dict(zip(("from", "value"), turn, strict=True)) for turn in turns]
    return {"conversations": said} | fields


HELLO = [("human", " Hello \n"), ("gpt", "Hi!")]


@pytest.mark.parametrize("text, wanted", pairs("conversations.txt"))
def test_turns_become_exchanges(text, wanted):
    found = parse(json.loads(text), "f")
    (talk,) = found.paths
    system, *_ = [t["content"] for t in talk.messages if t["role"] == "system"] + [None]
    parts = [found.where, str(system)]
    for exchange in talk.exchanges:
        turns = []
        for turn in exchange:
            calls = [
                call["function"]["name"] + "()" for call in turn.get("tool_calls", ())
            ]
            turns.append(turn["content"] or turn.get("thinking") or " ".join(calls))
        parts.append(" > ".join(map(str, turns)))
    parts += [str(talk.weights)] * bool(talk.weights)
    assert " | ".join(parts) == wanted.replace("\\n", "\n")


CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
QUESTION, RESULT = {"role": "user", "content": "Q"}, {"role": "tool", "content": "T"}
CALLS = {"role": "assistant", "content": "A", "tool_calls": [CALL]}
THINKS = {"role": "assistant", "content": "B", "reasoning": "R"}


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        (
            [QUESTION, CALLS, THINKS],
            "does not write tool_calls: choose another, as the",
        ),
        (
            [QUESTION, THINKS, RESULT, THINKS],
            "does not write turns of tools: choose ano",
        ),
        ([QUESTION, THINKS, THINKS], ""),
    ],
)
def test_what_a_template_does_not_write_is_said_or_refuses_the_row(turns, said):
    """Vicuna's would write what a tool says as a reply, and leave out calls."""
    row = {"messages": [*turns, QUESTION], "tools": [CALL], "source": "x"}
    row = parse(row, "f")
    counts = Counts()
    (found,) = encoder().encode([row], counts)
    assert said in str(found) and isinstance(found, BadRow) == bool(said)
    assert counts.unwritten.counts == {"the tools": 1, "thoughts of replies": 1}
    no_reply = "turns before a question or behind the last reply"
    assert counts.unread.counts == {"source of rows": 1, no_reply: 1}


def test_fields_have_other_names_and_columns_nulls_for_other_rows(tmp_path):
    path = tmp_path / "in.parquet"
    calls = [{"function": {"name": "f", "arguments": {n: 1}}} for n in "xy"]
    turns = [CALLS | {"tool_calls": calls}, RESULT, THINKS]
    path.write_bytes(
        tables.as_parquet([{"q": [QUESTION], "a": turns, "completion": "x"}])
    )
    files = [InputFile(path, None, True)]
    names = {"prompt": "q", "completion": "a"}
    (row,) = read_conversations(files, names)
    assert [*row.paths[0].messages] == [QUESTION, *turns]
    (row,) = read_conversations(files, {"prompt": "q", "completion": ""})
    assert "['q'], not of messages" in row.reason.replace("prompt", "q")


def test_groups_are_conversations_in_which_each_reply_counts_once():
    said = [{"role": r, "content": r} for r in ("user", "assistant", "user")]
    found = parse(
        {"prompt": said, "completions": [{"text": " a\n", "weight": 3}, "b"]}, "f"
    )
    asked = ("user", "assistant"), ("user", " a\n")
    for path, answer in zip(found.paths, (" a\n", "b"), strict=True):
        assert [*path.messages] == chats.talk(None, asked[0], ("user", answer))
    assert [path.weights for path in found.paths] == [(0, 3), (0, 1)]
    ends = [{"role": "assistant", "text": text, "train": text != "z"} for text in "xyz"]
    again = {"role": "prompter", "text": "?", "replies": ends}
    reply = {"role": "assistant", "text": "!", "loss": "0.5", "replies": [again]}
    tree = {"role": "prompter", "text": "Q", "replies": [ends[0], reply]}
    found = parse(json.loads(json.dumps({"prompt": tree})), "f")
    assert [path.weights for path in found.paths] == [(), (0.5, 1), (0, 1)]
    assert [*found.paths[2].messages] == chats.talk(None, ("Q", "!"), ("?", "y"))


@pytest.mark.parametrize("text, said", pairs("bad_conversations.txt"))
def test_bad_rows_are_named_with_their_reason(text, said):
    parsed = parse(json.loads(text), "f")
    assert isinstance(parsed, BadRow) and str(parsed) == said


def test_lists_and_lines_are_read_in_order_each_row_by_its_place(tmp_path):
    good, bad = row(*HELLO, id="a"), row(id="b")
    whole, lines = tmp_path / "whole.json", tmp_path / "lines.jsonl"
    whole.write_text(json.dumps([good, bad]))
    deep, twice = "[" * 100_000, '{"id": 1, "id": 2}'
    found = json.dumps(good), "", "{broken", json.dumps(bad), deep, twice
    lines.write_text("\n".join(found))
    rows = [*read_conversations([InputFile(p, None, True) for p in (whole, lines)])]
    assert "lie too deep" in rows.pop(5).reason
    assert "'id' stands twice" in rows.pop().reason
    assert [r.where for r in rows] == [
        f"{whole}[0] (id a)",
        f"{whole}[1] (id b)",
        f"{lines}:1 (id a)",
        f"{lines}:3",
        f"{lines}:4 (id b)",
    ]
    assert [isinstance(r, Row) for r in rows] == [True, 0, True, 0, 0]
    assert rows[3].reason.startswith("no JSON (Expecting property name")
    assert rows[0].text == rows[2].text
