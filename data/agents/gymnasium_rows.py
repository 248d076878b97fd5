"""Environments of gymnasium, one a row, with flat observations and actions of agents.

gymnasium itself is imported where rows are made, and by nobody who makes none.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np


def flat(observations: Any) -> np.ndarray:
    """Returns observations, arrays or dictionaries of them, as float32 (rows, size)."""
    if isinstance(observations, dict):
        parts = [flat(observations[name]) for name in sorted(observations)]
        return np.concatenate(parts, axis=-1)
    return np.asarray(observations, np.float32).reshape(len(observations), -1)


def _discrete(space: Any) -> bool:
    """Whether actions of the space are one number of several, and not of a Box."""
    if hasattr(space, "n") == hasattr(space, "low"):
        raise ValueError(f"actions of {space} are neither of a Box nor of a Discrete")
    return hasattr(space, "n")


def to_agent(actions: np.ndarray, space: Any) -> np.ndarray:
    """Returns a space's actions (rows, …) in [-1, 1], or one-hot: float32 (rows, A)."""
    if _discrete(space):
        return np.eye(space.n, dtype=np.float32)[actions - space.start]
    share = (actions - space.low) / (space.high - space.low)
    return flat(2 * share - 1)


def of_agent(actions: np.ndarray, space: Any) -> np.ndarray:
    """Returns the space's actions (rows, …) of those that `to_agent` makes of them."""
    if _discrete(space):
        return actions.argmax(axis=-1) + space.start
    share = (actions.reshape(-1, *space.shape) + 1) / 2
    return (space.low + share * (space.high - space.low)).astype(space.dtype)


@dataclass
class GymnasiumRows:
    """A `gymnasium.vector.VectorEnv` as agents see it."""

    environments: Any

    @classmethod
    def of(cls, description: str, rows: int) -> "GymnasiumRows":
        """Makes rows of an environment; description: its `EnvSpec` as JSON.

        Raises:
          ImportError: gymnasium, or what the environment is made of, is missing.
        """
        import gymnasium
        from gymnasium.envs.registration import EnvSpec

        spec = EnvSpec.from_json(description)
        return cls(gymnasium.make_vec(spec, rows, vectorization_mode="sync"))

    def reset(self, *, seed: list[int]) -> tuple[np.ndarray, dict[str, Any]]:
        observations, notes = self.environments.reset(seed=seed)
        return flat(observations), notes

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        space = self.environments.single_action_space
        observations, *rest = self.environments.step(of_agent(actions, space))
        return flat(observations), *rest
