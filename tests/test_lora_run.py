"""Runs that begin with other weights, with adapters or without: saves, refusals."""

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from tasks.generation import restored_parameters
from tasks.text import TextRun
from tests.cases import table
from tests.small.agents import drawn
from tests.small.models import partition_of
from tests.small.runs import Run, assert_equal_bits, files, small_config
from tools.convert_hf import export_model, import_model
from training.saved.stored_step import StoredStep
from training.saved.weights import save_parameters
from training.sharding.feed import global_batch
from training.sharding.mesh import MeshShape
from training.step import make_evaluate_step

pytestmark = pytest.mark.usefixtures("programs")

STEPS, MIDDLE = 8, 4


@pytest.fixture(scope="module")
def weights(corpus, tmp_path_factory):
    """The workdir of a model whose weights bfloat16 rounds."""
    directory = tmp_path_factory.mktemp("weights")
    config = small_config(corpus, directory)
    run = TextRun.of(config, jax.devices())
    save_parameters(directory, drawn(run.model, run.partition), run.fingerprint)
    return directory


def run_in(workdir: Path, corpus: Path, weights: Path) -> Run:
    """With adapters of rank 2, saved in the middle and at the end."""
    fields = dict(table("runs.txt", "lora"))
    return Run(corpus, workdir, init_from=str(weights), **fields)


@pytest.fixture(scope="module")
def undisturbed(corpus, weights, tmp_path_factory):
    """A run of all steps on fsdp 2 x ring 4; tests must not change it."""
    run = run_in(tmp_path_factory.mktemp("undisturbed"), corpus, weights)
    assert run.train()["step"] == STEPS
    return run


@pytest.fixture
def new_run(corpus, weights, tmp_path):
    return run_in(tmp_path / "run", corpus, weights)


@pytest.mark.thorough
def test_only_adapters_are_trained_and_saved(undisturbed):
    (line,) = (line for line in undisturbed.said if line.startswith("model: "))
    assert ", 992 of them trained (adapters), " in line
    stored = StoredStep(STEPS, undisturbed.workdir / "checkpoints" / str(STEPS))
    saved = stored.meta()["leaves"]
    parameters = {n for n in saved if n.startswith(("params.", "optimizer_state.1."))}
    adapters = {n for n in parameters if n.endswith(("_a", "_b"))}
    # Of 3 targets, and Adam's moments; and its numbers of updates.
    assert len(adapters) == 3 * 2 * 3 and len(parameters - adapters) <= 2
    assert undisturbed.losses()[-1] < undisturbed.losses()[0] - 0.05
    state = jax.device_get(undisturbed.state().params)
    assert all((x < 0).any() and (x > 0).any() for x in jax.tree.leaves(state))
    axes = TextRun.of(undisturbed.config(), jax.devices()).model.axes
    axes = jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple))
    assert all(names.count("embed") == 1 for names in axes)  # shared out as parameters


@pytest.mark.thorough
def test_the_validation_loss_is_that_of_what_tools_restore(undisturbed):
    """Of the frozen weights in bfloat16, and the adapters that were saved."""
    config = undisturbed.config()
    run = TextRun.of(config, jax.devices())
    evaluate = jax.jit(make_evaluate_step(run.loss_function()))
    parameters, step = restored_parameters(run)
    batches = (
        global_batch(blocks, run.sharding, run.shape) for blocks in run.validation()
    )
    sums = [evaluate(parameters, batch) for batch in batches]
    loss, weight = np.sum(jax.device_get(sums), axis=0)
    assert undisturbed.curve("loss/validation")[-1] == (
        step,
        pytest.approx(loss / weight, rel=1e-6),
    )


@pytest.mark.thorough
def test_a_broken_run_ends_as_if_it_had_not_been(undisturbed, new_run):
    middle = f"checkpoints/{MIDDLE}"
    shutil.copytree(undisturbed.workdir / middle, new_run.workdir / middle)
    new_run.train()
    assert f"resuming from step {MIDDLE}" in new_run.said
    assert_equal_bits(new_run.state(), undisturbed.state())
    assert new_run.curve() == undisturbed.curve()[MIDDLE:]


@pytest.mark.thorough
@pytest.mark.parametrize("fields, said", table("runs.txt", "other-adapters"))
def test_a_run_with_other_adapters_is_refused(undisturbed, fields, said):
    before = undisturbed.files()
    with pytest.raises(ValueError, match=said):
        undisturbed.train(train__steps=STEPS + 1, **fields)
    assert undisturbed.files() == before


@pytest.mark.thorough
def test_adapters_of_changed_weights_are_refused(
    undisturbed, weights, corpus, tmp_path
):
    before = undisturbed.files()
    config = small_config(corpus, tmp_path / "other")
    other = TextRun.of(config, jax.devices())
    parameters = drawn(other.model, other.partition)
    parameters["head"] *= 2
    save_parameters(config.workdir, parameters, other.fingerprint)
    said = "base_weights: saved step 0 with digest .*, this run step 0 with digest"
    for use in (undisturbed.train, lambda **fields: restored(undisturbed, **fields)):
        with pytest.raises(ValueError, match=said):
            use(init_from=config.workdir, train__steps=STEPS + 1)
    # The same weights elsewhere are the same.
    moved = shutil.copytree(weights, tmp_path / "moved")
    restored(undisturbed, init_from=str(moved))
    assert undisturbed.files() == before


def restored(run: Run, **overrides: Any) -> Any:
    config = run.config(**overrides)
    return restored_parameters(TextRun.of(config, jax.devices()))


@pytest.mark.thorough
def test_adapters_are_not_weights_to_start_from(undisturbed, new_run):
    with pytest.raises(ValueError, match="holds adapters, and no model: export it"):
        new_run.train(init_from=str(undisturbed.workdir))
    with pytest.raises(ValueError, match="lora.rank: saved 2, this run nothing"):
        new_run.train(init_from=str(undisturbed.workdir), lora__rank=0)
    assert not files(new_run.workdir / "checkpoints")


# Without adapters.

FIELDS = dict(table("runs.txt", "init_from"))


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(corpus, tmp_path_factory.mktemp("trained"), **FIELDS)
    run.train(seed=1)  # others begin elsewhere
    return run


@pytest.mark.thorough
def test_a_run_begins_with_imported_parameters_and_a_fresh_optimizer(
    corpus, trained, tmp_path
):
    """Those that another run has exported."""
    partition = partition_of(MeshShape(fsdp=8))
    published, imported = tmp_path / "published", tmp_path / "imported"
    options = {"dtype": "float32", "file_bytes": 1 << 16}
    export_model(str(trained.workdir), published, partition, **options)
    import_model(published, imported, partition)
    run = Run(corpus, tmp_path / "run", **FIELDS)
    run.train(init_from=str(imported))
    assert f"parameters: of step 0 of {imported}" in run.said
    assert any(line.startswith("step 1") for line in run.said)
    before, after = trained.state(), run.state()
    jax.tree.map(np.testing.assert_array_equal, before.params, after.params)
    leaves = jax.tree.leaves(after.optimizer_state)
    assert {int(leaf) for leaf in leaves if leaf.dtype == np.int32} == {2}
    # Once it has checkpoints of its own, it resumes from them; the source may be gone.
    run.said.clear()
    assert run.train(init_from=f"{tmp_path}/gone") == {"step": 2}
    assert "resuming from step 2" in run.said


@pytest.mark.thorough
@pytest.mark.parametrize("changes, complaint", table("runs.txt", "not-begun"))
def test_parameters_that_cannot_be_begun_with_are_refused_before_compiling(
    corpus, trained, tmp_path, monkeypatch, changes, complaint
):
    error = AssertionError("bad input was not refused before jax.jit")
    monkeypatch.setattr(jax, "jit", mock.Mock(side_effect=error))
    with pytest.raises(ValueError, match=complaint):
        Run(corpus, tmp_path, **FIELDS).train(init_from=str(trained.workdir), **changes)
