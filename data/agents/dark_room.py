"""Dark Room: a grid where only the goal gives a reward, and only the place is seen.

Each goal is a world of its own, and nothing but what happened there tells which one it
is. Sizes: those of Decision-Pretrained Transformer (2306.14892),
AD-eps (2312.12275).

Places are int (…, 2), row and column. Actions are numbers of `MOVES`, or one-hot.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

EXPLORED, DISCOUNT, RATE = 0.1, 0.95, 0.3
"""Of Q-learning: the most actions that are drawn, the discount, the learning rate."""
MOVES = np.array([[0, 0], [0, 1], [1, 0], [0, -1], [-1, 0]])
"""Stay, right, down, left, up; walls hold."""


@dataclass(frozen=True)
class DarkRoom:
    """A room of size x size cells; an episode of `steps` begins at `start`.

    A step gives 1 if it ends at the goal, and else 0.
    """

    size: int
    steps: int
    start: tuple[int, int]

    @property
    def goals(self) -> np.ndarray:
        """All cells, each the goal of the world of its number: (size^2, 2)."""
        return np.indices((self.size, self.size)).reshape(2, -1).T

    def observe(self, places: np.ndarray) -> np.ndarray:
        """Returns what is seen in places (…, 2): row, column one-hot, (…, 2 size)."""
        return np.eye(self.size, dtype=np.float32)[places].reshape(
            *places.shape[:-1], 2 * self.size
        )

    def move(self, places: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Returns the places (…, 2) where actions, int (…,), lead."""
        return np.clip(places + MOVES[actions], 0, self.size - 1)

    def best_actions(self, places: np.ndarray, goals: np.ndarray) -> np.ndarray:
        """Returns what leads to goals (…, 2) soonest: along the rows' axis first."""
        rows, columns = np.moveaxis(goals - places, -1, 0)
        along_row = np.where(columns > 0, 1, np.where(columns < 0, 3, 0))
        return np.where(rows > 0, 2, np.where(rows < 0, 4, along_row))

    def best_return(self, goals: np.ndarray) -> np.ndarray:
        """Returns what an agent that knows its goal gets: int (…,), of goals (…, 2)."""
        distance = np.abs(goals - np.array(self.start)).sum(axis=-1)
        return np.clip(self.steps + 1 - np.maximum(distance, 1), 0, None)

    def random_return(self) -> np.ndarray:
        """Returns the expected return of evenly drawn actions: (size^2,) of all goals.

        It is how often each cell is reached, from the exact distribution over places.
        """
        share = np.zeros(self.size**2)
        share[np.ravel_multi_index(self.start, (self.size, self.size))] = 1
        actions = np.arange(len(MOVES))
        ends = self.move(self.goals[:, None], actions)  # (cells, actions, 2)
        ends = ends[..., 0] * self.size + ends[..., 1]
        total = np.zeros_like(share)
        for _ in range(self.steps):
            arriving = np.repeat(share / len(MOVES), len(MOVES))
            share = np.bincount(ends.ravel(), arriving, len(share))
            total += share
        return total

    def explorer_returns(self, goals: np.ndarray, episodes: int) -> np.ndarray:
        """Returns what an explorer gets in worlds of goals (E, 2), (E, episodes).

        Until it finds the goal it goes the same way in all worlds: to the nearest cell
        that it has not seen. Then it stays there, and goes there in later episodes.
        """
        first_seen = np.full((self.size, self.size), episodes * self.steps)
        place = np.array(self.start)
        for step in range(episodes * self.steps):
            if step % self.steps == 0:
                place = np.array(self.start)
            unseen = np.argwhere(first_seen > step)
            if not len(unseen):
                break
            aim = unseen[np.abs(unseen - place).sum(axis=-1).argmin()]
            place = self.move(place, self.best_actions(place, aim))
            first_seen[tuple(place)] = min(first_seen[tuple(place)], step)
        goal_seen = first_seen[tuple(goals.T)]  # (E,)
        episode, at = np.divmod(goal_seen, self.steps)
        order = np.sign(np.arange(episodes) - episode[:, None])  # before, there, after
        gained = np.stack([0 * at, self.steps - at, self.best_return(goals)], axis=-1)
        return np.take_along_axis(gained, order + 1, axis=1).astype(float)


ROOMS = {"10x10": DarkRoom(10, 100, (0, 0)), "9x9": DarkRoom(9, 20, (4, 4))}
"""Of Decision-Pretrained Transformer and of AD-eps."""


def one_hot(actions: np.ndarray) -> np.ndarray:
    """Returns actions, int (…,), as float32 (…, actions)."""
    return np.eye(len(MOVES), dtype=np.float32)[actions]


class Recorded(NamedTuple):
    """Episodes of E worlds: places (E, T, 2); actions, best ones, rewards (E, T)."""

    places: np.ndarray
    actions: np.ndarray
    best_actions: np.ndarray
    rewards: np.ndarray


def _episodes(steps: Sequence[Recorded]) -> Recorded:
    """Joins steps of E worlds, (E, …) each, to episodes."""
    return Recorded._make([np.stack(part, axis=1) for part in zip(*steps, strict=True)])


def learn(
    room: DarkRoom, goals: np.ndarray, episodes: int, rng: np.random.Generator
) -> Iterator[Recorded]:
    """Yields the episodes of tabular Q-learning (Watkins, 1989), from nothing on.

    One learner for each of E goals (E, 2). Values begin at the most that a step gives,
    so that what was not tried is tried first.
    """
    rows = np.arange(len(goals))
    values = np.ones((len(goals), room.size, room.size, len(MOVES)))
    for episode in range(episodes):
        places = np.broadcast_to(np.array(room.start), goals.shape)
        steps = []
        chance = EXPLORED * max(0, 1 - 2 * episode / episodes)
        for _ in range(room.steps):
            here = rows, *places.T
            # Of equal ones, any.
            greedy = (values[here] + 1e-6 * rng.random((1, len(MOVES)))).argmax(axis=1)
            drawn = rng.integers(len(MOVES), size=len(goals))
            actions = np.where(rng.random(len(goals)) < chance, drawn, greedy)
            nexts = room.move(places, actions)
            reached = (nexts == goals).all(axis=-1)
            aim = (1 - DISCOUNT) * reached + DISCOUNT * values[(rows, *nexts.T)].max(1)
            values[(*here, actions)] += RATE * (aim - values[(*here, actions)])
            best = room.best_actions(places, goals)
            steps.append(Recorded(places, actions, best, reached))
            places = nexts
        yield _episodes(steps)


def record(
    room: DarkRoom,
    goals: np.ndarray,
    strays: np.ndarray,
    epsilon: np.ndarray,
    rng: np.random.Generator,
) -> Recorded:
    """Records an episode of each of E worlds at once: walks between aims, and chance.

    goals: (E, 2).
    strays: (E,), chance that the next aim is a cell drawn evenly and not the goal; aims
      are drawn at the beginning, and where one is reached. Errors that last
      (2006.01782): histories of steps at random teach nobody to look elsewhere.
    epsilon: (E,), chance of an evenly drawn action in a step.
    """
    places = np.broadcast_to(np.array(room.start), goals.shape)
    arrived = np.ones(len(goals), bool)
    aims = places
    steps = []
    for _ in range(room.steps):
        drawn = rng.integers(len(MOVES), size=len(goals))
        elsewhere = room.goals[rng.integers(room.size**2, size=len(goals))]
        is_astray = rng.random(len(goals)) < strays
        following = np.where(is_astray[:, None], elsewhere, goals)
        aims = np.where(arrived[:, None], following, aims)
        wanted = room.best_actions(places, aims)
        actions = np.where(rng.random(len(goals)) < epsilon, drawn, wanted)
        before = places
        places = room.move(places, actions)
        arrived = (places == aims).all(axis=-1)
        reached = (places == goals).all(axis=-1)
        best = room.best_actions(before, goals)
        steps.append(Recorded(before, actions, best, reached))
    return _episodes(steps)
