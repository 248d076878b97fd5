"""Bad input is refused with its value and a remedy, before anything is compiled."""

import math
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

import train
from configs import base
from tasks.command_line import read_config
from tasks.config_errors import fields_by_name
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
    with pytest.raises(AssertionError, match="not refused before jax.jit"):
        train.train(small_config(corpus, tmp_path), lambda line: None)


def test_a_checkpoint_of_another_model_is_refused_and_kept(corpus, tmp_path):
    scaled = {"rope_scaling__rope_type": "linear", "rope_scaling__factor": 2.0}
    sizes = {"model__num_layers": 3, "model__head_dim": 16}
    with checkpoints_of(small_config(corpus, tmp_path, **sizes, **scaled)) as saved:
        saved.save(7, {"weights": np.arange(5.0)})
    before, message = files(tmp_path), refusal(small_config(corpus, tmp_path))
    assert f"step 7 in {tmp_path / 'checkpoints'} belongs to another model" in message
    for part in (
        "num_layers: saved 3, this run 2",
        "head_dim: saved 16, this run 8",
        "rope_scaling.rope_type: saved linear, this run nothing",
    ):
        assert part in message
    assert files(tmp_path) == before


@pytest.mark.thorough
def test_the_command_line_says_one_line_and_fails(corpus, tmp_path):
    flags = small_flags(corpus, tmp_path / "run", implementation="pallas_tpu")
    status, _, errors = run_program("train.py", *flags)
    assert status == 1, errors
    (line,) = errors.splitlines()
    assert line.startswith("error: config.implementation='pallas_tpu' cannot attend")
    assert "needs a TPU" in line and not (tmp_path / "run").exists()


SEED, COUNT = 19, 600

DRAWN = {
    bool: [True, False],
    int: [-(2**31), -1, 0, 1, 2, 3, 7, 10_001, 2**31, 2**63],
    float: [-math.inf, -1.0, 0.0, 1e-300, 0.5, 2.0, 1e30, math.inf, math.nan],
    str: ["", "x", "none", " packed", "1-0", "text", "exorl", "10"],
    tuple: [(), ("x",), ("seed", "rope_theta"), ("",)],
}
# What train() does not read, where it writes, and what ends a slow test.
LEFT_OUT = ("workdir", "simulated_devices", "hosts.", "data.corpus", "guard.first")


class Compiled(Exception):
    """As far as a config comes that is not refused."""


def fault_of(error: BaseException, drawn: dict[str, Any], workdir: Path) -> str:
    """What is wrong with the answer to a config; "" where nothing is."""
    if isinstance(error, Compiled):
        return ""
    if not isinstance(error, ValueError | OSError):
        return "no refusal"
    if any(path.is_file() for path in workdir.rglob("*")):
        return "something was written"
    # What a message may call the fields, and those that they make necessary.
    words = [re.split(r"[._]", name)[-1] for name in drawn]
    words += ["trajectories", "stripe_granule", str(drawn.get("init_from"))]
    if not any(re.search(rf"\b\w*{word}\b", str(error)) for word in words):
        return "the message names none of the fields"
    return "" if len(str(error).splitlines()) == 1 else "more than a line"


@pytest.mark.slow
def test_drawn_configs_are_compiled_or_refused_by_name(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "jit", mock.Mock(side_effect=Compiled))
    draw = random.Random(SEED)
    known = fields_by_name(base.get_config())
    names = [name for name in known if not name.startswith(LEFT_OUT)]
    outcomes, bad = Counter(), []
    for number in range(COUNT):
        chosen = draw.sample(names, draw.choice([1, 1, 2, 3]))
        drawn = {name: draw.choice(DRAWN[type(known[name])]) for name in chosen}
        workdir = tmp_path / str(number)
        with pytest.raises(BaseException) as caught:  # noqa: B017
            train.train(small_config(corpus, workdir, **drawn), lambda line: None)
        outcomes[caught.type] += 1
        if fault := fault_of(caught.value, drawn, workdir):
            bad.append(f"{fault}: {drawn}: {caught.type}: {caught.value}")
    assert bad == []
    assert outcomes[Compiled] > COUNT / 10 and outcomes[ValueError] > COUNT / 3
