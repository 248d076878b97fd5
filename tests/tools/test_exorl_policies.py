import numpy as np
import pytest

from tools.lib.exorl.policies import GAINS, Linear, Noise, SwingUp


def test_linear_policies_standardise_what_they_see():
    rng = np.random.default_rng(0)
    mean, std = rng.normal(size=4), rng.uniform(0.5, 2, 4)
    family = Linear(mean, std, action_size=2)
    assert family.start.shape == (10,) and not family.start.any()
    parameters = rng.normal(size=10)
    matrix = parameters.reshape(2, 5)
    observation = rng.normal(size=4)
    standard = (observation - mean) / std
    expected = np.tanh(matrix[:, :4] @ standard + matrix[:, 4])
    np.testing.assert_allclose(family.policy(parameters)(observation), expected)


def test_cart_pole_law_holds_the_pole_and_swings_it_up():
    act = SwingUp().policy(np.ones(len(GAINS)))
    # Position, cosine and sine of the angle, speed, turn.
    leaning = np.array([0, np.cos(0.1), np.sin(0.1), 0, 0])
    assert act(leaning) == pytest.approx(np.tanh(10 * np.sin(0.1)))
    assert act(leaning * [1, 1, -1, 1, 1]) < 0
    # Hanging and turning, too slow to come up: pushed against turn and cosine.
    hanging = np.array([0, -1.0, 0, 0, 1.0])
    assert act(hanging) > 0 > act(hanging * [1, 1, 1, 1, -1])
    assert act(hanging).shape == (1,)


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0])
def test_noise_has_its_colour_and_scale(exponent):
    rng = np.random.default_rng(0)
    noise = Noise(exponent, 0.3).draw(rng, 4096, 8)
    assert noise.shape == (4096, 8)
    np.testing.assert_allclose(noise.std(axis=0), 0.3)
    np.testing.assert_allclose(noise.mean(axis=0), 0, atol=1e-12)
    power = (np.abs(np.fft.rfft(noise, axis=0)) ** 2).mean(axis=1)[1:]
    frequency = np.arange(1, len(power) + 1)
    slope = np.polyfit(np.log(frequency), np.log(power), 1, w=np.sqrt(frequency))[0]
    assert slope == pytest.approx(-exponent, abs=0.1)
