"""The commands of README and docs/, run in their order by somebody who just cloned it.

In a copy of the tree, with small sizes added to the end of each.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from tests.chat_families import FAMILIES
from tests.data.test_tokenizer import make_hugging_face, make_sentence_piece
from tests.pages import COMMANDS, ROOT, Command
from tests.tools import hf_models

NOT_RUN = {
    "make venv": "it installs packages",
    "source": "the environment is that of the tests",
    "python train.py --config=configs/tpuv4_7b.py --config.data.corpus": "a pod",
    "python train.py --config=configs/h200_1b.py": "GPUs",
    "python train.py --config=configs/models.py:llama3_8b/": "GPUs, and weights of 8B",
    "python train.py --config=configs/grow_context.py": "eight GPUs; "
    "tests/test_grow_context.py runs it small",
    "python -m tools.pack_exorl --root DATASETS": "ExoRL's own archives",
    "python train.py --config=configs/tiny.py --config.metrics": "W&B's package",
    "python -m tools.evaluate line-retrieval": "a model that was trained for an hour",
    "--config.hosts.coordinator": "part of a command; tests/survival runs two hosts",
}
"""What it would take, by the beginning of the command."""

STEPS = ["--config.train.steps=2", "--config.checkpoint.save_every_steps=2"]
STEPS += ["--config.train.validation_batches=1", "--config.optimizer.warmup_steps=1"]
ROWS = ["--config.data.context_tokens=256", "--config.data.batch_rows=2"]
RING = ["--config.mesh.ring=4", "--config.attention_parts=1"]
PLAN = ["--topology=v4:2x2x1", "--context=16384", "--config.model.num_layers=2"]
WALKER = ["--episodes=4", "--search-episodes=16", "--action-repeat=5"]
TRAIN = "python train.py --config=configs/"
TOOL = "python -m tools."
IMPORT = f"{TOOL}convert_hf import Llama-2"
EXPORT = f"{TOOL}convert_hf export runs/tiny Llama-2-7b-hf".split()

MORE = {
    "make train": [f"ARGS={' '.join(STEPS)}", "--assume-old=venv"],
    f"{TRAIN}tiny.py": STEPS,
    "python train.py --workdir": ["--config.train.steps=3"],
    f"{TRAIN}line_retrieval.py": STEPS,
    f"{TRAIN}exorl_tiny.py": STEPS,
    f"{TRAIN}fine_tune.py:runs/llama2_7b": [*STEPS, *ROWS, "--config.data.corpus="],
    f"{TRAIN}fine_tune.py:runs/llama3_8b": [*STEPS, *ROWS],
    f"{TOOL}plan_pod": [*PLAN, *RING],
    f"{TOOL}prepare_text": ["--validation-fraction=0.3"],
    f"{TOOL}prepare_chat": ["--context-tokens=256"],
    f"{TOOL}prepare_lines": ["--train-tokens=20000"],
    "bash tools/in_context.sh": [*STEPS],
    f"{TRAIN}icrl_dark_room.py": STEPS,
    f"{TOOL}make_exorl --domain walker": WALKER,
    f"{TOOL}make_exorl --domain cartpole": ["--episodes=60", "--search-episodes=64"],
    f"{TOOL}make_worlds": ["--worlds=2", "--episodes=2"],
    f"{TOOL}evaluate ruler": ["--tasks=fwe", "--lengths=500", "--samples=1"],
    f"{TOOL}evaluate loss": ["--batches=1"],
    f"{TOOL}evaluate exorl": ["--environments=2", "--episodes=2"],
    f"{TOOL}generate": ["--max-tokens=8"],
}
"""What is added to the end of a command, where the last value of an option counts."""


def found(command: Command, table: dict) -> str | None:
    """Returns the one key of a table that the command begins with, if any."""
    keys = [key for key in table if str(command).startswith(key)]
    assert len(keys) < 2, keys
    return keys[0] if keys else None


@pytest.fixture
def clone(tmp_path):
    """A copy of the tree with a book, chats and tokenizers, as the text names them."""
    left_out = ".*", "__pycache__", "corpora", "datasets", "runs", "trajectories"
    kept = shutil.ignore_patterns(*left_out)
    root = shutil.copytree(ROOT, tmp_path / "annulus", ignore=kept)
    (root / ".venv").symlink_to(sys.prefix)
    (root / "BOOKS").mkdir()
    for number in range(8):
        book = f"Book {number}: the cat sat on the mat. " * (number + 100)
        (root / f"BOOKS/{number}.txt").write_text(book)
    with pa.output_stream(root / "TEXTS.jsonl.zst", compression="zstd") as texts:
        texts.write(json.dumps({"text": "Two cats sat there. " * 100}).encode())
    lines = (json.dumps({"content": f"Page {n}. " * (n + 400)}) for n in range(8))
    (root / "DATASET").mkdir()
    (root / "DATASET/pages.jsonl").write_text("\n".join(lines) + "\n")
    says = ("human", "Where sat the cat?"), ("gpt", "On the mat.")
    turns = [{"from": who, "value": what} for who, what in says]
    chats = [{"id": n, "conversations": turns} for n in range(40)]
    write_llama(root / "Llama-3.1-8B")
    says = [{"role": "user", "content": ""}, {"role": "assistant", "content": "Mat."}]
    rows = [
        {"messages": [says[0] | {"content": f"{n}? " * 40}, says[1]]} for n in range(40)
    ]
    lines = map(json.dumps, rows)
    (root / "MY_CHATS.jsonl").write_text("\n".join(lines) + "\n")
    (root / "sharegpt.json").write_text(json.dumps(chats))
    lines = (json.dumps({"text": f"A line, {number}."}) for number in range(8))
    (root / "CHATS.jsonl").write_text("\n".join(lines) + "\n")
    make_hugging_face(root / "tokenizer.json")
    make_sentence_piece(root / "tokenizer.model")
    return root


def write_llama(directory: Path) -> None:
    """A small LLaMA as published, and LLaMA 3's tokenizer with its vocabulary."""
    shutil.copytree(hf_models.DIRECTORY / "llama", directory)
    FAMILIES["llama3"].save(directory, ["The cat sat on the mat."])
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    rows = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab_size()
    fields = hf_models.fields("llama") | {"vocab_size": rows}
    (directory / "config.json").write_text(json.dumps(fields))
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file)
    for name in "model.embed_tokens.weight", "lm_head.weight":
        tensors[name] = np.resize(tensors[name], (rows, fields["hidden_size"]))
    save_file(tensors, file)


def run(root: Path, *words: str) -> str:
    """Returns what the command prints; it has to succeed."""
    path = f"{root / '.venv/bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [name for word in words for name in expanded(root, word)],
        cwd=root,
        env=os.environ | {"PATH": path, "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}{done.stderr}"
    return done.stdout


def expanded(root: Path, word: str) -> list[str]:
    """Returns the paths of a word with a star, as a shell does."""
    paths = sorted(root.glob(word)) if "*" in word else []
    return [str(path.relative_to(root)) for path in paths] or [word]


def test_every_exception_is_a_command_of_the_text():
    for table in (NOT_RUN, MORE):
        used = {found(command, table) for command in COMMANDS} - {None}
        assert used == table.keys()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_commands_succeed_one_after_the_other(clone):
    for command in COMMANDS:
        if found(command, NOT_RUN):
            continue
        if str(command).startswith(IMPORT):
            # The model that was trained just now, in the place of the published one.
            run(clone, *EXPORT)
        run(clone, *command.words, *MORE.get(found(command, MORE), []))
