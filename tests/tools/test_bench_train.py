from dataclasses import fields

import pytest

from tools import bench_train
from tools.lib.benchmarks.rows import Environment

pytestmark = pytest.mark.thorough

TINY = "--config", "configs/tiny.py", "--config.model.num_layers=1"

KEYS = {field.name for field in fields(Environment)}
KEYS |= {"config", "overrides", "context_tokens", "steps", "step_seconds"}
KEYS |= {"step_spread", "tokens_per_second", "mfu", "mfu_paper", "peak_bytes"}
KEYS |= {"first_loss", "last_loss"}


@pytest.mark.slow
def test_each_context_has_a_row_of_a_run_that_learned(rows_of):
    rows = rows_of(bench_train, *TINY, *"--contexts 64 128 --steps 5".split())
    assert [row["context_tokens"] for row in rows] == [64, 128]
    for row in rows:
        assert row.keys() == KEYS
        assert (row["device_kind"], row["device_count"]) == ("cpu", 8)
        assert (row["config"], row["overrides"]) == (TINY[1], [TINY[2]])
        assert row["steps"] == 4
        assert (row["mfu"], row["peak_bytes"]) == (None, None)
        assert row["last_loss"] < row["first_loss"] - 0.1
    assert not (bench_train.ROOT / "runs" / "run_64").exists()


def test_the_error_of_train_is_passed_on(capsys, monkeypatch):
    monkeypatch.setattr(bench_train, "prepare_one_document", lambda folder: folder)
    assert bench_train.main([*TINY, "--config.model.colour=red"]) == 1
    assert "error: train.py failed: error:" in capsys.readouterr().err
