"""Where agents act in the task of trajectories, by one process or several."""

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np

from data.agents.dark_room import ROOMS
from data.agents.environments import Environment, check_simulator
from data.agents.hidden_physics import HiddenPhysics
from data.agents.trajectory_file import TrajectoryFile
from tools.lib.exorl.scenes import DarkRoomStage, Outcome, Scene, Stage, same_end

# Of a process that has a share of the rows.
_here: Stage


class SharedStage:
    """Environments in lock-step, of which every process steps a share at once.

    shares: make the stages that processes have, of the first rows, the next ones, …
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
        return Outcome(*map(np.concatenate, arrays), last=same_end(ends))

    def _all(self, method: str, arguments: Sequence[Any]) -> list[Any]:
        pairs = zip(self._processes, arguments, strict=True)
        calls = [process.submit(_call, method, each) for process, each in pairs]
        return [call.result() for call in calls]


def _take(make: Callable[[], Stage]) -> None:
    global _here
    _here = make()


def _call(method: str, argument: Any) -> Any:
    return getattr(_here, method)(argument)


def _made(
    index: Mapping[str, Any], hidden: Sequence[Any], seeds: np.ndarray, repeat: int
) -> Stage:
    """Makes a stage; hidden: physics as described, or None, of each row."""
    environments = [
        Environment(
            index["domain"], index["task"], HiddenPhysics.of(each) if each else None
        )
        for each in hidden
    ]
    return Stage(environments, seeds, repeat)


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
    described = index.get("worlds_described")
    hidden = [described[world] if described else None for world in worlds]
    task = {"domain": index["domain"], "task": index["task"]}
    count = min(processes, len(worlds))
    shares = [
        functools.partial(
            _made, task, [hidden[row] for row in rows], seeds[rows], file.action_repeat
        )
        for rows in np.array_split(np.arange(len(worlds)), count)
    ]
    return shares[0]() if count == 1 else SharedStage(shares)
