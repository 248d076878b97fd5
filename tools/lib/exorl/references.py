"""References for agents in Dark Room: an oracle, chance, and a learner.

The learner has a table of values for each world (Q-learning), and nothing before it.
"""

from typing import Any

import numpy as np

from data.agents.dark_room import MOVES, ROOMS, DarkRoom
from data.agents.trajectory_file import TrajectoryFile
from tools.lib.exorl.scores import of_worlds

LEARNING_RATE, DISCOUNT, EPSILON = 0.5, 0.95, 0.1
OPTIMISM = 1.0
"""First values of the table: what was not tried is worth a try."""


def references(
    file: TrajectoryFile, worlds: np.ndarray, episodes: int
) -> dict[str, Any]:
    """Returns mean returns over worlds: oracle, random, and tabular by episode.

    Of Dark Room, where the first two are exact. Elsewhere those of the trajectories in
    these worlds: the best of each, and the mean.

    worlds: int (E,), of the rows, which may have one in common.
    """
    if file.index["domain"] != "dark_room":
        of_each = [file.returns[file.worlds == world] for world in np.unique(worlds)]
        return {
            "recorded_best": float(np.mean([returns.max() for returns in of_each])),
            "recorded_mean": float(np.mean([returns.mean() for returns in of_each])),
        }
    room = ROOMS[file.index["task"]]
    goals = room.goals[worlds]
    tabular = tabular_returns(room, goals, episodes)
    return {
        "oracle": float(of_worlds(room.best_return(goals), worlds).mean()),
        "random": float(room.random_return()[np.unique(worlds)].mean()),
        "tabular": of_worlds(tabular, worlds).mean(axis=0).tolist(),
    }


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
