"""Where agents act: E rows of environments, as gymnasium's vector environments are.

Such a scene has two methods. `reset(seed=seeds)` begins an episode in every row and
returns observations (E, size) and notes. `step(actions)`, actions (E, A) in [-1, 1] or
one-hot, returns observations, rewards (E,), and whether the rows' episodes ended
(E,), because they were over or because their time was, and notes. A row whose episode
has ended may be stepped on; nothing that comes of it counts before the next reset.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from data.agents.dark_room import ROOMS, DarkRoom
from data.agents.environments import Environment
from data.agents.trajectory_file import TrajectoryFile

Step = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]


class Scene(Protocol):
    """What is used of `gymnasium.vector.VectorEnv`."""

    def reset(self, *, seed: list[int]) -> tuple[np.ndarray, dict[str, Any]]: ...

    def step(self, actions: np.ndarray, /) -> Step: ...


@dataclass
class Simulations:
    """Environments of dm_control, one a row.

    action_repeat: steps that an action is held for; their rewards add up.
    limit: actions of an episode, unless it ends before.
    """

    environments: Sequence[Environment]
    action_repeat: int
    limit: int

    def reset(self, *, seed: list[int]) -> tuple[np.ndarray, dict[str, Any]]:
        self._left = self.limit
        pairs = zip(self.environments, seed, strict=True)
        return np.stack([one.reset(seed) for one, seed in pairs]), {}

    def step(self, actions: np.ndarray) -> Step:
        pairs = zip(self.environments, actions, strict=True)
        steps = [one.step(action, self.action_repeat) for one, action in pairs]
        observations, rewards, ends = map(np.array, zip(*steps, strict=True))
        self._left -= 1
        return observations, rewards, np.zeros_like(ends), ends | (self._left <= 0), {}


@dataclass
class Rooms:
    """Dark Room, with a goal in each row (E, 2); all rows step at once."""

    room: DarkRoom
    goals: np.ndarray

    def reset(self, *, seed: list[int]) -> tuple[np.ndarray, dict[str, Any]]:
        self._places = np.broadcast_to(np.array(self.room.start), self.goals.shape)
        self._left = self.room.steps
        return self.room.observe(self._places), {}

    def step(self, actions: np.ndarray) -> Step:
        self._places = self.room.move(self._places, np.argmax(actions, axis=-1))
        self._left -= 1
        rewards = (self._places == self.goals).all(axis=-1)
        truncated = np.full_like(rewards, self._left <= 0)
        seen = self.room.observe(self._places)
        return seen, rewards.astype(float), np.zeros_like(rewards), truncated, {}


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


def scene(file: TrajectoryFile, worlds: np.ndarray) -> Scene:
    """Returns where agents act in the trajectories' task; worlds: int (E,), of rows.

    Raises:
      ImportError: dm_control or gymnasium is missing.
    """
    if description := file.index.get("environment"):
        return GymnasiumRows.of(description, len(worlds))
    task = file.index["domain"], file.index["task"]
    if task[0] == "dark_room":
        room = ROOMS[task[1]]
        return Rooms(room, room.goals[worlds])
    each = file.targets[worlds, None] if file.family else [None] * len(worlds)
    rows = [Environment(*task, targets) for targets in each]
    return Simulations(rows, file.action_repeat, int(file.lengths.max()))
