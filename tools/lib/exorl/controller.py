"""A controller of the cart-pole that knows its physics: from hanging to held upright.

The pole's energy is brought to that of standing (Åström and Furuta, 2000), by pushing
the cart so that it moves as asked for. Near there takes over the linear-quadratic
regulator of the linearised cart-pole, for actions that are held.
"""

from dataclasses import dataclass

import numpy as np
from scipy.linalg import expm, solve_discrete_are

from data.agents.hidden_physics import CART_MASS, POLE_LENGTH, POLE_MASS, HiddenPhysics
from tools.lib.exorl.rollouts import Policy

# Of dm_control's model: m/s², the pole's radius in metres, seconds.
GRAVITY, RADIUS, TIMESTEP = 9.81, 0.045, 0.01
# What the regulator weighs: position, angle, speed and spin; and the force.
WEIGHTS, FORCE_WEIGHT = np.array([1.4, 4.0, 0.35, 0.1]), 0.01
# Acceleration of the cart that the swing asks for: at most, in m/s² for each radian a
# second of the pole's own frequency; and back, for each metre and m/s from the middle.
SWING, SPRING, DAMPING = 2.8, 1.5, 1.85
# And how many times what the motor can do: beyond, a weak one never brings it back.
REACH = 2.0
# How soon it asks for the most, as energy grows that is missing or too much.
SHARPNESS = 17.0
# Cosine of the angle from which the regulator may take over; and how many times what
# the motor can do it may ask for: beyond, it would not catch the pole.
UPRIGHT, CATCH = 0.55, 8.0


def controller(world: HiddenPhysics, action_repeat: int) -> Policy:
    """Returns the policy that knows the world, for actions that are held."""
    body = _Body.of(world)
    gains = body.regulator(action_repeat)

    def act(observation: np.ndarray) -> np.ndarray:
        position, cosine, sine, speed, spin = observation.tolist()
        angle = np.arctan2(sine, cosine)
        force = -gains @ (position, angle, speed, spin)
        if cosine < UPRIGHT or abs(force) > CATCH * body.force:
            force = body.swing(position, cosine, sine, speed, spin)
        return np.array([force / world.force])

    return act


@dataclass(frozen=True)
class _Body:
    """A cart-pole's moments: in kg, kg m and kg m².

    mass: of cart and pole. first, second: of the pole, about its hinge.
    """

    force: float
    mass: float
    first: float
    second: float

    @classmethod
    def of(cls, world: HiddenPhysics) -> "_Body":
        length = world.pole_length * POLE_LENGTH
        pole = world.pole_mass * POLE_MASS
        # A capsule: a cylinder between two half balls, with this share of the mass.
        ball = 4 * RADIUS / (4 * RADIUS + 3 * length)
        square = (1 - ball) * (3 * RADIUS**2 + length**2) / 12
        square += ball * (2 * RADIUS**2 / 5 + length**2 / 4 + 3 * RADIUS * length / 8)
        return cls(
            force=abs(world.force),
            mass=world.cart_mass * CART_MASS + pole,
            first=pole * length / 2,
            second=pole * (square + length**2 / 4),
        )

    def regulator(self, action_repeat: int) -> np.ndarray:
        """Returns newtons for each of position, angle, speed and spin, (4,)."""
        inertia = np.array([[self.mass, self.first], [self.first, self.second]])
        pull = np.linalg.solve(inertia, [[0, 1], [self.first * GRAVITY, 0]])
        # Of the state and the force, which stays as it is: (5, 5).
        flow = np.zeros((5, 5))
        flow[:2, 2:4] = np.eye(2)
        flow[2:4, [1, 4]] = pull
        step = expm(flow * TIMESTEP * action_repeat)
        a, b = step[:4, :4], step[:4, 4:]
        cost = solve_discrete_are(a, b, np.diag(WEIGHTS), [[FORCE_WEIGHT]])
        return np.linalg.solve(b.T @ cost @ b + FORCE_WEIGHT, b.T @ cost @ a)[0]

    def swing(
        self, position: float, cosine: float, sine: float, speed: float, spin: float
    ) -> float:
        """Returns the newtons that bring the pole's energy to that of standing."""
        weight = self.first * GRAVITY
        rate = np.sqrt(weight / self.second)
        # As shares of that of standing over that of lying level.
        missing = 1 - cosine - (spin / rate) ** 2 / 2
        most = min(SWING * rate, REACH * self.force / self.mass)
        push = -most * np.tanh(SHARPNESS * missing * spin / rate * cosine)
        push -= SPRING * position + DAMPING * speed
        # What the pole's turning does to the cart is taken away.
        turn = (weight * sine - self.first * cosine * push) / self.second
        return self.mass * push + self.first * (cosine * turn - sine * spin**2)
