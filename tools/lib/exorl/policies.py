"""Policies that gather data for in-context RL, and the noise that they act with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

# From an observation to an action, before it is cut to [-1, 1].
Policy = Callable[[np.ndarray], np.ndarray]

# The cart-pole law's gains for parameters of 1: four hold the pole, by position, speed,
# sine of the angle and spin; then the swing's: energy, its level, position, speed.
GAINS = np.array([1.0, 1.5, 10.0, 2.0, 2.0, 0.3, 1.0, 1.0])
# Cosine of the angle from which the pole is held.
UPRIGHT = 0.8
# Root of 3 g / 2 l for the pole of 1 m: spin, in radians a second, by which energy is
# measured so that falling from level is worth 1.
SWING_RATE = 3.84


class PolicyFamily(Protocol):
    """Interface of a new kind of policy.

    start: float (parameters,), where a search begins.
    spread, rate: how far it looks around, and how far it goes in a step.
    """

    start: np.ndarray
    spread: float
    rate: float

    def policy(self, parameters: np.ndarray) -> Policy:
        """Returns the policy of parameters (parameters,)."""


@dataclass(frozen=True, eq=False)
class Linear:
    """Linear policies: tanh of a matrix times standardised observations.

    mean, std: float (observation size,).
    """

    mean: np.ndarray
    std: np.ndarray
    action_size: int
    spread: float = 0.15
    rate: float = 0.3

    @property
    def start(self) -> np.ndarray:
        return np.zeros(self.action_size * (len(self.mean) + 1))

    def policy(self, parameters: np.ndarray) -> Policy:
        matrix = parameters.reshape(self.action_size, -1)
        weights = matrix[:, :-1] / self.std
        bias = matrix[:, -1] - weights @ self.mean
        return lambda observation: np.tanh(weights @ observation + bias)


@dataclass(frozen=True, eq=False)
class SwingUp:
    """A law for the cart-pole: energy until the pole is up, then a linear controller.

    Its parameters are the gains, as shares of `GAINS`.
    """

    spread: float = 0.7
    rate: float = 0.4

    @property
    def start(self) -> np.ndarray:
        return np.full(len(GAINS), 0.5)

    def policy(self, parameters: np.ndarray) -> Policy:
        hold, (pump, level, near, slow) = np.split(parameters * GAINS, [4])

        def act(observation: np.ndarray) -> np.ndarray:
            position, cosine, sine, speed, spin = observation
            if cosine > UPRIGHT:
                push = hold @ (position, speed, sine, spin)
            else:
                energy = (spin / SWING_RATE) ** 2 / 2 + cosine - 1 - level
                push = pump * energy * spin * cosine - near * position - slow * speed
            return np.tanh(push)[None]

        return act


@dataclass(frozen=True)
class Noise:
    """Noise whose power falls with frequency: white (0), pink (1) or red (2).

    scale: its standard deviation.
    """

    exponent: float
    scale: float

    def draw(self, rng: np.random.Generator, steps: int, size: int) -> np.ndarray:
        """Draws noise for every step, each column of mean 0: float (steps, size)."""
        frequency = np.fft.rfftfreq(steps)
        frequency[0] = 1.0
        parts = rng.normal(size=(2, size, len(frequency)))
        spectrum = (parts[0] + 1j * parts[1]) * frequency ** (-self.exponent / 2)
        spectrum[:, 0] = 0  # the mean
        noise = np.fft.irfft(spectrum, steps).T
        return self.scale * noise / noise.std(axis=0)
