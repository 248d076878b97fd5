"""From people's files to a trained step, and from chats to a model that answers."""

import io
import itertools
import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import train
from data.chat.chat_template import format_source
from data.text.token_file import SPLITS, TokenFile
from data.text.tokenizer import open_tokenizer
from tasks.command_line import read_config
from tests import tables
from tests.cases import table
from tests.small.chats import FAMILIES
from tests.small.runs import SMALL, Run
from tools import generate, prepare_chat, prepare_text

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("programs")]

RNG = np.random.default_rng(3)
WORDS = ["ring", "stripe", "a", "token", "of", "sequence", "und", "sieht"]
ROWS = [{"text": " ".join(RNG.choice(WORDS, RNG.integers(1, 150)))} for _ in range(60)]


@pytest.fixture(autouse=True)
def in_the_root(monkeypatch):
    monkeypatch.chdir(Path(train.__file__).parent)


def prepared(
    program: Any, folder: Path, source: Path, capsys: Any, *more: str
) -> list[str]:
    """Makes the corpus `folder`/corpus; returns the arguments of the train command."""
    arguments = [str(source), "--output", str(folder / "corpus"), *more]
    assert program.main([*arguments, "--validation-fraction", "0.15"]) == 0
    printed, errors = capsys.readouterr()
    assert errors == ""
    command = printed.split("train on it:\n")[1].replace("\\\n", "")
    return shlex.split(command)[2:]


def losses(flags: list[str], folder: Path) -> list[float]:
    """Trains four steps; returns the loss of each that was made."""
    small = {"train.steps": 4, "checkpoint.save_every_steps": 2}
    small |= {"attention": "vanilla", "mesh.fsdp": 8, "mesh.ring": 1}
    small |= {"train.validation_batches": 0}
    small = SMALL | small | {"data.batch_rows": 8, "workdir": folder / "run"}
    more = [f"--config.{name}={value}" for name, value in small.items()]
    config = read_config([*flags, *more])
    train.train(config, lambda line: None)
    return [loss for _, loss in Run(folder / "corpus", folder / "run").curve()]


def test_a_mixture_of_parquet_of_the_hub_and_zst_resumes_where_it_was(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    splits = {"train": ROWS[:40], "test": ROWS[:20]}
    source = tables.save_on_hub(tmp_path / "set", splits)
    prepared(prepare_text, tmp_path / "a", source, capsys)
    found = (TokenFile.open(tmp_path / "a/corpus", split) for split in SPLITS)
    assert [split.starts.size for split in found] == [40, 20]
    lines = tables.as_lines(ROWS[40:])
    source = tables.compress(tmp_path / "rows.jsonl.zst", lines)
    flags = prepared(prepare_text, tmp_path / "b", source, capsys)
    mixture = f"{tmp_path}/a/corpus:0.75,{tmp_path}/b/corpus:0.25"
    flags.append(f"--config.data.corpus={mixture}")
    whole = losses(flags, tmp_path / "whole")
    middle = Path("run/checkpoints/2")
    shutil.copytree(tmp_path / "whole" / middle, tmp_path / "parts" / middle)
    assert losses(flags, tmp_path / "parts") == whole[2:]
    flags[-1] = flags[-1].replace("0.25", "0.5")
    with pytest.raises(ValueError, match=r"other settings: data\.corpus\.contents"):
        losses(flags, tmp_path / "whole")


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
