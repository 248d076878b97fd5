"""Agents at work: the cache, the record of what they did, and who sees what."""

import jax
import numpy as np
import pytest

from data.chains import STD_FLOOR
from tasks import exorl
from tests import small_agent
from tests.small_agent import ACTION_SIZE, EPISODE_STEPS, OBSERVATION_SIZE, ROWS, Run
from tools.lib.exorl.agents import Play, actor
from tools.lib.exorl.scenes import Outcome, Recording
from training.mesh import MeshShape

TARGET = 5.0


class Toy:
    """Rows whose observations follow from the actions; an episode's number seeds it."""

    def begin(self, number):
        self._rng = np.random.default_rng(number)
        self._observations = self._rng.normal(3, 2, (ROWS, OBSERVATION_SIZE))
        self._steps = 0
        return self._observations

    def step(self, actions):
        self._steps += 1
        self._observations = 0.5 * self._observations + actions.sum(axis=1)[:, None]
        rewards = self._rng.uniform(size=ROWS) + np.square(actions).mean(axis=1)
        last = self._steps == EPISODE_STEPS
        return Outcome(self._observations, actions, rewards, last)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return small_agent.make_trajectories(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def run():
    return Run(MeshShape(ring=4), attention="striped")


@pytest.fixture(scope="module")
def agent(run):
    return actor(run.config, run.partition, run.parameters, rows=ROWS, episodes=2)


def played(agent, file, forgetful=False, scenes=None):
    scenes = scenes or [(Toy(), 0), (Toy(), 1)]
    return Play(agent, file, TARGET).play(scenes, forgetful)


def whole_forward(steps, **overrides):
    """Actions that the model predicts for recorded steps, all at once."""
    one = Run(MeshShape(), attention="vanilla", **overrides)
    length = steps.positions.shape[1]
    size = exorl.batch_shape(one.config)[1]

    def pad(x):
        return np.pad(x, [(0, 0), (0, size - length)] + [(0, 0)] * (x.ndim - 2))

    positions = np.tile(np.arange(size, dtype=np.int32), (ROWS, 1))
    padded = jax.tree.map(pad, steps)._replace(positions=positions)
    return one.actions(padded)[:, :length]


def test_cached_actions_are_those_of_the_teacher_forced_forward(agent, file):
    steps = played(agent, file).steps
    want = whole_forward(steps)
    assert steps.actions.shape == (ROWS, 2 * EPISODE_STEPS, ACTION_SIZE)
    np.testing.assert_allclose(steps.actions, want, atol=1e-4)
    assert np.abs(want).max() > 0.3 and want.std() > 0.1


def test_an_empty_context_begins_anew_with_every_episode(agent, file):
    steps = played(agent, file, forgetful=True).steps
    short = {"agent__chain_length": 1, "data__context_tokens": 4 * EPISODE_STEPS}
    for episode in range(2):
        part = slice(episode * EPISODE_STEPS, (episode + 1) * EPISODE_STEPS)
        one = jax.tree.map(lambda x, part=part: x[:, part], steps)
        want = whole_forward(one, **short)
        np.testing.assert_allclose(one.actions, want, atol=1e-4)
    # The first episode is the same; the second one is not, for it has no first.
    own = played(agent, file).steps
    first = slice(0, EPISODE_STEPS)
    np.testing.assert_array_equal(own.actions[:, first], steps.actions[:, first])
    assert np.abs(own.actions - steps.actions)[:, EPISODE_STEPS:].max() > 1e-2


def test_the_record_is_a_chain(agent, file):
    outcome = played(agent, file)
    steps, rewards = outcome.steps, outcome.steps.rewards.reshape(ROWS, 2, -1)
    np.testing.assert_allclose(outcome.returns, rewards.sum(axis=-1), rtol=1e-5)
    had = np.cumsum(rewards, axis=-1) - rewards
    left = steps.returns_to_go.reshape(had.shape)
    np.testing.assert_allclose(left, TARGET - had, atol=1e-4)
    assert steps.timesteps[0].tolist() == 2 * list(range(EPISODE_STEPS))
    assert steps.ranks[0].tolist() == [0] * EPISODE_STEPS + [1] * EPISODE_STEPS
    reached = outcome.returns >= TARGET
    marks = steps.completions.reshape(had.shape)
    np.testing.assert_array_equal(marks[..., -1], reached)
    assert not marks[..., :-1].any()
    first = Toy().begin(0) - file.observation_mean
    standard = first / (file.observation_std + STD_FLOOR)
    np.testing.assert_allclose(steps.observations[:, 0], standard, rtol=1e-5)


def test_recorded_episodes_go_as_they_went_and_are_seen(agent, file):
    def with_context(number):
        recording = Recording(file, np.full((ROWS, 1), number))
        return played(agent, file, scenes=[(recording, 0), (Toy(), 1)])

    outcome = with_context(3)
    part = slice(file.offsets[3], file.offsets[4])
    recorded = file.steps[:][part, OBSERVATION_SIZE:-1]
    for actions in outcome.steps.actions[:, :EPISODE_STEPS]:
        np.testing.assert_array_equal(actions, recorded)
    assert outcome.returns[:, 0] == pytest.approx([file.returns[3]] * ROWS)
    other = with_context(4).steps.actions[:, EPISODE_STEPS:]
    own = outcome.steps.actions[:, EPISODE_STEPS:]
    assert np.abs(other - own).max() > 1e-3


def test_a_perceptron_acts_alike_in_every_context(file):
    run = Run(MeshShape(ring=2), attention="striped", agent__method="perceptron")
    parameters = small_agent.drawn(run.model, run.partition)
    agent = actor(run.config, run.partition, parameters, rows=ROWS, episodes=2)
    own, empty = played(agent, file), played(agent, file, forgetful=True)
    np.testing.assert_array_equal(own.returns, empty.returns)
    assert np.abs(own.steps.actions).max() <= 1


def test_episodes_of_different_lengths_are_no_recording(tmp_path):
    file = small_agent.make_trajectories(tmp_path)
    file.offsets[1] -= 1
    with pytest.raises(ValueError, match="different lengths"):
        Recording(file, np.array([[0], [1]])).begin(0)
