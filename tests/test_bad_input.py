"""Bad input is refused with its value and a remedy, before anything is compiled."""

from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

import train
from tasks.command_line import read_config
from tests.cases import lines
from tests.processes import run_program
from tests.runs import checkpoints_of, files, small_config, small_flags


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    """Fails the test where the trainer makes a program, however small."""
    error = AssertionError("bad input was not refused before jax.jit")
    monkeypatch.setattr(jax, "jit", mock.Mock(side_effect=error))


def refusal(config: Any) -> str:
    """What `train` says of a config."""
    with pytest.raises((ValueError, OSError)) as caught:
        train.train(config, lambda line: None)
    return str(caught.value)


BAD_CONFIGS = lines("bad_configs.txt")
COUNTS = "checkpoint.save_every_steps train.extra_steps train.validation_batches seed"
COUNTS += " simulated_devices feed_forward_chunk_tokens loss_chunk_tokens"
SIZES = "mesh.fsdp train.microbatches train.steps train.log_every_steps stripe_granule"
SIZES += " train.validate_every_steps checkpoint.keep guard.stop_after"
SIZES += " data.context_tokens"
FLOATS = "guard.spike_sigmas guard.step_seconds remat_budget_gib"
BAD_CONFIGS += [
    f"{name}={low} => config.{name}={low} | at least {least}"
    for low, least, names in ((-1, 0, COUNTS), (-1.0, 0, FLOATS), (0, 1, SIZES))
    for name in names.split()
]


@pytest.mark.parametrize("row", BAD_CONFIGS)
def test_a_bad_config_is_refused(corpus, tmp_path, row):
    fields, parts = row.split(" => ")
    flags = [f"--config.{field}" for field in fields.split()]
    config = read_config([*small_flags(corpus, tmp_path / "run"), *flags])
    message = refusal(config)
    assert all(part in message for part in parts.split(" | ")), message
    assert not (tmp_path / "run").exists()


def test_a_good_config_would_be_compiled(corpus, tmp_path):
    config = small_config(corpus, tmp_path)
    with pytest.raises(AssertionError, match="not refused before jax.jit"):
        train.train(config, lambda line: None)


def test_a_checkpoint_of_another_model_is_refused_and_kept(corpus, tmp_path):
    scaled = {"rope_scaling__rope_type": "linear", "rope_scaling__factor": 2.0}
    sizes = {"model__num_layers": 3, "model__head_dim": 16}
    with checkpoints_of(small_config(corpus, tmp_path, **sizes, **scaled)) as saved:
        saved.save(7, {"weights": np.arange(5.0)})
    before = files(tmp_path)
    message = refusal(small_config(corpus, tmp_path))
    assert f"step 7 in {tmp_path / 'checkpoints'} belongs to another model" in message
    assert "num_layers: saved 3, this run 2" in message
    assert "head_dim: saved 16, this run 8" in message
    assert "rope_scaling.rope_type: saved linear, this run nothing" in message
    assert "use another workdir" in message
    assert files(tmp_path) == before


@pytest.mark.thorough
def test_the_command_line_says_one_line_and_fails(corpus, tmp_path):
    flags = small_flags(corpus, tmp_path / "run", implementation="pallas_tpu")
    status, _, errors = run_program("train.py", *flags)
    assert status == 1, errors
    (line,) = errors.splitlines()
    assert line.startswith("error: config.implementation='pallas_tpu' cannot attend")
    assert "needs a TPU" in line and not (tmp_path / "run").exists()
