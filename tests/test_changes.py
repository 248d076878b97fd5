"""What changes between the starts of a run is told, or refused by its name."""

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import train
from tasks.task import run_settings
from tests.runs import checkpoints_of, files, small_config

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


PINNED = [("seed", 0, 1), ("data.rows", "packed", "documents")]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "before", "now"), PINNED)
def test_what_says_which_data_are_read_is_refused_unless_allowed(
    corpus, tmp_path, name, before, now
):
    save(corpus, tmp_path, **{name: before})
    said, error = start(corpus, tmp_path, **{name: now})
    assert f"step {STEP} was made with other settings: {name}: saved {before}," in error
    assert f"this run {now}. They say which data" in error
    assert f"""--config.may_change="('{name}',)\"""" in error
    assert len(error.splitlines()) == 1 and changes(said) == []
    said, error = start(corpus, tmp_path, **{name: now, "may_change": (name,)})
    assert changes(said) == [f"{name}: {before} -> {now}"]
    assert TAKEN in error


@pytest.mark.thorough
def test_what_a_run_may_change_is_told_in_a_line_each(corpus, tmp_path):
    save(corpus, tmp_path, optimizer__clip_norm=math.inf)
    fields = {"mesh__ring": 2, "mesh__fsdp": 4, "data__threads": 1}
    said, _ = start(corpus, tmp_path, **fields, optimizer__clip_norm=0.5)
    assert changes(said) == [
        "mesh.fsdp: 2 -> 4",
        "mesh.ring: 4 -> 2",
        "optimizer.clip_norm: inf -> 0.5",
    ]
    said, _ = start(corpus, tmp_path, optimizer__clip_norm=math.inf)
    assert changes(said) == []


@pytest.mark.quick
def test_a_corpus_may_move(corpus, tmp_path):
    """It may not be replaced: see tests/test_train_on_formats.py."""
    copy, workdir = shutil.copytree(corpus, tmp_path / "copy"), tmp_path / "run"
    save(copy, workdir)
    said, _ = start(corpus, workdir)
    assert changes(said) == [f"data.corpus: {copy} -> {corpus}"]


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
def test_steps_of_older_programs_are_taken_and_it_is_said(corpus, tmp_path):
    save(corpus, tmp_path, run="")
    said, error = start(corpus, tmp_path, seed=1)
    assert any(x.startswith(f"step {STEP} was saved without") for x in said)
    assert TAKEN in error
    _, error = start(corpus, tmp_path, may_change=("sede",))
    assert "may_change=('sede',) names 'sede', which is" in error
