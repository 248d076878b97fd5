"""Saves and restores: equal to the last bit on any mesh; refused for another model."""

import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from training.checkpoint import Checkpoints
from training.optimizer import OptimizerSettings, make_optimizer

FINGERPRINT = {"model": {"layers": 3, "width": 16}, "vocabulary": 32, "heads": (4, 2)}


class TrainState(NamedTuple):
    step: Any
    params: Any
    optimizer_state: Any


def open_checkpoints(directory, fingerprint=FINGERPRINT, keep=2):
    return Checkpoints(directory, keep=keep, fingerprint=fingerprint)


def make_transformation():
    settings = OptimizerSettings(1e-2, 1e-3, warmup_steps=0, total_steps=50)
    return make_optimizer(settings)[0]


def init_state(seed=0, width=16):
    rng = np.random.default_rng(seed)
    params = {
        "embedding": jnp.asarray(rng.normal(size=(32, width)), jnp.float32),
        "layers": {
            "norm_scale": jnp.ones((3, width)),
            "feed_forward": jnp.asarray(rng.normal(size=(3, width, 8)), jnp.float32),
        },
    }
    return TrainState(jnp.int32(0), params, make_transformation().init(params))


@jax.jit
def update(state):
    grads = jax.tree.map(jnp.sin, state.params)
    updates, optimizer_state = make_transformation().update(
        grads, state.optimizer_state, state.params
    )
    params = jax.tree.map(jnp.add, state.params, updates)
    return TrainState(state.step + 1, params, optimizer_state)


def shardings(state, num_devices):
    """Rows over fsdp, columns over ring; what does not divide is replicated."""
    ring = min(num_devices, 2)
    mesh = jax.make_mesh(
        (num_devices // ring, ring),
        ("fsdp", "ring"),
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
        devices=jax.devices()[:num_devices],
    )

    def place(leaf):
        is_embedding = leaf.shape[:1] == (32,)
        spec = PartitionSpec("fsdp", "ring") if is_embedding else PartitionSpec()
        return NamedSharding(mesh, spec)

    return jax.tree.map(place, state)


def abstract(state, num_devices=1):
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=place
        ),
        state,
        shardings(state, num_devices),
    )


def assert_equal_to_the_bit(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for ours, theirs in zip(
        jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
    ):
        assert ours.dtype == theirs.dtype
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


@pytest.fixture
def step_1(tmp_path):
    """Saves the initial state as step 1 in `tmp_path`."""
    with open_checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, init_state())


def test_state_is_equal_to_the_bit_on_8_then_4_then_2_devices(tmp_path):
    state = update(init_state())
    expected = jax.device_get(state)
    for count, step in ((8, 1), (4, 2), (2, 3)):
        with open_checkpoints(tmp_path) as checkpoints:
            if count < 8:
                state, _ = checkpoints.restore(abstract(expected, count))
            else:
                state = jax.device_put(state, shardings(state, count))
            assert len(state.params["embedding"].sharding.device_set) == count
            for leaf, place in zip(
                jax.tree.leaves(state),
                jax.tree.leaves(shardings(state, count)),
                strict=True,
            ):
                assert leaf.sharding.is_equivalent_to(place, leaf.ndim)
            assert_equal_to_the_bit(state, expected)
            checkpoints.save(step, state)


def test_state_donated_right_after_save_is_saved_as_it_was(tmp_path):
    donating_update = jax.jit(update, donate_argnums=0)
    first = state = jax.device_put(init_state(), shardings(init_state(), 2))
    with open_checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, state)
        for _ in range(5):
            state = donating_update(state)
        assert any(leaf.is_deleted() for leaf in jax.tree.leaves(first))
        restored, _ = checkpoints.restore(abstract(state))
    assert_equal_to_the_bit(restored, init_state())


def test_step_zero_is_a_step_and_an_empty_directory_has_none(tmp_path):
    with open_checkpoints(tmp_path / "made" / "here") as checkpoints:
        assert checkpoints.latest_step() is None
        checkpoints.check_fingerprint()
        checkpoints.save(0, init_state())
        assert checkpoints.latest_step() == 0
    with open_checkpoints(tmp_path / "made" / "here") as checkpoints:
        assert checkpoints.latest_step() == 0
        state, meta = checkpoints.restore(abstract(init_state()))
    assert meta["step"] == 0
    assert_equal_to_the_bit(state, init_state())


def test_the_newest_steps_are_kept(tmp_path):
    with open_checkpoints(tmp_path, keep=2) as checkpoints:
        for step in 3, 6, 9:
            checkpoints.save(step, init_state())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["6", "9"]


@pytest.mark.parametrize("step", [5, 10])
def test_saved_step_is_never_overwritten_nor_an_older_one_added(tmp_path, step):
    with open_checkpoints(tmp_path) as checkpoints:
        checkpoints.save(10, init_state(seed=1))
    with open_checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match=f"step={step} is not newer than step 10"):
            checkpoints.save(step, init_state(seed=2))
        restored, _ = checkpoints.restore(abstract(init_state()))
    assert_equal_to_the_bit(restored, init_state(seed=1))
    assert [path.name for path in tmp_path.iterdir()] == ["10"]


def test_other_model_is_refused_by_every_differing_key(step_1, tmp_path):
    other = {"model": {"layers": 4, "width": 16}, "vocabulary": 64, "heads": [4, 2]}
    other["mlp"] = 8
    with open_checkpoints(tmp_path, other) as checkpoints:
        for refused in (
            checkpoints.check_fingerprint,
            lambda: checkpoints.restore(abstract(init_state())),
            lambda: checkpoints.save(2, init_state()),
        ):
            with pytest.raises(ValueError, match="another workdir") as caught:
                refused()
            assert str(caught.value).splitlines()[1:] == [
                "  mlp: saved nothing, this run 8",
                "  model.layers: saved 3, this run 4",
                "  vocabulary: saved 32, this run 64",
            ]
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_other_model_is_refused_at_step_zero_too(tmp_path):
    with open_checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, init_state())
    with open_checkpoints(tmp_path, {"vocabulary": 64}) as checkpoints:
        with pytest.raises(ValueError, match="vocabulary: saved 32, this run 64"):
            checkpoints.check_fingerprint()


def test_same_model_passes_as_tuple_or_list_as_int_or_float(step_1, tmp_path):
    same = {"heads": [4, 2], "vocabulary": 32.0, "model": {"width": 16, "layers": 3}}
    with open_checkpoints(tmp_path, same) as checkpoints:
        checkpoints.check_fingerprint()
        _, meta = checkpoints.restore(abstract(init_state()))
    assert meta["fingerprint"] == json.loads(json.dumps(FINGERPRINT))


def test_fingerprint_is_compared_before_any_array_is_read(step_1, tmp_path):
    for path in (tmp_path / "1" / "state").rglob("*"):
        if path.is_file() and path.parent.name == "d":
            path.write_bytes(b"")
    with open_checkpoints(tmp_path, {"vocabulary": 64}) as checkpoints:
        with pytest.raises(ValueError, match="vocabulary: saved 32, this run 64"):
            checkpoints.restore(abstract(init_state()))


def test_steps_of_another_program_are_refused_and_left_alone(tmp_path):
    with ocp.CheckpointManager(tmp_path) as foreign:
        foreign.save(3, args=ocp.args.StandardSave({"weight": jnp.ones(4)}))
    before = sorted(tmp_path.rglob("*"))
    with open_checkpoints(tmp_path) as checkpoints:
        for refused in (
            checkpoints.check_fingerprint,
            lambda: checkpoints.restore(abstract(init_state())),
            lambda: checkpoints.save(4, init_state()),
        ):
            with pytest.raises(ValueError, match="step 3 .* not saved by this trainer"):
                refused()
    assert sorted(tmp_path.rglob("*")) == before


def test_meta_data_without_fingerprint_is_refused(tmp_path):
    with open_checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, init_state())
    (tmp_path / "3" / "meta" / "metadata").write_text('{"step": 3}')
    with open_checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match="step 3 in .* not saved by this trainer"):
            checkpoints.check_fingerprint()


def test_leaf_of_another_shape_is_named(tmp_path):
    with open_checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, init_state(width=16))
        with pytest.raises(ValueError, match="does not fit the train state") as caught:
            checkpoints.restore(abstract(init_state(width=24)))
    message = str(caught.value)
    line = "  params.embedding: saved float32[32, 16], this run float32[32, 24]"
    assert line in message.splitlines()
    assert "optimizer_state.1.0.mu.layers.feed_forward: saved" in message
    assert "count" not in message


def test_leaf_of_another_dtype_is_refused_and_not_cast(tmp_path):
    state = init_state()
    half = jax.tree.map(lambda leaf: leaf, state)
    half.params["embedding"] = state.params["embedding"].astype(jnp.bfloat16)
    with open_checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        with pytest.raises(ValueError, match="does not fit the train state") as caught:
            checkpoints.restore(abstract(half))
    assert str(caught.value).splitlines()[1:] == [
        "  params.embedding: saved float32[32, 16], this run bfloat16[32, 16]"
    ]


def test_missing_and_unknown_leaves_are_named(tmp_path):
    state = init_state()
    wanted = abstract(state)
    wanted.params["output"] = wanted.params.pop("embedding")
    with open_checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        with pytest.raises(ValueError, match="does not fit the train state") as caught:
            checkpoints.restore(wanted)
    assert str(caught.value).splitlines()[1:] == [
        "  params.embedding: saved float32[32, 16], this run nothing",
        "  params.output: saved nothing, this run float32[32, 16]",
    ]


def test_leaf_without_sharding_is_refused(tmp_path):
    wanted = jax.eval_shape(init_state)
    with open_checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, init_state())
        with pytest.raises(ValueError, match="step of abstract_state has no sharding"):
            checkpoints.restore(wanted)


def test_restore_from_an_empty_directory_is_refused(tmp_path):
    with open_checkpoints(tmp_path) as checkpoints:
        with pytest.raises(FileNotFoundError, match="no checkpoint in"):
            checkpoints.restore(abstract(init_state()))


def test_save_cut_off_by_a_kill_is_not_a_step(step_1, tmp_path):
    cut_off = tmp_path / "2.orbax-checkpoint-tmp"
    (cut_off / "state").mkdir(parents=True)
    with open_checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == 1
        checkpoints.save(3, init_state(seed=2))
    assert not cut_off.exists()
    with open_checkpoints(tmp_path) as checkpoints:
        restored, _ = checkpoints.restore(abstract(init_state()))
    assert_equal_to_the_bit(restored, init_state(seed=2))


def test_relative_directory_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open_checkpoints("run") as checkpoints:
        checkpoints.save(1, init_state())
    assert (tmp_path / "run" / "1" / "meta").is_dir()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(({"keep": n}, f"keep={n!r} must be at least 1") for n in (0, 2.5, True, "3")),
        (
            {"fingerprint": {"dtype": jnp.float32}},
            "give finite numbers, strings",
        ),
        ({"fingerprint": {"factor": np.nan}}, "give finite numbers, strings"),
    ],
)
def test_bad_arguments_are_refused_before_the_directory_is_made(
    tmp_path, arguments, message
):
    with pytest.raises(ValueError, match=message):
        open_checkpoints(tmp_path / "run", **arguments)
    assert not (tmp_path / "run").exists()
