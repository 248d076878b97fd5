import numpy as np
import pytest

from data.agents.environments import Environment
from data.agents.hidden_physics import HiddenPhysics

TIMESTEP, GRAVITY = 0.01, 9.81
HANGING = np.array([0.0, np.pi, 0.0, 0.0])


def world(**hidden):
    return Environment("cartpole", "swingup", HiddenPhysics(**hidden))


def accelerations(environment, action, state=HANGING):
    """Of cart and pole, from a state at rest."""
    return environment.next_physics(state, np.array([action]))[2:] / TIMESTEP


def episode(environment, steps=50):
    actions = np.random.default_rng(1).uniform(-1, 1, (steps, 1))
    first = environment.reset(3)
    taken = [environment.step(action) for action in actions]
    seen = [first, *(step.observation for step in taken)]
    return np.array(seen), [step.reward for step in taken]


def test_no_hidden_physics_and_those_of_dm_control_are_bit_identical():
    from dm_control import suite

    plain = Environment("cartpole", "swingup")
    assert plain.hidden is None
    for one, other in zip(episode(plain), episode(world()), strict=True):
        np.testing.assert_array_equal(one, other)
    theirs = suite.load("cartpole", "swingup", task_kwargs={"random": 3})
    first = theirs.reset().observation
    observations, rewards = episode(plain, 1)
    flat = [*first["position"], *first["velocity"]]
    np.testing.assert_array_equal(observations[0], np.float32(flat))
    action = np.random.default_rng(1).uniform(-1, 1, (1, 1))[0]
    assert theirs.step(action).reward == rewards[0]


def test_direction_turns_the_acceleration_and_strength_multiplies_it():
    usual = accelerations(world(), 0.01)
    assert usual[0] > 0.05
    np.testing.assert_allclose(accelerations(world(direction=-1), 0.01), -usual)
    twice = accelerations(world(strength=2.0), 0.01)
    np.testing.assert_allclose(twice, 2 * usual, rtol=1e-6)
    both = accelerations(world(direction=-1, strength=0.5), 0.01)
    np.testing.assert_allclose(both, -usual / 2, rtol=1e-6)


@pytest.mark.parametrize(
    ("described", "match"),
    [
        ({"direction": 0}, "direction=0 must be 1 or -1"),
        ({"strength": 0.0}, "strength=0.0 must be a number above 0"),
        ({"pole_length": "1"}, "pole_length='1' must be a number above 0"),
        ({"cart_mass": float("nan")}, "cart_mass=nan must be"),
        ({"colour": 1}, "'colour'.*: give direction, strength, cart_mass, pole_mass"),
        (None, "None is no hidden physics"),
    ],
)
def test_physics_that_cannot_be_are_refused(described, match):
    with pytest.raises(ValueError, match=match):
        HiddenPhysics.of(described)


def test_other_domains_have_no_hidden_physics():
    with pytest.raises(ValueError, match="domain='walker' has no hidden .*cartpole"):
        Environment("walker", "walk", HiddenPhysics())
