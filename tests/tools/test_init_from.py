"""Runs that begin with the parameters of another one, or with imported ones."""

from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

from tests.cases import table
from tests.small.models import partition_of
from tests.small.runs import Run
from tools.convert_hf import export_model, import_model
from training.mesh import MeshShape

pytestmark = pytest.mark.usefixtures("programs")

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
