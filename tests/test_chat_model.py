"""Chats from their files to a model that answers: prepared, trained on, and asked."""

import io
import json
import sys
from pathlib import Path

import pytest

from data.chat.chat_format import FORMATS
from data.text.token_file import TokenFile
from data.text.tokenizer import open_tokenizer
from tests.chat_families import FAMILIES
from tests.runs import Run, small_flags
from tools import generate, prepare_chat

pytestmark = pytest.mark.thorough


NAMES = "Ada Ben Cleo Dan Eva Finn Gus Hanna Ida Jan Kim Lea".split()
TOWNS = "Rome Oslo Bern Kyiv Riga Lima Cork Graz Pisa Faro Jena Ulm".split()
# What the second question is about stands in the first alone. A reply does not end at
# the name of a token in it.
CONVERSATIONS = [
    (
        f"Where is {name}?",
        f"In {town}{'<|eot_id|><|im_end|>' * (n < 3)}.",
        "Since?",
        f"{1980 + n}.",
    )
    for n, (name, town) in enumerate(zip(NAMES, TOWNS, strict=True))
]
END = {"llama3": "<|end_of_text|>", "chatml": "<|endoftext|>"}


def write_tokenizer(directory: Path, name: str) -> None:
    """A published base model's tokenizer, with the template of this name."""
    family = FAMILIES[name]
    family.save(directory, ["\n".join(talk) for talk in CONVERSATIONS])
    config = {"bos_token": family.bos, "eos_token": END[name]}
    config |= {"add_bos_token": family.bos is not None}
    config |= {"chat_template": FORMATS[name].template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def write_chats(path: Path) -> None:
    """Half of them as ShareGPT has them, the others as OpenAI."""
    with path.open("w") as file:
        for number, talk in enumerate(CONVERSATIONS):
            said = zip(("user", "assistant") * 2, talk, strict=True)
            row = {"messages": [{"role": who, "content": words} for who, words in said]}
            if number % 2:
                said = zip(("human", "gpt") * 2, talk, strict=True)
                turns = [{"from": who, "value": words} for who, words in said]
                row = {"conversations": turns}
            file.write(json.dumps(row) + "\n")


FIELDS = {
    "simulated_devices": 1,
    "implementation": "reference",
    "attention": "vanilla",
    "mesh__fsdp": 1,
    "mesh__ring": 1,
    "data__rows": "whole",
    "data__context_tokens": 64,
    "data__batch_rows": 8,
    "model__hidden_size": 64,
    "optimizer__peak_lr": 1e-2,
    "train__steps": 140,
    "train__validation_batches": 0,
    "checkpoint__save_every_steps": 140,
}


@pytest.mark.parametrize(
    "name", ["llama3", pytest.param("chatml", marks=pytest.mark.slow)]
)
def test_a_model_trained_on_a_dozen_chats_answers_and_stops(
    name, tmp_path, capsys, monkeypatch
):
    """Asked in the corpus' template, on a ring, turn by turn."""
    write_tokenizer(tmp_path, name)
    chats, corpus = tmp_path / "chats.jsonl", tmp_path / "corpus"
    write_chats(chats)
    options = "--output", str(corpus), "--context-tokens", "64"
    assert prepare_chat.main([str(chats), *options, "--tokenizer", str(tmp_path)]) == 0
    run = Run(corpus, tmp_path / "run")
    run.command(**FIELDS)
    assert run.losses()[-1] < 0.1
    held_out = TokenFile.open(corpus, "validation")
    held_out = open_tokenizer(held_out.tokenizer).decode(held_out.tokens[:])
    learned = [talk for talk in CONVERSATIONS if talk[0] not in held_out][:4]
    lines = "".join(f"{talk[0]}\n{talk[2]}\n\n" for talk in learned)
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    mesh = {"attention": "striped", "mesh__fsdp": 2, "mesh__ring": 4}
    mesh |= {"simulated_devices": 0}
    flags = small_flags(corpus, run.workdir, **FIELDS | mesh)
    assert generate.main([*flags, "--chat", "--temperature", "0"]) == 0
    answers = [reply for talk in learned for reply in talk[1::2]]
    assert capsys.readouterr().out.splitlines() == answers
