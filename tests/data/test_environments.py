import importlib.metadata
import subprocess
import sys

import numpy as np
import pytest

from data.agents.environments import Environment, check_simulator, tasks
from data.agents.episodes import DOMAINS

# Every domain once; tests/data/test_relabel.py has every task.
TASK_OF = {"cartpole": "swingup", "cheetah": "run", "walker": "walk"}
TASK_OF["jaco"] = "reach_top_left"


@pytest.fixture(scope="module", params=TASK_OF)
def environment(request):
    return Environment(request.param, TASK_OF[request.param])


def test_a_seed_makes_an_episode_whatever_came_before(environment):
    rng = np.random.default_rng(1)
    actions = rng.uniform(-1, 1, (5, DOMAINS[environment.domain].action))

    def episode(seed):
        first = environment.reset(seed)
        return [first, *(environment.step(action).observation for action in actions)]

    one, other, again = episode(3), episode(4), episode(3)
    np.testing.assert_array_equal(one, again)
    assert (one[0] != other[0]).any()


def test_impossible_physics_are_refused():
    environment = Environment("walker", "walk")
    state = np.full(DOMAINS["walker"].physics, 1e30)
    with pytest.raises(ValueError, match="simulator refuses the state"):
        environment.set_physics(state)
    assert np.isfinite(environment.reset(0)).all()


@pytest.mark.parametrize(("domain", "steps"), [("cartpole", 1000), ("jaco", 250)])
def test_episodes_end_with_their_time(domain, steps):
    environment = Environment(domain, TASK_OF[domain])
    environment.reset(0)
    idle = np.zeros(DOMAINS[domain].action)
    ends = [environment.step(idle).last for _ in range(steps)]
    assert ends == [False] * (steps - 1) + [True]


def test_unknown_tasks_are_refused():
    with pytest.raises(ValueError, match="task='fly' of walker .* stand, walk, run"):
        Environment("walker", "fly")
    with pytest.raises(ValueError, match='no environment for domain=.*"stored"'):
        Environment("quadruped", "walk")
    with pytest.raises(ValueError, match="domain='hopper'"):
        tasks("hopper")
    assert tasks("point_mass_maze") == ()


def test_a_simulator_that_is_missing_or_of_another_version_is_refused(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ImportError, match="need dm_control: .*requirements-rl.txt"):
        Environment("walker", "walk")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.0.0")
    with pytest.raises(ImportError, match="mujoco 4.0.0 .*requirements-rl.txt"):
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
