import numpy as np
import pytest

from data.environments import Environment
from data.hidden_physics import HiddenPhysics
from tools.lib.exorl.controller import _Body, controller
from tools.lib.exorl.rollouts import Attempt, roll_out

WORLDS = [
    HiddenPhysics(),
    # Weak, heavy and long; strong, light and short.
    HiddenPhysics(-1, 0.7, 1.6, 1.6, 1.4),
    HiddenPhysics(1, 2.0, 0.5, 0.5, 0.6),
    *(HiddenPhysics.draw(np.random.default_rng([9, n])) for n in range(3)),
]


def returned(world, act, action_repeat=5):
    environment = Environment("cartpole", "swingup", world)
    done = roll_out(environment, act, Attempt("swingup", None, None, 3), action_repeat)
    return float(done.reward.sum())


@pytest.mark.parametrize("world", WORLDS)
def test_a_controller_that_knows_its_world_swings_up(world):
    assert returned(world, controller(world, 5)) > 600


@pytest.mark.parametrize("action_repeat", [1, 10])
def test_actions_may_be_held_for_any_time(action_repeat):
    act = controller(HiddenPhysics(), action_repeat)
    assert returned(None, act, action_repeat) > 800


def test_one_that_believes_in_the_other_direction_does_not():
    world, wrong = HiddenPhysics(), HiddenPhysics(direction=-1)
    assert returned(world, controller(wrong, 5)) < 200
    right = controller(world, 5)(np.array([0.1, -0.6, 0.8, 0.2, 1.0]))
    turned = controller(wrong, 5)(np.array([0.1, -0.6, 0.8, 0.2, 1.0]))
    assert right == -turned != 0


@pytest.mark.parametrize("world", WORLDS)
def test_moments_are_those_of_the_simulators_model(world):
    environment = Environment("cartpole", "swingup", world)
    model = environment._environment.physics.model
    body = _Body.of(world)
    height = model.body_ipos[2, 2]
    assert body.mass == pytest.approx(model.body_mass.sum())
    assert body.first == pytest.approx(model.body_mass[2] * height)
    about_hinge = model.body_inertia[2, 0] + model.body_mass[2] * height**2
    assert body.second == pytest.approx(about_hinge)


@pytest.mark.parametrize("world", WORLDS)
def test_regulator_brings_the_pole_upright_from_nearby(world):
    environment = Environment("cartpole", "swingup", world)
    act = controller(world, 5)
    environment.reset(0)
    environment.set_physics(np.array([0.1, 0.05, 0.0, 0.0]))
    observation = environment.observation()
    for _ in range(160):
        action = act(observation)
        assert observation[1] > 0.9
        for _ in range(5):
            observation = environment.step(action).observation
    np.testing.assert_allclose(observation, [0, 1, 0, 0, 0], atol=0.01)
