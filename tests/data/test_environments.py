"""dm_control's tasks, and what is computed from physics."""

import dataclasses
import importlib.metadata
import subprocess
import sys

import numpy as np
import pytest

from data.agents.environments import FAMILIES, Environment, check_simulator, tasks
from data.agents.exorl import computed_rewards, observation_error
from tests.small.episodes import rolled_out

TASKS = [
    (domain, task)
    for domain in ("cartpole", "cheetah", "jaco", "point_mass", "walker")
    for task in tasks(domain)
]


@pytest.mark.parametrize(("domain", "task"), TASKS)
def test_rewards_and_observations_are_those_of_the_environment(tmp_path, domain, task):
    family, path = FAMILIES.get((domain, task)), tmp_path / "episode_0_20.npz"
    targets = family and np.array([family.largest, np.zeros(len(family.largest))])
    environment = Environment(domain, task, targets)
    episode = rolled_out(path, environment, 20)
    given = episode.reward[1:, 0].astype(np.float64)
    # A seed makes an episode, whatever came before.
    other, again = (rolled_out(path, environment, 20, seed) for seed in (4, 0))
    np.testing.assert_array_equal(again.observation, episode.observation)
    assert (other.observation[0] != episode.observation[0]).any()
    environment.reset(5)
    exact, *others = computed_rewards(environment, episode)
    assert np.abs(exact - given).max() < 1e-6 and len(others) == (family is not None)
    assert observation_error(environment, episode) < 1e-6
    # All are compared but the Jaco arm's six torques.
    assert (~environment.recomputable).sum() == (6 if domain == "jaco" else 0)
    moved = dataclasses.replace(episode, physics=episode.physics + 0.01)
    assert observation_error(environment, moved) > 1e-3


def test_episodes_of_the_arm_end_with_their_time():
    environment = Environment("jaco", "reach_top_left")
    environment.reset(0)
    ends = [environment.step(np.zeros(9)).last for _ in range(250)]
    assert ends == [False] * 249 + [True]


def test_targets_are_of_families_alone():
    for task, targets in ("goals", None), ("easy", np.zeros((1, 2))):
        with pytest.raises(ValueError, match=f"{task}.* of point_mass: .* of a family"):
            Environment("point_mass", task, targets)


def test_rewards_of_a_family_fall_with_the_distance_from_its_target():
    goals = np.array([[0.1, 0.0], [0.1, 0.065], [-0.2, 0.2]])
    environment = Environment("point_mass", "goals", goals)
    environment.set_physics(np.array([0.1, 0, 0, 0]))
    # Within 0.03 of the first; beyond that half of 0.07 from the second.
    np.testing.assert_allclose(environment.rewards(), [1, 0.5, 0], atol=1e-6)


def test_a_simulator_that_is_missing_or_of_another_version_is_refused(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ImportError, match="need dm_control: .*requirements/rl.txt"):
        Environment("walker", "walk")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.0.0")
    with pytest.raises(ImportError, match="mujoco 4.0.0 .*requirements/rl.txt"):
        check_simulator()


@pytest.mark.thorough
def test_only_environments_load_the_simulator():
    code = (
        "import sys, data.agents.exorl, data.agents.chains, tools.make_exorl; "
        "assert 'dm_control' not in sys.modules; "
        "from data.agents.environments import Environment; Environment('jaco', "
        "'reach_top_left').reset(0); Environment('cheetah', 'run').reset(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_episode_is_bit_identical_to_dm_controls(tmp_path):
    from dm_control import suite

    path = tmp_path / "episode_0_50.npz"
    episode = rolled_out(path, Environment("cartpole", "swingup"), 50, seed=3)
    theirs = suite.load("cartpole", "swingup", task_kwargs={"random": 3})
    first = theirs.reset().observation
    flat = [*first["position"], *first["velocity"]]
    np.testing.assert_array_equal(episode.observation[0], np.float32(flat))
    rewards = [theirs.step(action).reward for action in episode.action[1:]]
    np.testing.assert_array_equal(episode.reward[1:, 0], np.float32(rewards))
