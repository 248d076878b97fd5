import dataclasses

import numpy as np
import pytest

from data.agents.environments import Environment, tasks
from data.agents.relabel import computed_rewards, observation_error
from tests.episodes import rolled_out

TASKS = [
    (domain, task)
    for domain in ("cartpole", "cheetah", "jaco", "walker")
    for task in tasks(domain)
]


@pytest.mark.parametrize(("domain", "task"), TASKS)
def test_rewards_and_observations_are_those_of_the_environment(tmp_path, domain, task):
    environment = Environment(domain, task)
    episode = rolled_out(tmp_path / "episode_0_20.npz", environment, 20)
    given = episode.reward[1:, 0].astype(np.float64)
    environment.reset(5)
    exact = computed_rewards(environment, episode)
    assert np.abs(exact - given).max() < 1e-6
    published = computed_rewards(environment, episode, with_action=False)
    if task != "balance":
        assert domain == "cartpole" or np.abs(published - given).max() < 1e-6
    else:
        # dm_control: reward falls with the square of the control, by a fifth at 1.
        control = episode.action[1:, 0].astype(np.float64)
        np.testing.assert_allclose(exact, published * (1 - control**2 / 5), rtol=1e-6)
        assert (published / exact).max() > 1.15
    assert observation_error(environment, episode) < 1e-6
    # All are compared but the Jaco arm's six torques.
    assert (~environment.recomputable).sum() == (6 if domain == "jaco" else 0)
    other = dataclasses.replace(episode, physics=episode.physics + 0.01)
    assert observation_error(environment, other) > 1e-3
