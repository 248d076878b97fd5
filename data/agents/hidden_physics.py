"""Differences between cart-poles that no observation shows.

An agent finds them out by acting: which way the motor pushes, and how hard; the masses
of cart and pole, and the pole's length.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import numpy as np

from data.json_text import is_number

DOMAIN = "cartpole"
# Of dm_control's model: newtons at an action of 1, kilograms, and metres.
FORCE, CART_MASS, POLE_MASS, POLE_LENGTH = 10.0, 1.0, 0.1, 1.0
# From which shares of these are drawn, evenly in their logarithms.
RANGES = {
    "strength": (0.5, 2.0),
    "cart_mass": (0.5, 2.0),
    "pole_mass": (0.5, 2.0),
    "pole_length": (0.6, 1.5),
}


@dataclass(frozen=True)
class HiddenPhysics:
    """The hidden physics of a cart-pole, as shares of dm_control's; 1 is as there.

    direction: 1, or -1 where the motor pushes the other way. strength: of the motor.

    Raises:
      ValueError: a field is not what it has to be.
    """

    direction: int = 1
    strength: float = 1.0
    cart_mass: float = 1.0
    pole_mass: float = 1.0
    pole_length: float = 1.0

    def __post_init__(self):
        if self.direction not in (-1, 1):
            raise ValueError(f"{self.direction=} must be 1 or -1")
        for name in RANGES:
            value = getattr(self, name)
            if not is_number(value) or not value > 0:
                raise ValueError(
                    f"{name}={value!r} must be a number above 0; 1 is usual"
                )

    @classmethod
    def draw(cls, rng: np.random.Generator) -> "HiddenPhysics":
        """Draws a direction evenly, and the others from `RANGES`."""
        direction, ranges = int(rng.choice([-1, 1])), RANGES.values()
        return cls(direction, *(float(np.exp(rng.uniform(*np.log(r)))) for r in ranges))

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> "HiddenPhysics":
        """Returns physics from their fields; ValueError for other fields."""
        try:
            return cls(**described)
        except TypeError as error:
            raise ValueError(
                f"hidden physics must have direction, {', '.join(RANGES)}, got "
                f"{described!r} ({error})"
            ) from error

    @property
    def force(self) -> float:
        """Newtons on the cart at an action of 1; below 0 for the other direction."""
        return self.direction * self.strength * FORCE

    def model(self, xml: bytes) -> bytes:
        """Returns dm_control's model of the cart-pole with these physics put in.

        The simulator's compiler then derives what follows from them, as inertia.
        """
        root = ElementTree.fromstring(xml)
        pole = ".//default[@class='pole']/geom"
        length = f"0 0 0 0 0 {self.pole_length * POLE_LENGTH!r}"
        for path, name, value in (
            (".//motor", "gear", self.force),
            (".//geom[@name='cart']", "mass", self.cart_mass * CART_MASS),
            (pole, "mass", self.pole_mass * POLE_MASS),
            (pole, "fromto", length),
        ):
            [element] = root.findall(path)
            element.set(name, str(value))
        return ElementTree.tostring(root)
