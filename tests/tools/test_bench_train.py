import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from tools import bench_train
from tools.bench_rows import Environment

PROGRAM = Path(bench_train.__file__)
TINY = "--config=configs/tiny.py", "--config.model.num_layers=1"

KEYS = {field.name for field in fields(Environment)}
KEYS |= {"config", "context_tokens", "batch_rows", "attention", "implementation"}
KEYS |= {"remat", "steps", "step_seconds", "step_spread", "tokens_per_second"}
KEYS |= {"mfu", "mfu_paper", "peak_bytes", "first_loss", "last_loss"}


def call(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, PROGRAM, *arguments],
        cwd=PROGRAM.parents[1],
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_each_context_has_a_row_of_a_run_that_learned(tmp_path):
    output = tmp_path / "rows.json"
    done = call(*TINY, "--contexts=128,64", "--steps=4", f"--output={output}")
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text())
    assert [row["context_tokens"] for row in rows] == [64, 128]
    for row in rows:
        assert row.keys() == KEYS
        assert (row["config"], row["steps"]) == ("configs/tiny.py", 3)
        assert row["tokens_per_second"] * row["step_seconds"] == pytest.approx(
            4 * row["context_tokens"]
        )
        assert (row["mfu"], row["peak_bytes"]) == (None, None)
        assert row["last_loss"] < row["first_loss"] - 0.1
    assert not (PROGRAM.parents[1] / "runs" / "run_64").exists()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--steps=2",), "error: chosen.steps=2 must be at least 3"),
        (("--contexts=0",), "contexts=[0] 1"),
        (("--contexts=many",), "invalid literal for int"),
        (("--output=nowhere/rows.json",), "nowhere is not a directory: make it"),
    ],
)
def test_bad_flags_are_refused_in_one_line(arguments, words):
    done = call(*TINY, *arguments)
    assert done.returncode == 1
    assert words in done.stderr and "Traceback" not in done.stderr
