"""The program that makes corpora of line retrieval."""

import subprocess
import sys
from pathlib import Path

from data.token_file import TokenFile
from tools import prepare_lines
from tools.prepare_lines import main

SMALL = ["--train-tokens", "3000", "--validation-tokens", "500"]


def test_program_writes_a_corpus_and_tells_of_it(tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--form", "compact", "--context-tokens", "64", "--output", str(out)]
    assert main([*arguments, *SMALL]) == 0
    assert "supervised" in capsys.readouterr().out
    corpus = TokenFile.open(out, "train")
    assert 3000 <= corpus.tokens.size < 3064
    assert 0 < corpus.loss_mask[:].sum() < corpus.tokens.size / 2
    assert main([*arguments, *SMALL]) == 1
    assert "already holds a corpus" in capsys.readouterr().err


def test_program_runs_from_the_root(tmp_path):
    command = [sys.executable, "-m", "tools.prepare_lines", "--context-tokens", "1500"]
    command += ["--output", str(tmp_path / "out"), "--supervised", "all", *SMALL]
    root = Path(prepare_lines.__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    corpus = TokenFile.open(tmp_path / "out", "train")
    assert corpus.loss_mask[:].all()
    assert bytes(corpus.tokens[:23].tolist()) == b"Below is a record of li"
    short = [*command[:4], "100", *command[5:6], str(tmp_path / "no"), *SMALL]
    refused = subprocess.run(short, cwd=root, capture_output=True, text=True)
    assert refused.returncode == 1
    assert "error: 99 tokens are too few" in refused.stderr
