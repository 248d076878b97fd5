"""Runs that begin with the parameters of another one, or with imported ones."""

from pathlib import Path
from typing import Any

import jax
import ml_collections
import numpy as np
import pytest

import train
from tasks import base, text
from tests.runs import small_config
from tools.convert_hf import export_model, import_model
from training.checkpoint import Checkpoints
from training.mesh import MeshShape, Partition, make_mesh
from training.optimizer import make_optimizer
from training.step import TrainState

pytestmark = pytest.mark.usefixtures("programs")

LEARNS_NOTHING = {
    "train__steps": 2,
    "optimizer__warmup_steps": 0,
    "optimizer__peak_lr": 1e-30,
    "optimizer__end_lr": 0.0,
}
"""Steps too small to change a parameter: it stays what it was at the beginning."""


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workdir of a run of 6 steps."""
    workdir = tmp_path_factory.mktemp("trained")
    train.train(config(corpus, workdir, train__steps=6), lambda line: None)
    return workdir


# A system that is compiled sooner than a ring.
QUICK = {
    "attention": "vanilla",
    "mesh__fsdp": 8,
    "mesh__ring": 1,
    "data__batch_rows": 8,
    "train__validation_batches": 0,
}


def config(corpus: Path, workdir: Path, **overrides: Any) -> ml_collections.ConfigDict:
    return small_config(corpus, workdir, **QUICK | overrides)


def state(corpus: Path, workdir: Path) -> TrainState:
    """The newest checkpoint's."""
    settings = config(corpus, workdir)
    partition = base.partition(settings, jax.devices())
    model = text.model(settings, partition)
    optimizer, _ = make_optimizer(base.optimizer_settings(settings))
    with Checkpoints(
        workdir / "checkpoints", keep=1, fingerprint=text.fingerprint(model)
    ) as checkpoints:
        shapes = base.abstract_state(model, optimizer, partition)
        return checkpoints.restore(shapes)[0]


def counts(optimizer_state: Any) -> set[int]:
    """Updates that the optimizer has counted."""
    leaves = jax.tree.leaves(optimizer_state)
    return {int(leaf) for leaf in leaves if leaf.dtype == np.int32}


def assert_begins_with(source: Path, corpus: Path, begun: Path) -> list[str]:
    """Runs 2 steps from `source`, and compares with the trained parameters."""
    said: list[str] = []
    settings = config(corpus, begun, init_from=str(source), **LEARNS_NOTHING)
    train.train(settings, said.append)
    assert any(line.startswith("step 1") for line in said)
    return said


def test_a_run_begins_with_another_runs_parameters_and_a_fresh_optimizer(
    corpus, trained, tmp_path
):
    said = assert_begins_with(trained, corpus, tmp_path)
    assert f"parameters: of step 6 of {trained}" in said
    before, after = state(corpus, trained), state(corpus, tmp_path)
    jax.tree.map(np.testing.assert_array_equal, before.params, after.params)
    assert (int(before.step), int(after.step)) == (6, 2)
    assert counts(before.optimizer_state) == {6}
    assert counts(after.optimizer_state) == {2}
    # Once it has checkpoints of its own, it resumes from them; the source may be gone.
    resumed = config(corpus, tmp_path, init_from=f"{tmp_path}/gone", **LEARNS_NOTHING)
    said.clear()
    assert train.train(resumed, said.append) == {"step": 2}
    assert "resuming from step 2" in said


def test_a_run_begins_with_exported_and_imported_parameters(corpus, trained, tmp_path):
    partition = Partition(make_mesh(MeshShape(fsdp=-1), jax.devices()))
    published = tmp_path / "published"
    export_model(
        str(trained), published, partition, dtype="float32", file_bytes=1 << 16
    )
    import_model(published, tmp_path / "imported", partition)
    said = assert_begins_with(tmp_path / "imported", corpus, tmp_path / "run")
    assert f"parameters: of step 0 of {tmp_path / 'imported'}" in said
    before, after = state(corpus, trained), state(corpus, tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, before.params, after.params)


@pytest.fixture
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test where the trainer makes a program, however small."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("bad input was not refused before jax.jit")

    monkeypatch.setattr(jax, "jit", refuse)


@pytest.mark.usefixtures("nothing_is_compiled")
def test_parameters_of_another_model_are_refused_before_anything_is_compiled(
    corpus, trained, tmp_path
):
    settings = config(
        corpus,
        tmp_path,
        init_from=str(trained),
        model__num_layers=3,
        model__rope_theta=500.0,
    )
    with pytest.raises(ValueError) as caught:
        train.train(settings, lambda line: None)
    message = str(caught.value)
    assert f"step 6 of {trained} belong to another model" in message
    assert "model.num_layers: saved 2, this run 3" in message
    assert "model.rope_theta: saved 10000.0, this run 500.0" in message
    settings.may_change = ("rope_theta", "num_layers")
    with pytest.raises(ValueError, match=r"params.layers.*float32\[2.*float32\[3"):
        train.train(settings, lambda line: None)


@pytest.mark.usefixtures("nothing_is_compiled")
def test_parameters_that_are_not_there_are_refused(corpus, tmp_path):
    settings = config(corpus, tmp_path, init_from=f"{tmp_path}/nowhere")
    with pytest.raises(FileNotFoundError, match="nowhere has no checkpoints to read"):
        train.train(settings, lambda line: None)
