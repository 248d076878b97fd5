"""What changes between the starts of a run is told, or refused by its name."""

import math
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import train
from data.corpus import prepare
from data.tokenizer import ByteTokenizer
from tasks import base, text
from tasks.task import run_settings
from tests.runs import small_config
from training.checkpoint import Checkpoints

STEP = 7


def save(
    corpus: Path, workdir: Path, step: int = STEP, run: str = "0badcafe", **fields: Any
) -> None:
    """A checkpoint of a run with these fields; of its state, there is one array."""
    config = small_config(corpus, workdir, **fields)
    partition = base.partition(config, jax.devices())
    fingerprint = text.fingerprint(text.model(config, partition))
    with Checkpoints(
        workdir / "checkpoints", keep=3, fingerprint=fingerprint
    ) as checkpoints:
        if run:
            checkpoints.record = {"run": run, "settings": run_settings(config, print)}
        checkpoints.save(step, {"weights": np.arange(5.0)})


def start(corpus: Path, workdir: Path, **fields: Any) -> tuple[list[str], str]:
    """What a start says, and what ends it: at the latest, the state that is not there.

    Nothing in the workdir may change.
    """
    config, said = small_config(corpus, workdir, **fields), []
    before = {p: p.read_bytes() for p in workdir.rglob("*") if p.is_file()}
    with pytest.raises(ValueError) as caught:
        train.train(config, said.append)
    assert {p: p.read_bytes() for p in workdir.rglob("*") if p.is_file()} == before
    return said, str(caught.value)


def changes(said: list[str]) -> list[str]:
    beginning = f"changed since step {STEP}: "
    return [x.removeprefix(beginning) for x in said if x.startswith(beginning)]


PINNED = {
    "seed": (0, 1),
    "data.batch_rows": (4, 8),
    "data.context_tokens": (80, 160),
    "data.rows": ("packed", "documents"),
}


@pytest.mark.parametrize("name", PINNED)
def test_what_says_which_data_are_read_is_refused_unless_allowed(
    corpus: Path, tmp_path: Path, name: str
) -> None:
    before, now = PINNED[name]
    field = name.replace(".", "__")
    save(corpus, tmp_path, **{field: before})
    said, error = start(corpus, tmp_path, **{field: now})
    assert f"step {STEP} was made with other settings: {name}: saved {before}," in error
    assert f"this run {now}. They say which data" in error
    assert f"""--config.may_change="('{name}',)\"""" in error
    assert len(error.splitlines()) == 1 and changes(said) == []
    said, error = start(corpus, tmp_path, **{field: now, "may_change": (name,)})
    assert changes(said) == [f"{name}: {before} -> {now}"]
    assert "does not fit the train state" in error


def test_what_a_run_may_change_is_told_in_a_line_each(
    corpus: Path, tmp_path: Path
) -> None:
    save(corpus, tmp_path, optimizer__clip_norm=math.inf)
    fields = {
        "optimizer__peak_lr": 1e-3,
        "optimizer__clip_norm": 0.5,
        "compute_dtype": "bfloat16",
        "train__steps": 30,
        "mesh__ring": 2,
        "mesh__fsdp": 4,
    }
    said, _ = start(corpus, tmp_path, **fields, data__threads=1, data__buffered_steps=8)
    assert changes(said) == [
        "compute_dtype: float32 -> bfloat16",
        "mesh.fsdp: 2 -> 4",
        "mesh.ring: 4 -> 2",
        "optimizer.clip_norm: inf -> 0.5",
        "optimizer.peak_lr: 0.003 -> 0.001",
        "train.steps: 20 -> 30",
    ]
    said, _ = start(corpus, tmp_path, optimizer__clip_norm=math.inf)
    assert changes(said) == []


def test_a_corpus_may_move_and_may_not_be_replaced(
    corpus: Path, tmp_path: Path
) -> None:
    copy, workdir = tmp_path / "copy", tmp_path / "run"
    shutil.copytree(corpus, copy)
    save(copy, workdir)
    said, _ = start(corpus, workdir)
    assert changes(said) == [f"data.corpus: {copy} -> {corpus}"]
    (tmp_path / "other.txt").write_text("other words " * 3000)
    (tmp_path / "more.txt").write_text("more " * 3000)
    shutil.rmtree(copy)
    texts = [tmp_path / "other.txt", tmp_path / "more.txt"]
    prepare(texts, copy, ByteTokenizer())
    said, error = start(copy, workdir)
    assert "other settings: data.corpus.contents: saved" in error
    said, error = start(copy, workdir, may_change=("data.corpus",))
    assert len(changes(said)) == 1 and "data.corpus.contents" in changes(said)[0]


def test_steps_of_two_runs_are_refused(corpus: Path, tmp_path: Path) -> None:
    save(corpus, tmp_path, step=STEP, run="0badcafe")
    save(corpus, tmp_path, step=9, run="deadbeef")
    _, error = start(corpus, tmp_path)
    assert "of several runs (step 9 of run deadbeef, step 7 of run 0badcafe)" in error
    assert "move away those" in error
    _, error = start(corpus, tmp_path, may_change=("run",))
    assert "does not fit the train state" in error


def test_steps_of_older_programs_are_taken_and_it_is_said(
    corpus: Path, tmp_path: Path
) -> None:
    save(corpus, tmp_path, run="")
    said, error = start(corpus, tmp_path, seed=1)
    assert [x for x in said if x.startswith(f"step {STEP} was saved without")] != []
    assert "does not fit the train state" in error


def test_a_field_that_is_none_may_not_change(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, tmp_path / "run", may_change=("sede",))
    with pytest.raises(ValueError, match="may_change=.'sede',. names 'sede', which is"):
        train.train(config, lambda line: None)
