import dataclasses

import numpy as np
import pytest

from data.agents.environments import Environment, tasks
from data.agents.relabel import exact_rewards, exorl_rewards, observation_error
from tests.episodes import rolled_out

TASKS = [
    (domain, task)
    for domain in ("cartpole", "cheetah", "jaco", "walker")
    for task in tasks(domain)
]


def roll(environment, tmp_path, seed=0):
    return rolled_out(tmp_path / "episode_0_20.npz", environment, 20, seed)


@pytest.mark.parametrize(("domain", "task"), TASKS)
def test_relabelled_rewards_are_those_of_the_environment(tmp_path, domain, task):
    environment = Environment(domain, task)
    episode = roll(environment, tmp_path)
    environment.reset(5)
    rewards = exact_rewards(environment, episode)
    assert np.abs(rewards - episode.reward[1:, 0]).max() < 1e-6
    if domain != "cartpole":
        published = exorl_rewards(environment, episode)
        assert np.abs(published - episode.reward[1:, 0]).max() < 1e-6


def test_exorls_rewards_leave_out_the_control_of_a_cart_pole(tmp_path):
    environment = Environment("cartpole", "balance")
    episode = roll(environment, tmp_path)
    exact = exact_rewards(environment, episode)
    published = exorl_rewards(environment, episode)
    # dm_control: reward falls with the square of the control, by a fifth at 1.
    control = episode.action[1:, 0].astype(np.float64)
    np.testing.assert_allclose(exact, published * (1 - control**2 / 5), rtol=1e-6)
    assert (published / exact).max() > 1.15


@pytest.mark.parametrize("domain", ["cartpole", "cheetah", "jaco", "walker"])
def test_observations_are_those_of_physics(tmp_path, domain):
    environment = Environment(domain, tasks(domain)[0])
    episode = roll(environment, tmp_path)
    assert observation_error(environment, episode) < 1e-6
    # All are compared but the Jaco arm's six torques.
    assert (~environment.recomputable).sum() == (6 if domain == "jaco" else 0)
    physics = episode.physics + 0.01
    other = dataclasses.replace(episode, physics=physics)
    assert observation_error(environment, other) > 1e-3
