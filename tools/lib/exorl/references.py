"""References for agents in many worlds: an oracle, chance, and a learner.

In Dark Room, the learner has a table of values for each world (Q-learning), and nothing
before it. In cart-poles the oracle is the controller that recorded them.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from data.agents.dark_room import MOVES, ROOMS, DarkRoom
from data.agents.hidden_physics import HiddenPhysics
from data.agents.trajectory_file import TrajectoryFile
from tools.lib.exorl.controller import controller
from tools.lib.exorl.scenes import Scene, stage
from tools.lib.exorl.scores import of_worlds

LEARNING_RATE, DISCOUNT, EPSILON = 0.5, 0.95, 0.1
OPTIMISM = 1.0
"""First values of the table: what was not tried is worth a try."""


def references(
    file: TrajectoryFile, worlds: np.ndarray, seeds: np.ndarray, processes: int = 1
) -> dict[str, Any]:
    """Returns mean returns over worlds: oracle, random, and tabular by episode.

    Empty where no world is described. Tabular is for Dark Room, where the others are
    exact. In cart-poles an episode is played in each row.

    worlds: int (E,), of the rows, which may have one in common. seeds: int (E,
      episodes), of the episodes' beginnings. processes: see `stage`.
    """
    if file.index["domain"] == "dark_room":
        room = ROOMS[file.index["task"]]
        goals = room.goals[worlds]
        tabular = tabular_returns(room, goals, seeds.shape[1])
        return {
            "oracle": float(of_worlds(room.best_return(goals), worlds).mean()),
            "random": float(room.random_return()[np.unique(worlds)].mean()),
            "tabular": of_worlds(tabular, worlds).mean(axis=0).tolist(),
        }
    described = file.index.get("worlds_described") or []
    if not any(described):
        return {}
    repeat, scene = file.action_repeat, stage(file, worlds, seeds, processes)
    known = [controller(HiddenPhysics.of(described[w] or {}), repeat) for w in worlds]
    rng, size = np.random.default_rng(0), (len(worlds), file.action_size)

    def oracle(observations: np.ndarray) -> np.ndarray:
        pairs = zip(known, observations, strict=True)
        return np.stack([np.clip(act(seen), -1, 1) for act, seen in pairs])

    policies = {"oracle": oracle, "random": lambda _: rng.uniform(-1, 1, size)}
    found = {name: _returns(scene, act) for name, act in policies.items()}
    return {name: float(of_worlds(r, worlds).mean()) for name, r in found.items()}


def _returns(scene: Scene, act: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Plays the first episode of each row, and returns their returns (E,)."""
    observations, total, last = scene.begin(0), np.zeros(()), False
    while not last:
        observations, _, rewards, last = scene.step(act(observations))
        total = total + rewards
    return total


def tabular_returns(
    room: DarkRoom, goals: np.ndarray, episodes: int, seed: int = 0
) -> np.ndarray:
    """Returns what Q-learning gets in worlds of goals (E, 2), (E, episodes)."""
    rng, rows = np.random.default_rng(seed), np.arange(len(goals))
    values = np.full((len(goals), room.size**2, len(MOVES)), OPTIMISM)
    returns = np.zeros((len(goals), episodes))
    for episode in range(episodes):
        places = np.broadcast_to(np.array(room.start), goals.shape)
        for _ in range(room.steps):
            cells = places[:, 0] * room.size + places[:, 1]
            known = values[rows, cells]  # (E, actions)
            likeliest = (known + 1e-6 * rng.random(known.shape)).argmax(axis=-1)
            drawn = rng.integers(len(MOVES), size=len(goals))
            actions = np.where(rng.random(len(goals)) < EPSILON, drawn, likeliest)
            places = room.move(places, actions)
            rewards = (places == goals).all(axis=-1)
            following = values[rows, places[:, 0] * room.size + places[:, 1]]
            best = rewards + DISCOUNT * following.max(axis=-1)
            step = LEARNING_RATE * (best - values[rows, cells, actions])
            values[rows, cells, actions] += step
            returns[:, episode] += rewards
    return returns
