"""Agents: causal as they must be, and the same on every ring and in every layout."""

import jax
import numpy as np
import pytest

from data.agents.chains import ChainBatch
from data.agents.trajectory_file import TrajectoryFile
from models.actions import Actions
from tests.cases import in_tiers
from tests.small.agents import (
    CLONER,
    EPISODE_STEPS,
    ONE_TOKEN,
    Run,
    chains_of,
    make_trajectories,
    one_device,
)
from tests.small.models import assert_same
from training.sharding.mesh import MeshShape

REAL = 2 * EPISODE_STEPS


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryFile:
    return make_trajectories(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def batch(file: TrajectoryFile) -> ChainBatch:
    """Chains whose weights are very unlike, and 0 on the padding at the end."""
    batch = chains_of(file, one_device().config)
    weights = np.random.default_rng(2).random(batch.loss_weights.shape, np.float32)
    weights[0] *= 50
    return batch._replace(loss_weights=weights * batch.loss_weights)


@pytest.fixture(scope="module")
def discrete(file: TrajectoryFile) -> ChainBatch:
    """Chains of one-hot targets, as an agent of one token a step reads them."""
    batch = chains_of(file, one_device(**ONE_TOKEN).config)
    likelier = batch.targets.argmax(axis=-1)
    return batch._replace(targets=np.eye(2, dtype=np.float32)[likelier])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mesh, attention, is_one_token", in_tiers("models.txt", "agent"), ids=str
)
def test_losses_and_gradients_are_those_of_one_device(
    batch, discrete, mesh, attention, is_one_token
):
    shape, fields = MeshShape(**mesh), ONE_TOKEN if is_one_token else {}
    chains = discrete if fields else batch
    losses, gradients = one_device(**fields).losses_and_gradients(chains)
    found, of_ring = Run(shape, attention, **fields).losses_and_gradients(chains)
    for unread in (gradients, of_ring) if fields else ():
        assert not jax.tree.leaves(unread.pop("return_embedding"))[0].any()
    assert_same((found, of_ring), (losses, gradients), 1e-5)
    assert (losses > 0).all()
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradients))


def test_logits_have_the_cross_entropy_of_what_was_done(rng):
    """Of binned actions of the nearest values, whose losses add up over an action."""
    targets = rng.uniform(-1.5, 1.5, (50, 2))
    logits = rng.normal(size=(50, 2, 5))  # (..., A, K)
    nearest = np.abs(targets[..., None] - np.linspace(-1, 1, 5)).argmin(axis=-1)
    assert (np.bincount(nearest.ravel()) > 0).all() and np.abs(targets).max() > 1.25
    chosen = np.take_along_axis(logits, nearest[..., None], axis=-1)[..., 0]
    nats = np.log(np.exp(logits).sum(axis=-1)) - chosen  # (..., A)
    discrete, binned = Actions("discrete", 5, 2), Actions("binned", 2, 5)
    predicted = np.float32(logits.reshape(50, binned.predicted_size))
    found = binned.errors(predicted, np.float32(targets))
    np.testing.assert_allclose(found, nats.sum(axis=-1), 1e-5)
    first = np.float32(logits[:, 0]), np.eye(5, dtype=np.float32)[nearest[:, 0]]
    np.testing.assert_allclose(discrete.errors(*first), nats[:, 0], 1e-5)
    assert discrete.bounded(predicted) is predicted
    bounded = Actions("continuous", 2, 2).bounded(predicted)
    np.testing.assert_allclose(bounded, np.tanh(predicted), atol=1e-6)


@pytest.mark.thorough
def test_without_positions_a_layer_reads_a_set(discrete):
    """The last step does not know in which order the others came."""
    one_layer = ONE_TOKEN | {"model__num_layers": 1}
    run, last = one_device(**one_layer), REAL - 1
    order = np.random.default_rng(5).permutation(last)
    shuffled = jax.tree.map(np.copy, discrete)
    for name in ("observations", "actions", "rewards", "timesteps"):
        getattr(shuffled, name)[:, :last] = getattr(discrete, name)[:, order]
    before, after = (run.actions(batch)[:, last] for batch in (discrete, shuffled))
    np.testing.assert_allclose(after, before, atol=1e-5)
    ordered = one_device(**one_layer | {"agent__reads_positions": True})
    before, after = (ordered.actions(batch)[:, last] for batch in (discrete, shuffled))
    assert np.abs(after - before).max() > 1e-3


@pytest.mark.thorough
def test_losses_by_rank_are_those_of_the_predictions(batch, rng):
    """And so they add up; padding, with its garbage, counts for nothing."""
    errors = np.square(one_device().actions(batch) - batch.actions).mean(axis=-1)
    losses, before = one_device().losses_and_gradients(batch)
    weighed = (errors * batch.loss_weights)[:, :REAL].reshape(2, 2, EPISODE_STEPS)
    np.testing.assert_allclose(losses, weighed.sum(axis=(0, 2)), rtol=1e-5)
    noise = rng.normal(size=batch.actions.shape)
    actions = np.array(batch.actions)
    actions[:, REAL:] = noise[:, REAL:]
    spoilt, grads = one_device().losses_and_gradients(batch._replace(actions=actions))
    np.testing.assert_allclose(spoilt, losses, rtol=1e-6)
    assert_same(grads, before, 1e-6)


VISIBLE = "returns_to_go", "observations"
"""What a step's own prediction may attend to."""


@pytest.mark.parametrize("field", [*VISIBLE, "actions", "rewards", "completions"])
@pytest.mark.parametrize("place", [3, 9])
def test_a_change_shows_from_where_it_is_visible_on(batch, field, place):
    before = one_device().actions(batch)
    values = np.array(getattr(batch, field))
    values[0, place] += 0.5
    after = one_device().actions(batch._replace(**{field: values}))
    changed = np.abs(after - before).max(axis=-1) > 1e-5
    first = place if field in VISIBLE else place + 1
    assert not changed[1].any() and changed[0, first:REAL].all()
    np.testing.assert_array_equal(after[0, :first], before[0, :first])


def test_a_window_of_one_token_sees_the_present_alone(batch):
    run, whole = Run(MeshShape(ring=2), "striped", **CLONER), one_device(**CLONER)
    found, want = (one.losses_and_gradients(batch) for one in (run, whole))
    assert_same(found[0], want[0], 1e-5)
    for name in ("return", "action", "reward"):
        assert not jax.tree.leaves(found[1][f"{name}_embedding"])[0].any()
    for name in ("observation_embedding", "timestep_embedding", "action_head"):
        assert_same(found[1][name], want[1][name], 1e-5)
    before = whole.actions(batch)
    unseen = {name: getattr(batch, name) + 1 for name in ("returns_to_go", "rewards")}
    observations = np.array(batch.observations)
    observations[0, 3] += 1
    after = whole.actions(batch._replace(observations=observations, **unseen))
    changed = (after != before).any(axis=-1)
    assert changed.sum() == 1 and changed[0, 3]
