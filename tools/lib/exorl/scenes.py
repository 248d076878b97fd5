"""Where agents act: environments in lock-step, and episodes that were recorded.

A scene has two methods, for E rows at once: `begin(number)` begins the `number`-th
episodes and returns observations (E, size); `step(actions)` returns an `Outcome`.
"""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np

from data.agents.dark_room import ROOMS, DarkRoom, one_hot
from data.agents.environments import Environment, check_simulator
from data.agents.trajectory_file import TrajectoryFile


class Outcome(NamedTuple):
    """The result of an action in each of E rows.

    observations: float32 (E, observation size), not standardised.
    actions: float32 (E, A), what was really done. rewards: float64 (E,).
    last: whether the episodes end here; all of them at once.
    """

    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    last: bool


class Stage:
    """Environments of one task of dm_control, one a row.

    Args:
      task: domain and task.
      targets: float (E, k), of a family of tasks; None of a task alone.
      seeds: int (E, episodes), of the beginnings of the rows' episodes.
      action_repeat: steps that an action is held for; their rewards add up.
    """

    def __init__(
        self,
        task: tuple[str, str],
        targets: np.ndarray | None,
        seeds: np.ndarray,
        action_repeat: int = 1,
    ):
        self._seeds, self._action_repeat = seeds, action_repeat
        each = [None] * len(seeds) if targets is None else targets[:, None]
        self._environments = [Environment(*task, target) for target in each]

    def begin(self, number: int) -> np.ndarray:
        pairs = zip(self._environments, self._seeds[:, number].tolist(), strict=True)
        return np.stack([environment.reset(seed) for environment, seed in pairs])

    def step(self, actions: np.ndarray) -> Outcome:
        pairs = zip(self._environments, actions, strict=True)
        steps = [one.step(action, self._action_repeat) for one, action in pairs]
        observations, rewards, ends = zip(*steps, strict=True)
        # Episodes of one task end with their time, and so all at once.
        return Outcome(np.stack(observations), actions, np.array(rewards), ends[0])


# Of a process that has a share of the rows.
_here: Stage


class SharedStage:
    """A stage of which every process steps a share of the rows, at once.

    shares: make the stages of the processes, of the first rows, the next ones, …
    """

    def __init__(self, shares: Sequence[Callable[[], Stage]]):
        # A process that is forked would hold the locks of JAX's threads.
        spawn = get_context("spawn")
        self._processes = [
            ProcessPoolExecutor(1, spawn, initializer=_take, initargs=(make,))
            for make in shares
        ]

    def begin(self, number: int) -> np.ndarray:
        return np.concatenate(self._all("begin", [number] * len(self._processes)))

    def step(self, actions: np.ndarray) -> Outcome:
        outcomes = self._all("step", np.array_split(actions, len(self._processes)))
        *arrays, ends = zip(*outcomes, strict=True)
        return Outcome(*map(np.concatenate, arrays), last=ends[0])

    def _all(self, method: str, arguments: Sequence[Any]) -> list[Any]:
        pairs = zip(self._processes, arguments, strict=True)
        calls = [process.submit(_call, method, each) for process, each in pairs]
        return [call.result() for call in calls]


def _take(make: Callable[[], Stage]) -> None:
    global _here
    _here = make()


def _call(method: str, argument: Any) -> Any:
    return getattr(_here, method)(argument)


@dataclass
class DarkRoomStage:
    """Dark Room, with a goal in each row (E, 2); all rows step at once."""

    room: DarkRoom
    goals: np.ndarray

    def begin(self, number: int) -> np.ndarray:
        self._places = np.broadcast_to(np.array(self.room.start), self.goals.shape)
        self._left = self.room.steps
        return self.room.observe(self._places)

    def step(self, actions: np.ndarray) -> Outcome:
        chosen = np.argmax(actions, axis=-1)
        self._places = self.room.move(self._places, chosen)
        self._left -= 1
        rewards = (self._places == self.goals).all(axis=-1).astype(np.float64)
        seen = self.room.observe(self._places)
        return Outcome(seen, one_hot(chosen), rewards, self._left == 0)


@dataclass
class Recording:
    """Packed episodes, which go as they went, whatever is done.

    episodes: int (E, episodes), numbers of the rows' episodes, all of one length.
    """

    file: TrajectoryFile
    episodes: np.ndarray

    def begin(self, number: int) -> np.ndarray:
        chosen = self.episodes[:, number]
        if len(set(self.file.lengths[chosen])) > 1:
            raise ValueError(
                f"episodes {chosen.tolist()} of {self.file.directory} have different "
                "lengths, so they cannot go in lock-step"
            )
        self._places = self.file.offsets[chosen]
        self._left = int(self.file.lengths[chosen[0]])
        return self._observations()

    def step(self, actions: np.ndarray) -> Outcome:
        done = self.file.read(self._places)[:, self.file.observation_size :]
        actions = done[:, : self.file.action_size]
        self._left -= 1
        self._places = self._places + (self._left > 0)
        rewards = done[:, -1].astype(np.float64)
        return Outcome(self._observations(), actions, rewards, self._left == 0)

    def _observations(self) -> np.ndarray:
        return self.file.read(self._places)[:, : self.file.observation_size]


Scene = Stage | SharedStage | DarkRoomStage | Recording


def stage(
    file: TrajectoryFile, worlds: np.ndarray, seeds: np.ndarray, processes: int = 1
) -> Scene:
    """Returns where agents act in the trajectories' task.

    worlds: int (E,), of the rows. seeds: int (E, episodes), of the beginnings.
    processes: at most how many step the rows, if each takes long.

    Raises:
      ImportError: dm_control is missing.
    """
    index = file.index
    if index["domain"] == "dark_room":
        room = ROOMS[index["task"]]
        return DarkRoomStage(room, room.goals[worlds])
    check_simulator()
    task, count = (index["domain"], index["task"]), min(processes, len(worlds))
    described, targets = index.get("worlds_described"), None
    if described:
        targets = np.array([described[world]["target"] for world in worlds])
    shares = [
        functools.partial(
            Stage,
            task,
            None if targets is None else targets[rows],
            seeds[rows],
            file.action_repeat,
        )
        for rows in np.array_split(np.arange(len(worlds)), count)
    ]
    return shares[0]() if count == 1 else SharedStage(shares)
