"""Restores: equal to the last bit on any mesh; refused for another model."""

import collections
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tasks.state import sharding_of
from tests.cases import table
from tests.small.runs import assert_equal_bits, files
from tests.small.states import (
    FINGERPRINT,
    abstract,
    assert_restores,
    checkpoints,
    state,
)
from training.saved.checkpoint import Checkpoints
from training.saved.stored_step import StoredStep
from training.saved.weights import SavedParameters, save_parameters

Moments = collections.namedtuple("Moments", "count mu")


def on_mesh(tree: Any, devices: int = 8) -> Any:
    """Shapes of the arrays: matrices over fsdp and ring, all others on every device."""
    shape = np.array(jax.devices()[:devices]).reshape(-1, 2)
    mesh, matrix = Mesh(shape, ("fsdp", "ring")), PartitionSpec("fsdp", "ring")

    def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = matrix if x.ndim == 2 else PartitionSpec()
        return x.update(sharding=NamedSharding(mesh, spec))

    return jax.tree.map(placed, abstract(tree))


def assert_placed(got: Any, like: Any) -> None:
    for leaf, wanted in zip(*map(jax.tree.leaves, (got, like)), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)


def with_moments(tree: Any) -> Any:
    return tree | {"optimizer": (Moments(tree["step"], tree["params"]),)}


@pytest.fixture
def step_1(tmp_path):
    """A directory whose step 1 holds `state(1)` and moments of it."""
    with checkpoints(tmp_path) as saved:
        saved.save(1, with_moments(state(1)))
    return tmp_path


def test_state_is_equal_to_the_bit_on_8_then_4_then_2_devices(tmp_path):
    """And may be deleted right after a save, as a step does that takes its memory."""
    with checkpoints(tmp_path) as saved:
        assert saved.latest_step() is None
        saved.check_fingerprint()
        with pytest.raises(FileNotFoundError, match="no checkpoint in"):
            saved.restore(abstract(state(0)))
    placed = jax.device_put(state(7), sharding_of(on_mesh(state(7))))
    for step, count in enumerate((4, 2)):
        like = on_mesh(placed, count)
        with checkpoints(tmp_path) as saved:
            saved.save(step, placed)
            for leaf in jax.tree.leaves(placed):
                leaf.delete()
        with checkpoints(tmp_path) as saved:
            assert saved.latest_step() == step
            placed, _ = saved.restore(like)
        assert_placed(placed, like)
        assert_equal_bits(placed, state(7))


@pytest.mark.parametrize("step", [20, 30])
def test_saved_step_is_never_overwritten_nor_an_older_one_added(directory, step):
    before = files(directory)
    with checkpoints(directory) as saved:
        with pytest.raises(ValueError, match=f"step={step} is not newer than step 30"):
            saved.save(step, state(2))
    assert files(directory) == before


def assert_refused(directory: Path, fingerprint: Any, message: str) -> None:
    """By whatever comes first, and nothing is changed."""
    before = files(directory)
    with Checkpoints(directory, keep=2, fingerprint=fingerprint) as saved:
        for refused in (
            saved.check_fingerprint,
            lambda: saved.restore(abstract(state(0))),
            lambda: saved.save(4, state(4)),
        ):
            with pytest.raises(ValueError, match=message):
                refused()
    assert files(directory) == before


def test_other_model_is_refused_by_every_differing_key(tmp_path):
    model = {"model": {"layers": 3, "width": 16}, "vocabulary": 32, "heads": (4, 2)}
    with Checkpoints(tmp_path, keep=2, fingerprint=model) as saved:
        saved.save(1, state(1))
    other = {"model": {"layers": 4, "width": 16}, "heads": [4, 2], "mlp": 8}
    lines = (
        "mlp: saved nothing, this run 8",
        "model.layers: saved 3, this run 4",
        "vocabulary: saved 32, this run nothing",
    )
    assert_refused(tmp_path, other, "\n  ".join((":", *lines)) + "$")


def test_steps_of_another_program_are_refused_and_left_alone(tmp_path):
    with ocp.CheckpointManager(tmp_path) as foreign:
        foreign.save(3, args=ocp.args.StandardSave({"weight": jnp.ones(4)}))
    assert_refused(tmp_path, {}, "step 3 .* not saved by this trainer")


@pytest.mark.parametrize("name, shape, dtype, differences", table("runs.txt", "no-fit"))
def test_arrays_that_do_not_fit_are_refused_by_name(
    step_1, name, shape, dtype, differences
):
    """Those of a NamedTuple too, which is saved as a dict."""
    tree = state(1)
    del tree["params"]["matrix"]
    tree["params"][name] = jnp.ones(shape, dtype)
    with checkpoints(step_1) as saved:
        with pytest.raises(ValueError, match="does not fit the train state") as caught:
            saved.restore(abstract(with_moments(tree)))
    parts = "optimizer.0.mu", "params"
    lines = differences.split(" | ")
    wanted = [f"  {part}.{line}" for part in parts for line in lines]
    assert str(caught.value).splitlines()[1:] == wanted


def test_save_cut_off_by_a_kill_is_not_a_step(directory):
    cut_off = directory / "40.orbax-checkpoint-tmp"
    (cut_off / "state").mkdir(parents=True)
    with checkpoints(directory) as saved:
        assert saved.latest_step() == 30
        saved.save(50, state(50))
    assert not cut_off.exists()
    with checkpoints(directory) as saved:
        assert_restores(saved, 50)


OTHER = {"model": {"layers": 2, "rope_theta": 1e6, "scaling": {"factor": 4.0}}}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("imported")
    save_parameters(directory, state(3)["params"], FINGERPRINT)
    return directory


def test_parameters_come_back_bit_for_bit_or_rounded(workdir, tmp_path):
    before, parameters = files(workdir), state(3)["params"]
    saved = SavedParameters(workdir)
    assert (saved.step, saved.fingerprint) == (0, FINGERPRINT)
    restored = saved.restore(on_mesh(parameters))
    assert_equal_bits(restored, parameters)
    assert_placed(restored, on_mesh(parameters))
    narrow, wide = (
        jax.tree.map(lambda x, dtype=dtype: x.astype(dtype), parameters)
        for dtype in ("bfloat16", "float32")
    )
    rounded = saved.restore(on_mesh(narrow))
    assert_equal_bits(rounded, narrow)
    assert saved.rounded == 1 and files(workdir) == before
    save_parameters(tmp_path, rounded, FINGERPRINT)
    widened = SavedParameters(tmp_path).restore(on_mesh(wide))
    assert_equal_bits(widened, jax.tree.map(lambda x: x.astype("float32"), narrow))


def test_parameters_of_a_runs_newest_step_are_read_without_the_rest(directory):
    saved, newest = SavedParameters(directory.parent), state(30)["params"]
    assert saved.step == 30
    assert_equal_bits(saved.restore(on_mesh(newest)), newest)


def test_a_run_does_not_go_on_from_parameters_alone(workdir):
    before = files(workdir)
    with checkpoints(workdir / "checkpoints") as saved:
        with pytest.raises(ValueError, match="holds imported weights and not a") as no:
            saved.restore(on_mesh(state(3)))
    said = str(no.value)
    assert "config.init_from" in said and "\n" not in said
    assert files(workdir) == before


def test_parameters_of_another_model_are_refused_by_field(workdir):
    saved = SavedParameters(workdir)
    saved.check_model(FINGERPRINT)
    theta = "model.rope_theta: saved 10000.0, this run 1000000.0"
    factor = "model.scaling.factor: saved 2.0, this run 4.0"
    begin = f"step 0 of {workdir} belong to another model.*:\n  "
    with pytest.raises(ValueError, match=f"{begin}{theta}\n  {factor}$"):
        saved.check_model(OTHER)
    # Fields that may differ do, and others do not.
    saved.check_model(OTHER, ("rope_theta", "scaling"))
    with pytest.raises(ValueError, match=f"{begin}{factor}$"):
        saved.check_model(OTHER, ("rope_theta",))
    wrong = state(3)["params"] | {"head": np.zeros((8, 16), np.float32)}
    wrong["matrix"] = np.zeros((60, 48), np.float32)
    with pytest.raises(ValueError, match="do not fit the model:") as caught:
        saved.restore(on_mesh(wrong))
    assert str(caught.value).splitlines()[1:] == [
        "  params.head: saved nothing, this run float32[8, 16]",
        "  params.matrix: saved float32[64, 48], this run float32[60, 48]",
    ]


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
        with checkpoints(tmp_path / "checkpoints", keep=1) as run:
            run.save(step, state(step))

    def rotated(stored, *arguments):
        seen.append(stored.step)
        if seen == [1]:
            save(2)
            assert not stored.directory.exists()
        return read(stored, *arguments)

    save(1)
    monkeypatch.setattr(StoredStep, moment, rotated)
    saved, wanted = SavedParameters(tmp_path), state(2)["params"]
    assert_equal_bits(saved.restore(on_mesh(wanted)), wanted)
    assert saved.step == 2
