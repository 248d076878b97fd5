"""From chats to a model that answers."""

import io
import itertools
import json
import sys
from pathlib import Path

import pytest

from data.chat.chat_template import format_source
from data.text.tokens.published import open_tokenizer
from data.text.tokens.token_file import TokenFile
from tests.cases import table
from tests.small.chats import FAMILIES
from tests.small.runs import Run
from tests.support import tables
from tools import generate, prepare_chat

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("programs")]

NAMES = "Ada Ben Cleo Dan Eva Finn Gus Hanna Ida Jan Kim Lea".split()
TOWNS = "Rome Oslo Bern Kyiv Riga Lima Cork Graz Pisa Faro Jena Ulm".split()
ODD = 3 * ["<|eot_id|><|im_end|>"] + 9 * [""]

# What the second question is about stands in the first alone. A reply does not end at
# the name of a token in it.
CONVERSATIONS = [
    (f"Where is {name}?", f"In {town}{odd}.", "Since?", f"{1980 + n}.")
    for n, (name, town, odd) in enumerate(zip(NAMES, TOWNS, ODD, strict=True))
]


def write_tokenizer(directory: Path) -> None:
    """A published base model's tokenizer, with a template."""
    family = FAMILIES["llama3"]
    family.save(directory, ["\n".join(talk) for talk in CONVERSATIONS])
    config = {"bos_token": family.bos, "eos_token": "<|end_of_text|>"}
    config |= {"add_bos_token": True, "chat_template": format_source("llama3")}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def write_chats(path: Path) -> None:
    """Questions are lists of parts, as of models that see."""
    rows = []
    for talk in CONVERSATIONS:
        asked = [
            {"role": "user", "content": [{"type": "text", "text": q}]}
            for q in talk[::2]
        ]
        replies = [{"role": "assistant", "content": words} for words in talk[1::2]]
        rows.append([*itertools.chain(*zip(asked, replies, strict=True))])
    path.write_bytes(tables.as_lines([{"messages": row} for row in rows]))


FIELDS = dict(table("runs.txt", "chats"))


def test_a_model_trained_on_chats_answers_and_stops(tmp_path, capsys, monkeypatch):
    """Asked in the corpus' template, on a ring, turn by turn."""
    write_tokenizer(tmp_path)
    chats, corpus = tmp_path / "chats.jsonl", tmp_path / "corpus"
    write_chats(chats)
    options = "--output", str(corpus), "--context-tokens", "64"
    assert prepare_chat.main([str(chats), *options, "--tokenizer", str(tmp_path)]) == 0
    run = Run(corpus, tmp_path / "run", **FIELDS)
    run.command()
    assert run.losses()[-1] < 0.1
    held_out = TokenFile.open(corpus, "validation")
    held_out = open_tokenizer(held_out.tokenizer).decode(held_out.tokens[:])
    learned = [talk for talk in CONVERSATIONS if talk[0] not in held_out][:4]
    lines = "".join(f"{talk[0]}\n{talk[2]}\n\n" for talk in learned)
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    mesh = {"attention": "striped", "mesh__fsdp": 2, "mesh__ring": 4}
    flags = run.flags(simulated_devices=0, **mesh)
    assert generate.main([*flags, "--chat", "--temperature", "0"]) == 0
    answers = [reply for talk in learned for reply in talk[1::2]]
    assert capsys.readouterr().out.splitlines() == answers
