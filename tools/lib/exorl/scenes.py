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

TRUST: dict[str, Any] = {
    "action": "append",
    "default": [],
    "metavar": "MODULE:NAME",
    "help": "code of the recorded environment that may run, beside gymnasium's own",
}
"""Argument of programs that make recorded environments; see `environment_spec`."""

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
    """Returns observations as float32 (rows, size).

    observations: arrays of numbers, or dictionaries or tuples of them.

    Raises:
      ValueError: they are others, as texts.
    """
    if isinstance(observations, dict):
        observations = tuple(observations[name] for name in sorted(observations))
    if isinstance(observations, tuple):
        return np.concatenate([flat(part) for part in observations], axis=-1)
    try:
        numbers = np.asarray(observations, np.float32)
    except (TypeError, ValueError) as error:
        raise ValueError(f"observations must be numbers, got {error}") from error
    return numbers.reshape(len(observations), -1)


def _is_discrete(space: Any) -> bool:
    """Whether actions of the space are one number of several, and not of a Box."""
    is_discrete = hasattr(space, "n") and hasattr(space, "start")
    if not is_discrete and not hasattr(space, "low"):
        raise ValueError(f"actions must be of a Box or of a Discrete, got {space}")
    return is_discrete


def _bounds(box: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the least numbers of a Box and how far the largest are above, as floats.

    Raises:
      ValueError: that is not finite.
    """
    low = box.low * 1.0  # differences of small integers would wrap around
    width = box.high * 1.0 - low
    if not np.isfinite(width).all():
        raise ValueError(
            f"a Box of actions must have finite bounds, got {box}: agents know them as "
            "-1 and 1; record the dataset with bounds"
        )
    return low, width


def to_agent(actions: Any, space: Any) -> np.ndarray:
    """Returns a space's actions (rows, …) in [-1, 1], or one-hot: float32 (rows, A).

    A number that can have one value is -1.

    Raises:
      ValueError: the space is neither a Box with finite bounds nor a Discrete, or an
        action is not in it.
    """
    is_discrete = _is_discrete(space)
    actions = np.asarray(actions)
    shape = () if is_discrete else space.shape
    dtype = np.dtype(np.int64 if is_discrete else space.dtype)
    if actions.shape[1:] != shape or not np.can_cast(actions.dtype, dtype, "same_kind"):
        raise ValueError(
            f"actions must be {dtype} of shape {shape}, as {space} has them, got "
            f"{actions.dtype} of shape {actions.shape[1:]}"
        )
    if is_discrete:
        inside = (actions >= space.start) & (actions < space.start + space.n)
    else:
        low, width = _bounds(space)
        held = actions.astype(dtype)  # 0.7 of float64 is above that of float32
        inside = (held >= space.low) & (held <= space.high)
    inside = inside.reshape(len(actions), -1).all(axis=1)
    if not inside.all():
        step = int(np.argmin(inside))
        raise ValueError(
            f"actions must be in {space}, got {actions[step].tolist()} in step {step}"
        )
    if is_discrete:
        return np.eye(space.n, dtype=np.float32)[actions - space.start]
    share = (actions - low) / np.where(width == 0, 1, width)
    return flat(2 * share - 1)


def of_agent(actions: np.ndarray, space: Any) -> np.ndarray:
    """Returns the space's actions (rows, …) of those that `to_agent` makes of them."""
    if _is_discrete(space):
        return actions.argmax(axis=-1) + space.start
    low, width = _bounds(space)
    actions = low + (actions.reshape(-1, *space.shape) + 1) / 2 * width
    if np.issubdtype(space.dtype, np.integer):
        actions = np.rint(actions)
    return actions.astype(space.dtype)


def environment_spec(description: str, trusted: Sequence[str] = ()) -> Any:
    """Returns the `gymnasium.EnvSpec` that a description, its JSON, stands for.

    gymnasium imports and calls whatever a spec names, also for its wrappers. So a spec
    may name gymnasium's own environments and wrappers, and what is trusted.

    trusted: entry points, MODULE:NAME each.

    Raises:
      ImportError: gymnasium is missing.
      ValueError: the description is not a spec, or names another entry point.
    """
    import gymnasium
    from gymnasium.envs.registration import EnvSpec

    try:
        spec = EnvSpec.from_json(description)
        named = [spec.entry_point, *(x.entry_point for x in spec.additional_wrappers)]
    except (KeyError, TypeError, ValueError, gymnasium.error.Error) as error:
        raise ValueError(f"the recorded environment is no spec: {error!r}") from error
    registered = [known.entry_point for known in gymnasium.registry.values()]
    # Without those that are imported when they are asked for: they import others.
    wrappers = [x for x in vars(gymnasium.wrappers).values() if isinstance(x, type)]
    wrappers.remove(gymnasium.wrappers.RecordVideo)  # writes wherever it is told to
    own = [f"{wrapper.__module__}:{wrapper.__name__}" for wrapper in wrappers]
    for entry_point in named:
        if entry_point not in (*registered, *own, *trusted):
            raise ValueError(
                "the recorded environment's code must be gymnasium's own, got "
                f"{entry_point!r}: if you trust that code, and only then, give "
                f"--trust-entry-point {entry_point}"
            )
    return spec


@dataclass
class GymnasiumRows:
    """A `gymnasium.vector.VectorEnv` as agents see it."""

    environments: Any
    limit: int | None

    @classmethod
    def of(
        cls, description: str, rows: int, trusted: Sequence[str] = ()
    ) -> "GymnasiumRows":
        """Makes rows of an environment; description, trusted: see `environment_spec`.

        Raises:
          ImportError: gymnasium, or what the environment is made of, is missing.
          ValueError: as `environment_spec`, or the environment cannot be made.
        """
        import gymnasium

        spec = environment_spec(description, trusted)
        limit = spec.max_episode_steps
        # Not by make_vec: keyword arguments of the spec can make that call other code.
        make = functools.partial(gymnasium.make, spec)
        try:
            return cls(gymnasium.vector.SyncVectorEnv([make] * rows), limit)
        except (TypeError, AttributeError, gymnasium.error.Error) as error:
            raise ValueError(f"{spec.id} cannot be made: {error}") from error

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

    trusted: as of `environment_spec`.

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
