"""From people's files to a trained step: tables, data sets, chats and mixtures of them.

The command that a program prints is run, with a small model; all share one program.
"""

import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import train
from data.text.token_file import SPLITS, TokenFile
from tasks.command_line import read_config
from tests import tables
from tests.runs import SMALL, Run
from tools import prepare_chat, prepare_text

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("programs")]

RNG = np.random.default_rng(3)
WORDS = ["ring", "stripe", "a", "token", "of", "sequence", "und", "sieht"]
ROWS = [{"text": " ".join(RNG.choice(WORDS, RNG.integers(1, 150)))} for _ in range(60)]
TURN = {"role": "user", "content": [{"type": "text", "text": "Who?"}]}
CHATS = [
    {"messages": [TURN, {"role": "assistant", "content": row["text"][:20]}]}
    for row in ROWS
]


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
    small = SMALL | small | {"data.batch_rows": 8, "workdir": folder / "run"}
    more = [f"--config.{name}={value}" for name, value in small.items()]
    config = read_config([*flags, *more])
    train.train(config, lambda line: None)
    return [loss for _, loss in Run(folder / "corpus", folder / "run").curve()]


def test_parquet_files_of_the_hub_train(tmp_path, capsys):
    source = tables.save_on_hub(tmp_path / "set", {"train": ROWS, "test": ROWS[:20]})
    flags = prepared(prepare_text, tmp_path, source, capsys)
    found = losses(flags, tmp_path)
    assert len(found) == 4 and np.isfinite(found).all() and found[0] > 5
    counts = [
        TokenFile.open(tmp_path / "corpus", split).starts.size for split in SPLITS
    ]
    assert counts == [60, 20]


def test_a_list_of_messages_trains(tmp_path, capsys):
    source = tables.compress(tmp_path / "chats.json", tables.as_list(CHATS))
    arguments = "--context-tokens", "78", "--template", "llama2"
    flags = prepared(prepare_chat, tmp_path, source, capsys, *arguments)
    assert "--config.data.rows=whole" in flags
    found = losses(flags, tmp_path)
    assert len(found) == 4 and np.isfinite(found).all()
    corpus = TokenFile.open(tmp_path / "corpus", "train")
    text = bytes(corpus.tokens[: int(corpus.starts[1]) - 1].tolist()).decode()
    reply = text.removeprefix("[INST] Who? [/INST] ").strip()
    assert reply in {row["text"][:20].strip() for row in ROWS}
    assert corpus.loss_mask[: int(corpus.starts[1])].sum() == len(reply) + 3


def test_a_mixture_of_a_data_set_and_zst_resumes_where_it_was(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    source = tables.save_to_disk(tmp_path / "set", ROWS[:40])
    prepared(prepare_text, tmp_path / "a", source, capsys)
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
