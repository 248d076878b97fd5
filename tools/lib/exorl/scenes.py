"""Where agents act: E rows of environments, as gymnasium's vector environments are.

Such a scene has two methods. `reset(seed=seeds)` begins an episode in every row and
returns observations (E, size) and notes. `step(actions)`, actions (E, A) in [-1, 1] or
one-hot, returns observations, rewards (E,), and whether the rows' episodes ended
(E,), because they were over or because their time was, and notes. A row whose episode
has ended may be stepped on; nothing that comes of it counts before the next reset.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from data.agents.dark_room import ROOMS, DarkRoom
from data.agents.environments import Environment
from data.agents.trajectory_file import TrajectoryFile

Step = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]


class Scene(Protocol):
    """What is used of `gymnasium.vector.VectorEnv`.

    limit: actions of an episode, unless it ends before; None if there is no limit.
    """

    @property
    def limit(self) -> int | None: ...

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

    @property
    def limit(self) -> int:
        return self.room.steps

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
    """Returns observations, arrays or dicts or tuples of them: float32 (rows, size)."""
    if isinstance(observations, dict):
        observations = tuple(observations[name] for name in sorted(observations))
    if isinstance(observations, tuple):
        return np.concatenate([flat(part) for part in observations], axis=-1)
    return np.asarray(observations, np.float32).reshape(len(observations), -1)


def _bounds(space: Any) -> tuple[Any, Any]:
    """Returns the least and the largest action of a Discrete or a bounded Box."""
    if hasattr(space, "n") and hasattr(space, "start"):
        return space.start, space.start + space.n - 1
    if hasattr(space, "low"):
        low = space.low * 1.0  # differences of small integers would wrap around
        high = space.high * 1.0
        if np.isfinite(high - low).all():
            return low, high
    raise ValueError(f"actions must be of a bounded Box or of a Discrete, got {space}")


def to_agent(actions: Any, space: Any) -> np.ndarray:
    """Returns a space's actions (rows, …) in [-1, 1], or one-hot: float32 (rows, A).

    Raises:
      ValueError: an action is not in the space, or that is of another kind.
    """
    low, high = _bounds(space)
    actions = np.asarray(actions)
    held = actions.astype(np.float32)  # 0.7 of float64 is above that of float32
    inside = (held >= np.float32(low)) & (held <= np.float32(high))
    inside = inside.reshape(len(actions), -1).all(axis=1)
    if not inside.all():
        step = int(np.argmin(inside))
        raise ValueError(
            f"actions must be in {space}, got {actions[step].tolist()} in step {step}: "
            "--clip-actions packs the nearest of a Box"
        )
    if hasattr(space, "n"):
        return np.eye(space.n, dtype=np.float32)[actions - low]
    share = (actions - low) / np.where(low == high, 1, high - low)
    return flat(2 * share - 1)


def of_agent(actions: np.ndarray, space: Any) -> np.ndarray:
    """Returns the space's actions (rows, …) of those that `to_agent` makes of them."""
    low, high = _bounds(space)
    if hasattr(space, "n"):
        return actions.argmax(axis=-1) + low
    share = (actions.reshape(-1, *space.shape) + 1) / 2
    actions = low + share * (high - low)
    if np.issubdtype(space.dtype, np.integer):
        actions = np.rint(actions)
    return actions.astype(space.dtype)


@dataclass
class GymnasiumRows:
    """A `gymnasium.vector.VectorEnv` as agents see it."""

    environments: Any
    limit: int | None

    @classmethod
    def of(
        cls, description: str, rows: int, trusted: Sequence[str] = ()
    ) -> "GymnasiumRows":
        """Makes rows of an environment; description: its `EnvSpec` as JSON.

        trusted: entry points, MODULE:NAME each, which may be called besides those of
          gymnasium's own environments and wrappers.

        Raises:
          ImportError: gymnasium, or what the environment is made of, is missing.
          ValueError: the description names other code, or makes no environment.
        """
        import gymnasium
        from gymnasium.envs.registration import EnvSpec

        registered = [spec.entry_point for spec in gymnasium.registry.values()]
        # Without those that it imports when they are asked for, which import others.
        wrappers = [x for x in vars(gymnasium.wrappers).values() if isinstance(x, type)]
        wrappers.remove(gymnasium.wrappers.RecordVideo)  # writes wherever it is told to
        own = [f"{wrapper.__module__}:{wrapper.__name__}" for wrapper in wrappers]
        try:
            spec = EnvSpec.from_json(description)
            for named in (spec, *spec.additional_wrappers):
                if named.entry_point not in (*registered, *own, *trusted):
                    raise ValueError(
                        "code of a recorded environment must be gymnasium's own, got "
                        f"{named.entry_point!r}: if you trust it, and only then, give "
                        f"--trust-entry-point {named.entry_point}"
                    )
            # Not by make_vec, which takes another entry point if the spec asks for it.
            make = functools.partial(gymnasium.make, spec)
            environments = gymnasium.vector.SyncVectorEnv([make] * rows)
        except (AttributeError, KeyError, TypeError, gymnasium.error.Error) as error:
            raise ValueError(f"the environment cannot be made: {error!r}") from error
        return cls(environments, spec.max_episode_steps)

    def reset(self, *, seed: list[int]) -> tuple[np.ndarray, dict[str, Any]]:
        observations, notes = self.environments.reset(seed=seed)
        return flat(observations), notes

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        space = self.environments.single_action_space
        observations, *rest = self.environments.step(of_agent(actions, space))
        return flat(observations), *rest


def scene(
    file: TrajectoryFile, worlds: np.ndarray, trusted: Sequence[str] = ()
) -> Scene:
    """Returns where agents act in the trajectories' task; worlds: int (E,), of rows.

    trusted: as of `GymnasiumRows.of`.

    Raises:
      ImportError: dm_control or gymnasium is missing.
      ValueError: as `GymnasiumRows.of`.
    """
    if description := file.index.get("environment"):
        return GymnasiumRows.of(description, len(worlds), trusted)
    task = file.index["domain"], file.index["task"]
    if task[0] == "dark_room":
        room = ROOMS[task[1]]
        return Rooms(room, room.goals[worlds])
    each = file.targets[worlds, None] if file.family else [None] * len(worlds)
    rows = [Environment(*task, targets) for targets in each]
    return Simulations(rows, file.action_repeat, int(file.lengths.max()))
