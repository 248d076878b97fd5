"""The commands of README.md, run in its order by somebody who has just cloned it.

In a copy of the tree, with small sizes added to the end of each. What is not run is
said in a table, with the reason.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.test_tokenizer import make_hugging_face, make_sentence_piece
from tests.readme import ROOT, Command, commands

NOT_RUN = {
    "make test": "it runs these tests",
    "make venv-dev": "it installs packages",
    "make venv ACCELERATOR=rl": "it installs packages",
    "python train.py --config=configs/tpuv4_7b.py --config.workdir=gs:": "a pod",
    "python -m tools.pack_exorl --root DATASETS": "ExoRL's own archives",
    "python -m tools.evaluate_lines": "a model that was trained for an hour",
    "python train.py --config=configs/grow_context.py": "eight GPUs; "
    "tests/test_grow_context.py runs it small",
    "--config.hosts.coordinator": "part of a command; tests/survival runs two hosts",
}
"""By the beginning of the command: what it would take."""

TWO_STEPS = ["--config.train.steps=2", "--config.checkpoint.save_every_steps=2"]
TWO_STEPS += [
    "--config.train.validation_batches=1",
    "--config.optimizer.warmup_steps=1",
]
SHORT_ROWS = ["--config.data.context_tokens=256", "--config.data.batch_rows=2"]
SMALL_LAYERS = {"hidden_size": 32, "feed_forward_size": 88, "num_layers": 2}
SMALL_LAYERS |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "vocab_size": 296}

IMPORTED = "runs/tiny", "Llama-2-7b-hf"
IMPORT = "python -m tools.convert_hf import"
RUN: dict[str, list[str]] = {
    "make train": [f"ARGS={' '.join(TWO_STEPS)}", "--assume-old=venv"],
    "python -m tools.plan_pod": [
        "--topology=v4:2x2x1",
        "--context=16384",
        "--config.mesh.ring=4",
        "--config.attention_parts=1",
    ],
    "python -m tools.prepare_text": ["--validation-fraction=0.3"],
    IMPORT: [],
    "python train.py --config=configs/tpuv4_7b.py --config.init_from": [
        *TWO_STEPS,
        *SHORT_ROWS,
        "--config.simulated_devices=4",
        "--config.mesh.ring=4",
        "--config.attention_parts=1",
    ],
    "python -m tools.convert_hf export": [],
    "python -m tools.prepare_chat": [
        "--output=CHATS",
        "--context-tokens=256",
        "--validation-fraction=0.3",
    ],
    "python train.py --config=... --config.data.corpus=CORPUS": [
        "--config.data.corpus=CHATS",
        "--config.workdir=runs/chats",
        *TWO_STEPS,
        *SHORT_ROWS,
        *(f"--config.model.{name}={size}" for name, size in SMALL_LAYERS.items()),
    ],
    "python -m tools.make_exorl --domain walker": [
        "--episodes=4",
        "--search-episodes=16",
        "--action-repeat=5",
    ],
    "python -m tools.make_exorl --domain cartpole": [
        "--episodes=60",
        "--search-episodes=64",
    ],
    "python -m tools.pack_exorl --root datasets": [],
    "python train.py --config=configs/exorl_tiny.py": TWO_STEPS,
    "python -m tools.evaluate_exorl": ["--environments=2", "--episodes=2"],
    "python -m tools.figures returns": [],
    "python -m tools.generate": ["--max-tokens=8"],
}
"""The same: what is added to its end, where the last value of an option counts."""


def beginning(command: Command) -> str:
    """Its one key in the tables.

    Raises:
      ValueError: it has none, or several.
    """
    keys = [key for key in [*NOT_RUN, *RUN] if str(command).startswith(key)]
    if len(keys) != 1:
        raise ValueError(
            f"{command} of README.md is in RUN or NOT_RUN {keys=}, not once"
        )
    return keys[0]


class Clone:
    """A copy of the tree, where the files lie that the commands are about."""

    def __init__(self, folder: Path):
        self.root = folder / "annulus"
        kept = shutil.ignore_patterns(
            ".*", "__pycache__", "corpora", "datasets", "runs", "trajectories"
        )
        shutil.copytree(ROOT, self.root, ignore=kept)
        (self.root / ".venv").symlink_to(sys.prefix)
        binaries = self.root / ".venv/bin"
        path = f"{binaries}{os.pathsep}{os.environ['PATH']}"
        self.environment = os.environ | {"PATH": path, "JAX_PLATFORMS": "cpu"}

    def add_texts(self) -> None:
        """A book, chats, and tokenizers, under the names in README.md."""
        (self.root / "BOOKS").mkdir()
        for number in range(8):
            book = f"Book {number}: the cat sat on the mat. " * (number + 3)
            (self.root / f"BOOKS/{number}.txt").write_text(book)
        rows = [{"id": n, "conversations": self._chat(n)} for n in range(40)]
        (self.root / "sharegpt.json").write_text(json.dumps(rows))
        lines = (json.dumps({"text": f"A line, {number}."}) for number in range(8))
        (self.root / "CHATS.jsonl").write_text("\n".join(lines) + "\n")
        make_hugging_face(self.root / "tokenizer.json")
        make_sentence_piece(self.root / "tokenizer.model")

    def run(self, *words: str) -> str:
        """What the command prints; it has to succeed."""
        done = subprocess.run(
            [name for word in words for name in self._expand(word)],
            cwd=self.root,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}{done.stderr}"
        return done.stdout

    def _expand(self, word: str) -> list[str]:
        """As a shell does."""
        found = sorted(self.root.glob(word)) if "*" in word else []
        return [str(path.relative_to(self.root)) for path in found] or [word]

    @staticmethod
    def _chat(number: int) -> list[dict[str, str]]:
        return [
            {"from": "human", "value": f"Where sat cat {number}?"},
            {"from": "gpt", "value": f"Cat {number} sat on the mat."},
        ]


def test_every_command_is_run_or_said_not_to_be():
    found = {beginning(command) for command in commands()}
    assert found == NOT_RUN.keys() | RUN.keys()
    with pytest.raises(ValueError, match="python -m tools.new of README.md is in"):
        beginning(Command.of("python -m tools.new"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_commands_succeed_one_after_the_other(tmp_path):
    clone = Clone(tmp_path)
    clone.add_texts()
    advice: list[str] = []
    ran = set()
    for command in commands():
        key = beginning(command)
        if key in NOT_RUN:
            continue
        if key == IMPORT:
            # The model that was trained just now, in the place of the published one.
            clone.run("python", "-m", "tools.convert_hf", "export", *IMPORTED)
        words = [w.replace("g=...", "g=configs/tiny.py") for w in command.words]
        words = [word for word in words if word != "..."]
        more = advice if "..." in command.words else []
        printed = clone.run(*words, *more, *RUN[key])
        ran.add(key)
        if key == IMPORT:
            advice = re.findall(r"--config\.\S+", printed)
    assert ran == set(RUN) and advice
