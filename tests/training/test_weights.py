"""Parameters out of a checkpoint: bit for bit, of the right model, nothing written."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.runs import assert_equal_bits, files
from training.checkpoint import Checkpoints
from training.stored_step import StoredStep
from training.weights import SavedParameters, save_parameters

FINGERPRINT = {"model": {"layers": 3, "rope_theta": 1e4, "scaling": {"factor": 2.0}}}
OTHER = {"model": {"layers": 3, "rope_theta": 1e6, "scaling": {"factor": 4.0}}}


def parameters() -> Any:
    draw = np.random.default_rng(3).standard_normal
    scale = draw((3, 8), np.float32)
    return {"embedding": draw((16, 8), np.float32), "layers": {"scale": scale}}


def on_mesh(tree: Any, devices: int = 8) -> Any:
    """Shapes of the arrays, their last axis over so many devices."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("fsdp",))

    def like(x):
        spec = PartitionSpec(*[None] * (x.ndim - 1), "fsdp")
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
        )

    return jax.tree.map(like, tree)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("imported")
    save_parameters(directory, parameters(), FINGERPRINT)
    return directory


@pytest.mark.parametrize("devices", [1, 8])
def test_parameters_come_back_bit_for_bit_on_any_mesh(workdir, devices):
    before, abstract = files(workdir), on_mesh(parameters(), devices)
    saved = SavedParameters(workdir)
    assert (saved.step, saved.fingerprint) == (0, FINGERPRINT)
    restored = saved.restore(abstract)
    assert_equal_bits(restored, parameters())
    for got, like in zip(*map(jax.tree.leaves, (restored, abstract)), strict=True):
        assert got.sharding == like.sharding
    assert files(workdir) == before


def test_parameters_of_a_runs_newest_step_are_read_without_its_optimizer(tmp_path):
    directory = tmp_path / "checkpoints"
    with Checkpoints(directory, keep=2, fingerprint=FINGERPRINT) as checkpoints:
        for step in (5, 9):
            moved = jax.tree.map(lambda x, step=step: x + step, parameters())
            state = {"step": np.int32(step), "params": moved, "optimizer_state": moved}
            checkpoints.save(step, state)
    saved = SavedParameters(tmp_path)
    assert saved.step == 9
    restored = saved.restore(on_mesh(parameters()))
    wanted = jax.tree.map(lambda x: x + 9, parameters())
    assert_equal_bits(restored, wanted)


def test_a_run_does_not_go_on_from_parameters_alone(workdir):
    before = files(workdir)
    state = on_mesh({"params": parameters(), "optimizer_state": {"mu": parameters()}})
    options = {"keep": 1, "fingerprint": FINGERPRINT}
    with Checkpoints(workdir / "checkpoints", **options) as checkpoints:
        with pytest.raises(ValueError, match="holds imported weights and not a") as no:
            checkpoints.restore(state)
    said = str(no.value)
    assert "config.init_from" in said and "\n" not in said and "mu" not in said
    assert files(workdir) == before


def test_parameters_of_another_model_are_refused_by_field(workdir):
    saved = SavedParameters(workdir)
    saved.check_model(FINGERPRINT)
    with pytest.raises(ValueError) as caught:
        saved.check_model(OTHER)
    message = str(caught.value)
    assert f"step 0 of {workdir} belong to another model" in message
    assert "model.rope_theta: saved 10000.0, this run 1000000.0" in message
    assert "model.scaling.factor: saved 2.0, this run 4.0" in message
    assert "layers" not in message
    # Fields that may differ do, and others do not.
    saved.check_model(OTHER, ("rope_theta", "scaling"))
    with pytest.raises(ValueError, match="scaling.factor") as caught:
        saved.check_model(OTHER, ("rope_theta",))
    assert "rope_theta:" not in str(caught.value)
    wrong = parameters() | {"head": np.zeros((8, 16), np.float32)}
    wrong["embedding"] = np.zeros((17, 8), np.float32)
    with pytest.raises(ValueError) as caught:
        saved.restore(on_mesh(wrong))
    message = str(caught.value)
    assert "params.embedding: saved float32[16, 8], this run float32[17, 8]" in message
    assert "params.head: saved nothing, this run float32[8, 16]" in message
    assert "scale" not in message


def test_parameters_are_rounded_to_the_type_that_is_asked_for(workdir, tmp_path):
    narrow = parameters()
    narrow["embedding"] = jnp.asarray(narrow["embedding"], jnp.bfloat16)
    rounded = SavedParameters(workdir).restore(on_mesh(narrow))
    assert_equal_bits(rounded, narrow)
    save_parameters(tmp_path, rounded, FINGERPRINT)
    wide = SavedParameters(tmp_path).restore(on_mesh(parameters()))
    assert_equal_bits(wide, jax.tree.map(lambda x: x.astype(jnp.float32), rounded))


def test_a_place_without_checkpoint_is_refused_and_stays_as_it_is(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere has no checkpoints"):
        SavedParameters(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "begun" / "checkpoints").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="begun has no checkpoints"):
        SavedParameters(tmp_path / "begun")


@pytest.mark.parametrize("moment", ["_read_meta", "_read_arrays"])
def test_of_a_run_that_rotates_the_newest_step_is_read(tmp_path, monkeypatch, moment):
    """The step that was found is deleted while it is read, and a newer one is there."""
    read, seen = getattr(StoredStep, moment), []

    def save(step):
        options = {"keep": 1, "fingerprint": FINGERPRINT}
        with Checkpoints(tmp_path / "checkpoints", **options) as run:
            run.save(step, {"params": {"w": np.full(8, step, np.float32)}})

    def rotated(stored, *arguments):
        seen.append(stored.step)
        if seen == [1]:
            save(2)
            assert not stored.directory.exists()
        return read(stored, *arguments)

    save(1)
    monkeypatch.setattr(StoredStep, moment, rotated)
    saved = SavedParameters(tmp_path)
    restored = saved.restore(on_mesh({"w": np.zeros(8, np.float32)}))
    np.testing.assert_array_equal(restored["w"], np.full(8, 2))
    assert saved.step == 2
