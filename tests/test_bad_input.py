"""Bad input is refused with its value and a remedy, before anything is compiled.

What changes between the starts of a run is reported, or refused by name.
"""

import random
import re
import shutil
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
from tasks.task import run_settings
from tests.cases import lines, table
from tests.small.runs import checkpoints_of, files, small_config, small_flags


@pytest.fixture
def nothing_is_compiled(monkeypatch):
    """Fails the test where the trainer makes a program, however small."""
    error = AssertionError("not refused before jax.jit")
    monkeypatch.setattr(jax, "jit", mock.Mock(side_effect=error))


@pytest.mark.usefixtures("nothing_is_compiled")
@pytest.mark.parametrize("row", lines("bad_configs.txt"))
def test_a_bad_config_is_refused(corpus, tmp_path, row):
    fields, parts = row.split(" => ")
    flags = [f"--config.{field}" for field in fields.split()]
    config = read_config([*small_flags(corpus, tmp_path / "run"), *flags])
    with pytest.raises((ValueError, OSError)) as caught:
        train.train(config, lambda line: None)
    message = str(caught.value)
    assert all(part in message for part in parts.split(" | ")), message
    assert max(Counter(message.split("; ")).values()) == 1, message  # each said once
    assert not (tmp_path / "run").exists()


def test_a_good_config_would_be_compiled(corpus, tmp_path, nothing_is_compiled):
    with pytest.raises(AssertionError, match="not refused before jax.jit"):
        train.train(small_config(corpus, tmp_path), lambda line: None)


SEED, COUNT = 19, 600

DRAWN = {type(values[0]): values for values in table("runs.txt", "drawn")}
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


STEP = 7
TAKEN = "does not fit the train state"
"""What ends a start that got as far as the state, of which there is one array."""


def save(
    corpus: Path, workdir: Path, step: int = STEP, run: str = "0badcafe", **fields: Any
) -> None:
    """A checkpoint of a run with these fields."""
    config = small_config(corpus, workdir, **fields)
    with checkpoints_of(config) as checkpoints:
        if run:
            checkpoints.record = {"run": run, "settings": run_settings(config, print)}
        checkpoints.save(step, {"weights": np.arange(5.0)})


def start(corpus: Path, workdir: Path, **fields: Any) -> tuple[list[str], str]:
    """What a start says, and what ends it; nothing in the workdir may change."""
    config, said, before = small_config(corpus, workdir, **fields), [], files(workdir)
    with pytest.raises(ValueError) as caught:
        train.train(config, said.append)
    assert files(workdir) == before
    return said, str(caught.value)


def changes(said: list[str]) -> list[str]:
    beginning = f"changed since step {STEP}: "
    return [x.removeprefix(beginning) for x in said if x.startswith(beginning)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("before", "now", "reported", "parts"), table("runs.txt", "changes")
)
def test_what_changes_is_reported_and_which_data_are_read_is_refused_unless_allowed(
    corpus, tmp_path, before, now, reported, parts
):
    save(corpus, tmp_path, **before)
    said, error = start(corpus, tmp_path, **now)
    assert changes(said) == reported
    assert all(part in error for part in parts.split(" | ")), error
    assert "\n" not in error or parts == TAKEN


@pytest.mark.quick
def test_a_corpus_may_move(corpus, tmp_path):
    """It may not be replaced, nor get other weights in a mixture."""
    copy, workdir = shutil.copytree(corpus, tmp_path / "copy"), tmp_path / "run"
    save(copy, workdir)
    said, _ = start(corpus, workdir)
    assert changes(said) == [f"data.corpus: {copy} -> {corpus}"]
    _, error = start(f"{corpus}:1,{copy}:3", workdir)
    assert "other settings: data.corpus.contents: " in error
    save(f"{corpus}:1,{copy}:3", tmp_path / "mixed")
    _, error = start(f"{corpus}:1,{copy}:2", tmp_path / "mixed")
    assert "other settings: data.corpus.contents: " in error


@pytest.mark.quick
def test_steps_of_two_runs_are_refused(corpus, tmp_path):
    save(corpus, tmp_path, step=STEP, run="0badcafe")
    save(corpus, tmp_path, step=9, run="deadbeef")
    _, error = start(corpus, tmp_path)
    assert "of several runs (step 9 of run deadbeef, step 7 of run 0badcafe)" in error
    assert "move away those" in error
    _, error = start(corpus, tmp_path, may_change=("run",))
    assert TAKEN in error


@pytest.mark.quick
def test_a_change_of_what_is_no_setting_is_not_allowed(corpus, tmp_path):
    save(corpus, tmp_path)
    _, error = start(corpus, tmp_path, may_change=("sede",))
    assert "may_change=('sede',) names 'sede', which is" in error


def test_a_checkpoint_of_another_model_is_refused_and_kept(
    corpus, tmp_path, nothing_is_compiled
):
    scaled = {"rope_scaling__rope_type": "linear", "rope_scaling__factor": 2.0}
    save(corpus, tmp_path, model__num_layers=3, model__head_dim=16, **scaled)
    _, error = start(corpus, tmp_path)
    assert f"step 7 in {tmp_path / 'checkpoints'} belongs to another model" in error
    for part in (
        "num_layers: saved 3, this run 2",
        "head_dim: saved 16, this run 8",
        "rope_scaling.rope_type: saved linear, this run nothing",
    ):
        assert part in error
