import numpy as np
import pytest

from data.agents.environments import Environment
from data.agents.hidden_physics import HiddenPhysics
from tools.lib.exorl.controller import _Body, controller
from tools.lib.exorl.rollouts import roll_out

WORLDS = [
    HiddenPhysics(),
    # Weak, heavy and long; strong, light and short.
    HiddenPhysics(-1, 0.7, 1.6, 1.6, 1.4),
    HiddenPhysics(1, 2.0, 0.5, 0.5, 0.6),
    *(HiddenPhysics.draw(np.random.default_rng([9, n])) for n in range(3)),
]


def returned(world, act, action_repeat=5):
    environment = Environment("cartpole", "swingup", world)
    done = roll_out(environment, act, None, 3, action_repeat)
    return float(done.reward.sum())


@pytest.mark.thorough
@pytest.mark.parametrize("world", WORLDS)
def test_a_controller_that_knows_its_world_swings_up(world):
    assert returned(world, controller(world, 5)) > 600


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
