import json

import numpy as np
import pytest

from data.environments import Environment
from data.hidden_physics import CART_MASS, POLE_LENGTH, POLE_MASS, RANGES, HiddenPhysics

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


@pytest.mark.parametrize("hidden", [{}, {"cart_mass": 2.0}, {"pole_mass": 2.0}])
@pytest.mark.parametrize("length", [0.6, 1.5])
def test_force_is_the_change_of_momentum(hidden, length):
    environment = world(pole_length=length, strength=0.7, **hidden)
    pole = hidden.get("pole_mass", 1) * POLE_MASS
    cart = hidden.get("cart_mass", 1) * CART_MASS
    angle = 2.0
    state = np.array([0.0, angle, 0.0, 0.0])
    # The difference that the force makes to the fall of the pole.
    found = accelerations(environment, 0.1, state) - accelerations(
        environment, 0, state
    )
    lever = pole * length * POLE_LENGTH / 2 * np.cos(angle)
    force = (cart + pole) * found[0] + lever * found[1]
    assert force == pytest.approx(0.1 * 0.7 * 10, rel=2e-3)


def period(environment):
    """Of small swings of the hanging pole, in seconds, from ten of them."""
    state, angles = HANGING + [0, 0.05, 0, 0], []
    for _ in range(3000):
        angles.append(state[1] - np.pi)
        state = environment.next_physics(state, np.zeros(1))
    ups = np.flatnonzero((np.array(angles[:-1]) < 0) & (np.array(angles[1:]) >= 0))
    return (ups[10] - ups[0]) * TIMESTEP / 10


def test_longer_poles_swing_slower():
    found = {length: period(world(pole_length=length)) for length in (0.6, 1.0, 1.5)}
    for length, seconds in found.items():
        # Of a rod on a cart that gives way, turning about its end.
        rate = 6 * (CART_MASS + POLE_MASS) / (4 * CART_MASS + POLE_MASS)
        expected = 2 * np.pi * np.sqrt(length / rate / GRAVITY)
        # Its round ends, of 45 mm, make a short pole slower than a rod.
        assert seconds == pytest.approx(expected, rel=0.035), length
    assert found[0.6] < 0.85 * found[1.0] and found[1.0] < 0.85 * found[1.5]


def test_observations_do_not_say_what_the_world_is():
    hidden = HiddenPhysics(-1, 2.0, 0.5, 2.0, 1.5)
    one, other = Environment("cartpole", "swingup", hidden), world()
    np.testing.assert_array_equal(one.reset(5), other.reset(5))
    state = np.array([0.3, 1.0, -0.2, 0.4])
    rewards = []
    for environment in (one, other):
        environment.set_physics(state)
        environment.set_control(np.array([0.5]))
        rewards.append(environment.reward())
        expected = [0.3, np.cos(1.0), np.sin(1.0), -0.2, 0.4]
        np.testing.assert_allclose(environment.observation(), expected, rtol=1e-6)
    assert rewards[0] == rewards[1]


def test_drawn_worlds_fill_the_ranges():
    rng = np.random.default_rng(0)
    drawn = [HiddenPhysics.draw(rng) for _ in range(2000)]
    assert np.mean([one.direction for one in drawn]) == pytest.approx(0, abs=0.05)
    for name, (low, high) in RANGES.items():
        values = np.array([getattr(one, name) for one in drawn])
        assert low <= values.min() < 1.02 * low and high / 1.02 < values.max() <= high
        middle = np.sqrt(low * high)
        assert np.median(values) == pytest.approx(middle, rel=0.05)
    assert HiddenPhysics.draw(np.random.default_rng(0)) == drawn[0]


def test_description_goes_through_json():
    one = HiddenPhysics.draw(np.random.default_rng(4))
    assert HiddenPhysics.of(json.loads(json.dumps(one.describe()))) == one


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
