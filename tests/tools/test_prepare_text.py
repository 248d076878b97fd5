import subprocess
import sys
from pathlib import Path

from tests.data.test_corpus import fill, read, some_texts
from tools import prepare_text
from tools.prepare_text import main

ROOT = Path(prepare_text.__file__).parents[1]


def test_program_tells_what_it_did(tmp_path, capsys):
    source = fill(tmp_path / "in", {**some_texts(3), "x.bin": b"\xff"})
    arguments = [str(source), "--output", str(tmp_path / "out")]
    assert main([*arguments, "--validation-fraction", "0.1"]) == 0
    out, err = capsys.readouterr()
    characters = sum(len(text) for text in some_texts(3).values())
    tokens = [int(line.split()[3].replace(",", "")) for line in out.splitlines()[:2]]
    assert sum(tokens) == characters + 3
    assert "skipped: 1 files" in out and f"written to {tmp_path / 'out'}" in out
    assert err == ""
    assert main(arguments) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_program_runs_from_the_root(tmp_path):
    source = fill(tmp_path, {"a.txt": "a", "b.txt": "b"})
    command = [sys.executable, "-m", "tools.prepare_text", str(source / "a.txt")]
    command += [str(source / "b.txt"), "--output", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(read(tmp_path / "out", "validation")) == 1
    refused = subprocess.run(
        [*command, "--tokenizer", "gpt2"], cwd=ROOT, capture_output=True, text=True
    )
    assert refused.returncode == 1
    assert refused.stderr.startswith('error: tokenizer "gpt2" is not known')
