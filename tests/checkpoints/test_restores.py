"""Saves and restores: equal to the last bit on any mesh; refused for another model."""

import collections
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.checkpoints.small_state import (
    abstract,
    assert_restores,
    checkpoints,
    content,
    state,
)
from tests.runs import assert_equal_bits
from training.checkpoint import Checkpoints

Moments = collections.namedtuple("Moments", "count mu")


def shardings(num_devices: int) -> Any:
    """The matrix over fsdp and ring; every other array is replicated."""
    devices = np.array(jax.devices()[:num_devices]).reshape(-1, 2)
    mesh = Mesh(devices, ("fsdp", "ring"))
    specs = {2: PartitionSpec("fsdp", "ring")}
    return jax.tree.map(
        lambda x: NamedSharding(mesh, specs.get(x.ndim, PartitionSpec())), state(0)
    )


@pytest.fixture
def step_1(tmp_path):
    """A directory whose step 1 holds `state(1)` and moments of it."""
    with checkpoints(tmp_path) as saved:
        saved.save(1, with_moments(state(1)))
    return tmp_path


def with_moments(tree: Any) -> Any:
    return tree | {"optimizer": (Moments(tree["step"], tree["params"]),)}


def test_state_is_equal_to_the_bit_on_8_then_4_then_2_devices(tmp_path):
    placed = jax.device_put(state(7), shardings(8))
    for step, count in enumerate((4, 2)):
        with checkpoints(tmp_path) as saved:
            saved.save(step, placed)
        places = shardings(count)
        like = jax.tree.map(lambda x, s: x.update(sharding=s), abstract(placed), places)
        with checkpoints(tmp_path) as saved:
            placed, _ = saved.restore(like)
        for leaf, place in zip(*map(jax.tree.leaves, (placed, places)), strict=True):
            assert leaf.sharding.is_equivalent_to(place, leaf.ndim)
        assert_equal_bits(placed, state(7))


def test_state_may_be_deleted_right_after_save(tmp_path):
    """As a step does that takes its memory."""
    placed = jax.device_put(state(0), shardings(2))
    with checkpoints(tmp_path) as saved:
        saved.save(0, placed)
        for leaf in jax.tree.leaves(placed):
            leaf.delete()
        assert_restores(saved, 0)


def test_step_zero_is_a_step_and_an_empty_directory_has_none(tmp_path):
    place = tmp_path / "made" / "here"
    with checkpoints(place) as saved:
        assert saved.latest_step() is None
        saved.check_fingerprint()
        with pytest.raises(FileNotFoundError, match="no checkpoint in"):
            saved.restore(abstract(state(0)))
        saved.save(0, state(0))
        assert saved.latest_step() == 0
    with checkpoints(place) as saved:
        assert saved.latest_step() == 0
        assert_restores(saved, 0)


@pytest.mark.parametrize("step", [20, 30])
def test_saved_step_is_never_overwritten_nor_an_older_one_added(directory, step):
    before = content(directory)
    with checkpoints(directory) as saved:
        with pytest.raises(ValueError, match=f"step={step} is not newer than step 30"):
            saved.save(step, state(2))
    assert content(directory) == before


def assert_refused(directory: Path, fingerprint: Any, message: str) -> None:
    """By whatever comes first, and nothing is changed."""
    before = content(directory)
    with Checkpoints(directory, keep=2, fingerprint=fingerprint) as saved:
        for refused in (
            saved.check_fingerprint,
            lambda: saved.restore(abstract(state(0))),
            lambda: saved.save(4, state(4)),
        ):
            with pytest.raises(ValueError, match=message):
                refused()
    assert content(directory) == before


def test_other_model_is_refused_by_every_differing_key(tmp_path):
    model = {"model": {"layers": 3, "width": 16}, "vocabulary": 32, "heads": (4, 2)}
    with Checkpoints(tmp_path, keep=2, fingerprint=model) as saved:
        saved.save(1, state(1))
    other = {"model": {"layers": 4, "width": 16}, "vocabulary": 64, "heads": [4, 2]}
    lines = (
        "mlp: saved nothing, this run 8",
        "model.layers: saved 3, this run 4",
        "vocabulary: saved 32, this run 64",
    )
    assert_refused(tmp_path, other | {"mlp": 8}, "\n  ".join((":", *lines)) + "$")


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
    ("name", "matrix", "differences"),
    [
        ("matrix", jnp.ones((64, 24)), [f"{MATRIX}float32[64, 24]"]),
        # It is not cast.
        ("matrix", jnp.ones((64, 48), "bfloat16"), [f"{MATRIX}bfloat16[64, 48]"]),
        (
            "output",
            jnp.ones((64, 48)),
            [f"{MATRIX}nothing", "output: saved nothing, this run float32[64, 48]"],
        ),
    ],
    ids=["shape", "type", "name"],
)
def test_arrays_that_do_not_fit_are_refused_by_name(step_1, name, matrix, differences):
    """Those of a NamedTuple too, which is saved as a dict."""
    tree = state(1)
    del tree["params"]["matrix"]
    tree["params"][name] = matrix
    with checkpoints(step_1) as saved:
        with pytest.raises(ValueError, match="does not fit the train state") as caught:
            saved.restore(abstract(with_moments(tree)))
    assert str(caught.value).splitlines()[1:] == [
        f"  {part}.{line}"
        for part in ("optimizer.0.mu", "params")
        for line in differences
    ]


def test_save_cut_off_by_a_kill_is_not_a_step(directory):
    cut_off = directory / "40.orbax-checkpoint-tmp"
    (cut_off / "state").mkdir(parents=True)
    with checkpoints(directory) as saved:
        assert saved.latest_step() == 30
        saved.save(50, state(50))
    assert not cut_off.exists()
    with checkpoints(directory) as saved:
        assert_restores(saved, 50)


@pytest.mark.parametrize(
    ("keep", "fingerprint", "message"),
    [
        *((n, {}, f"keep={n!r} must be at least 1") for n in (0, 2.5, True, "3")),
        (2, {"dtype": jnp.float32}, "give finite numbers, strings"),
        (2, {"factor": np.nan}, "give finite numbers, strings"),
    ],
)
def test_bad_arguments_are_refused_before_the_directory_is_made(
    tmp_path, keep, fingerprint, message
):
    with pytest.raises(ValueError, match=message):
        Checkpoints(tmp_path / "run", keep=keep, fingerprint=fingerprint)
    assert not (tmp_path / "run").exists()
