"""Where agents act: environments in lock-step, and episodes that were recorded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from data.agents import environments
from data.agents.dark_room import DarkRoom, one_hot
from data.agents.environments import Environment
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


class Scene(Protocol):
    """Interface of a place to act in."""

    def begin(self, number: int) -> np.ndarray:
        """Begins the `number`-th episodes; returns observations, (E, size)."""

    def step(self, actions: np.ndarray) -> Outcome: ...


@dataclass
class Stage:
    """Environments, one a row.

    seeds: int (E, episodes), of the beginnings of the rows' episodes.
    action_repeat: steps of the environment for which an action is held; rewards add up.
    """

    environments: Sequence[Environment]
    seeds: np.ndarray
    action_repeat: int = 1

    def begin(self, number: int) -> np.ndarray:
        seeds = self.seeds[:, number]
        pairs = zip(self.environments, seeds, strict=True)
        return np.stack([environment.reset(int(seed)) for environment, seed in pairs])

    def step(self, actions: np.ndarray) -> Outcome:
        pairs = zip(self.environments, actions, strict=True)
        observations, rewards, ends = zip(
            *(self._held(environment, action) for environment, action in pairs),
            strict=True,
        )
        return Outcome(
            np.stack(observations), actions, np.array(rewards), same_end(ends)
        )

    def _held(
        self, environment: Environment, action: np.ndarray
    ) -> tuple[np.ndarray, float, bool]:
        reward = 0.0
        for _ in range(self.action_repeat):
            step = environment.step(action)
            reward += step.reward
            if step.last:
                break
        return step.observation, reward, step.last


def same_end(ends: Sequence[bool]) -> bool:
    """Returns whether all episodes end here.

    Raises:
      ValueError: some do, and others do not.
    """
    if len(set(ends)) > 1:
        raise ValueError(f"episodes of one task end at different steps: {ends}")
    return ends[0]


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
        last = self._left == 0
        if not last:
            self._places = self._places + 1
        rewards = done[:, -1].astype(np.float64)
        return Outcome(self._observations(), actions, rewards, last)

    def _observations(self) -> np.ndarray:
        return self.file.read(self._places)[:, : self.file.observation_size]


def versions(file: TrajectoryFile) -> dict[str, str]:
    """Returns the versions of the simulator that the trajectories' task needs."""
    return {} if file.index["domain"] == "dark_room" else environments.versions()
