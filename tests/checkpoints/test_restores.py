"""Restores: equal to the last bit on any mesh; refused for another model."""

import collections
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.small.runs import assert_equal_bits, files
from tests.small.states import (
    abstract,
    assert_restores,
    checkpoints,
    state,
)
from training.checkpoint import Checkpoints
from training.stored_step import StoredStep
from training.weights import SavedParameters, save_parameters

Moments = collections.namedtuple("Moments", "count mu")


def shardings(num_devices: int) -> Any:
    """The matrix over fsdp and ring; every other array is replicated."""
    devices = np.array(jax.devices()[:num_devices]).reshape(-1, 2)
    mesh, matrix = Mesh(devices, ("fsdp", "ring")), PartitionSpec("fsdp", "ring")
    specs = jax.tree.map(lambda x: matrix if x.ndim == 2 else PartitionSpec(), state(0))
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


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
    placed = jax.device_put(state(7), shardings(8))
    for step, count in enumerate((4, 2)):
        places = shardings(count)
        like = jax.tree.map(lambda x, s: x.update(sharding=s), abstract(placed), places)
        with checkpoints(tmp_path) as saved:
            saved.save(step, placed)
            for leaf in jax.tree.leaves(placed):
                leaf.delete()
        with checkpoints(tmp_path) as saved:
            assert saved.latest_step() == step
            placed, _ = saved.restore(like)
        for leaf, place in zip(*map(jax.tree.leaves, (placed, places)), strict=True):
            assert leaf.sharding.is_equivalent_to(place, leaf.ndim)
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


def test_meta_data_without_fingerprint_is_refused(step_1):
    (step_1 / "1" / "meta" / "metadata").write_text('{"step": 1}')
    with checkpoints(step_1) as saved:
        with pytest.raises(ValueError, match=r"is good;[\s\S]*not saved by this tr"):
            saved.check_fingerprint()


MATRIX = "matrix: saved float32[64, 48], this run "


@pytest.mark.parametrize(
    "name, shape, dtype, differences",
    [
        ("matrix", (64, 24), "float32", [f"{MATRIX}float32[64, 24]"]),
        ("matrix", (64, 48), "bfloat16", [f"{MATRIX}bfloat16[64, 48]"]),  # no cast
        (
            *("output", (64, 48), "float32"),
            [f"{MATRIX}nothing", "output: saved nothing, this run float32[64, 48]"],
        ),
    ],
)
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
    wanted = [f"  {part}.{line}" for part in parts for line in differences]
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


FINGERPRINT = {"model": {"layers": 3, "rope_theta": 1e4, "scaling": {"factor": 2.0}}}
OTHER = {"model": {"layers": 3, "rope_theta": 1e6, "scaling": {"factor": 4.0}}}


def parameters() -> Any:
    draw = functools.partial(np.random.default_rng(3).standard_normal, dtype=np.float32)
    return {"embedding": draw((16, 8)), "layers": {"scale": draw((3, 8))}}


def on_mesh(tree: Any, devices: int = 8) -> Any:
    """Shapes of the arrays, on a number of devices."""
    sharding = NamedSharding(Mesh(jax.devices()[:devices], ("x",)), PartitionSpec())
    return jax.tree.map(lambda x: x.update(sharding=sharding), abstract(tree))


def steps_of(workdir: Path, keep: int = 1) -> Checkpoints:
    return Checkpoints(workdir / "checkpoints", keep=keep, fingerprint=FINGERPRINT)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("imported")
    save_parameters(directory, parameters(), FINGERPRINT)
    return directory


def test_parameters_come_back_bit_for_bit_or_rounded(workdir, tmp_path):
    before, like = files(workdir), on_mesh(parameters())
    saved = SavedParameters(workdir)
    assert (saved.step, saved.fingerprint) == (0, FINGERPRINT)
    restored = saved.restore(like)
    assert_equal_bits(restored, parameters())
    for got, wanted in zip(*map(jax.tree.leaves, (restored, like)), strict=True):
        assert got.sharding == wanted.sharding
    narrow = parameters()
    narrow["embedding"] = jnp.asarray(narrow["embedding"], jnp.bfloat16)
    rounded = saved.restore(on_mesh(narrow))
    assert_equal_bits(rounded, narrow)
    assert files(workdir) == before
    save_parameters(tmp_path, rounded, FINGERPRINT)
    wide = SavedParameters(tmp_path).restore(like)
    assert_equal_bits(wide, jax.tree.map(lambda x: x.astype(jnp.float32), rounded))


def test_parameters_of_a_runs_newest_step_are_read_without_its_optimizer(tmp_path):
    with steps_of(tmp_path, keep=2) as checkpoints:
        for step in (5, 9):
            moved = jax.tree.map(lambda x, step=step: x + step, parameters())
            state = {"step": np.int32(step), "params": moved, "optimizer_state": moved}
            checkpoints.save(step, state)
    saved = SavedParameters(tmp_path)
    assert saved.step == 9
    assert_equal_bits(saved.restore(on_mesh(parameters())), moved)


def test_a_run_does_not_go_on_from_parameters_alone(workdir):
    before = files(workdir)
    state = on_mesh({"params": parameters(), "optimizer_state": {"mu": parameters()}})
    with steps_of(workdir) as checkpoints:
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
        with steps_of(tmp_path) as run:
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
