"""The program that prepares conversations: what it tells, writes and refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from data.token_file import TokenFile
from tests.data.test_chat import bad_rows, rows
from tools import prepare_chat
from tools.prepare_chat import main


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in bad_rows()))
    return path


def test_program_tells_of_bad_rows_and_what_it_did(source, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = [str(source), "--output", str(out), "--context-tokens", "300"]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {source}:2 (id r1), turn 1: a turn from 'robot'")
    assert not out.exists()
    assert main([*arguments, "--bad-rows", "skip"]) == 0
    told = capsys.readouterr()
    assert told.err.count("skipped ") == 4 and "id r4), turn 2" in told.err
    assert "2 conversations of 6 rows" in told.out and "supervised" in told.out
    corpus = TokenFile.open(out, "train")
    assert 0 < corpus.loss_mask[:].sum() < corpus.tokens.size


def test_program_runs_from_the_root(tmp_path):
    source = tmp_path / "in.json"
    source.write_text(json.dumps(rows(9)))
    command = [sys.executable, "-m", "tools.prepare_chat", str(source)]
    command += ["--output", str(tmp_path / "out"), "--context-tokens", "250"]
    command += ["--template", "llama2", "--too-long", "split"]
    root = Path(prepare_chat.__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "9 conversations of 9 rows" in done.stdout
    tokens = TokenFile.open(tmp_path / "out", "train").tokens
    assert bytes(tokens[:16].tolist()) == b"[INST] question "
    refused = subprocess.run(
        [*command, "--template", "llama3"], cwd=root, capture_output=True, text=True
    )
    assert refused.returncode == 1
    assert "error: the bytes tokenizer has no token" in refused.stderr
