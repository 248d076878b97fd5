"""Saves and restores: equal to the last bit on any mesh; refused for another model."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.runs import assert_equal_bits
from training.checkpoint import Checkpoints
from training.optimizer import OptimizerSettings, make_optimizer

FINGERPRINT = {"model": {"layers": 3, "width": 16}, "vocabulary": 32, "heads": (4, 2)}


TrainState = collections.namedtuple("TrainState", "step params optimizer_state")


def open_checkpoints(directory, fingerprint=FINGERPRINT, keep=2):
    return Checkpoints(directory, keep=keep, fingerprint=fingerprint)


OPTIMIZER, _ = make_optimizer(OptimizerSettings(1e-2, 1e-3, 0, total_steps=50))


def init_state(seed=0, width=16):
    rng = np.random.default_rng(seed)
    params = {
        "embedding": jnp.asarray(rng.normal(size=(32, width)), jnp.float32),
        "layers": {
            "norm_scale": jnp.ones((3, width)),
            "feed_forward": jnp.asarray(rng.normal(size=(3, width, 8)), jnp.float32),
        },
    }
    return TrainState(jnp.int32(0), params, OPTIMIZER.init(params))


@jax.jit
def update(state):
    grads = jax.tree.map(jnp.sin, state.params)
    params, moments = OPTIMIZER.update(grads, state.optimizer_state, state.params)
    return TrainState(state.step + 1, params, moments)


def shardings(state, num_devices):
    """Rows over fsdp, columns over ring; what does not divide is replicated."""
    ring = min(num_devices, 2)
    devices = np.array(jax.devices()[:num_devices]).reshape(-1, ring)
    mesh = Mesh(devices, ("fsdp", "ring"))

    def place(leaf):
        is_embedding = leaf.shape[:1] == (32,)
        spec = PartitionSpec("fsdp", "ring") if is_embedding else PartitionSpec()
        return NamedSharding(mesh, spec)

    return jax.tree.map(place, state)


def abstract(state, num_devices=1):
    placed = jax.device_put(state, shardings(state, num_devices))
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, placed)


def save(directory, step, **state):
    with open_checkpoints(directory) as checkpoints:
        checkpoints.save(step, init_state(**state))


def assert_restores(directory, state):
    with open_checkpoints(directory) as checkpoints:
        restored, meta = checkpoints.restore(abstract(init_state()))
    assert_equal_bits(restored, state)
    return meta


@pytest.fixture
def step_1(tmp_path):
    """Saves the initial state as step 1 in `tmp_path`."""
    save(tmp_path, 1)


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
            places = jax.tree.leaves(shardings(state, count))
            for leaf, place in zip(jax.tree.leaves(state), places, strict=True):
                assert leaf.sharding.is_equivalent_to(place, leaf.ndim)
            assert_equal_bits(state, expected)
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
    assert_equal_bits(restored, init_state())


def test_step_zero_is_a_step_and_an_empty_directory_has_none(tmp_path):
    with open_checkpoints(tmp_path / "made" / "here") as checkpoints:
        assert checkpoints.latest_step() is None
        checkpoints.check_fingerprint()
        with pytest.raises(FileNotFoundError, match="no checkpoint in"):
            checkpoints.restore(abstract(init_state()))
        checkpoints.save(0, init_state())
        assert checkpoints.latest_step() == 0
    with open_checkpoints(tmp_path / "made" / "here") as checkpoints:
        assert checkpoints.latest_step() == 0
    meta = assert_restores(tmp_path / "made" / "here", init_state())
    assert meta["step"] == 0


def test_the_newest_steps_are_kept(tmp_path):
    with open_checkpoints(tmp_path, keep=2) as checkpoints:
        for step in 3, 6, 9:
            checkpoints.save(step, init_state())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["6", "9"]


@pytest.mark.parametrize("step", [5, 10])
def test_saved_step_is_never_overwritten_nor_an_older_one_added(tmp_path, step):
    save(tmp_path, 10, seed=1)
    with open_checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match=f"step={step} is not newer than step 10"):
            checkpoints.save(step, init_state(seed=2))
    assert_restores(tmp_path, init_state(seed=1))
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


def test_meta_data_without_fingerprint_is_refused(step_1, tmp_path):
    (tmp_path / "1" / "meta" / "metadata").write_text('{"step": 1}')
    with open_checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match=r"is good;[\s\S]*not saved by this tr"):
            checkpoints.check_fingerprint()


def refusal(directory, wanted):
    with open_checkpoints(directory) as checkpoints:
        with pytest.raises(ValueError, match="does not fit the train state") as caught:
            checkpoints.restore(wanted)
    return str(caught.value).splitlines()[1:]


def test_every_leaf_of_another_shape_is_named(step_1, tmp_path):
    lines = refusal(tmp_path, abstract(init_state(width=24)))
    assert (
        "  params.embedding: saved float32[32, 16], this run float32[32, 24]" in lines
    )
    message = "\n".join(lines)
    assert "optimizer_state.1.0.mu.layers.feed_forward: saved" in message
    assert "count" not in message


def test_leaf_of_another_dtype_is_refused_and_not_cast(step_1, tmp_path):
    half = init_state()
    half.params["embedding"] = half.params["embedding"].astype(jnp.bfloat16)
    assert refusal(tmp_path, abstract(half)) == [
        "  params.embedding: saved float32[32, 16], this run bfloat16[32, 16]"
    ]


def test_missing_and_unknown_leaves_are_named(step_1, tmp_path):
    wanted = abstract(init_state())
    wanted.params["output"] = wanted.params.pop("embedding")
    assert refusal(tmp_path, wanted) == [
        "  params.embedding: saved float32[32, 16], this run nothing",
        "  params.output: saved nothing, this run float32[32, 16]",
    ]


def test_save_cut_off_by_a_kill_is_not_a_step(step_1, tmp_path):
    cut_off = tmp_path / "2.orbax-checkpoint-tmp"
    (cut_off / "state").mkdir(parents=True)
    with open_checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == 1
        checkpoints.save(3, init_state(seed=2))
    assert not cut_off.exists()
    assert_restores(tmp_path, init_state(seed=2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(({"keep": n}, f"keep={n!r} must be at least 1") for n in (0, 2.5, True, "3")),
        ({"fingerprint": {"dtype": jnp.float32}}, "give finite numbers, strings"),
        ({"fingerprint": {"factor": np.nan}}, "give finite numbers, strings"),
    ],
)
def test_bad_arguments_are_refused_before_the_directory_is_made(
    tmp_path, arguments, message
):
    with pytest.raises(ValueError, match=message):
        open_checkpoints(tmp_path / "run", **arguments)
    assert not (tmp_path / "run").exists()
