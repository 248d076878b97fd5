"""References for agents in Dark Room: what returns are compared with.

An oracle, chance, and an explorer, which walks to the nearest unseen cell until it has
found the goal.
"""

from typing import Any

import numpy as np

from data.agents.dark_room import DarkRoom
from tools.lib.exorl.scores import of_worlds


def references(room: DarkRoom, worlds: np.ndarray, episodes: int) -> dict[str, Any]:
    """Returns exact mean returns over worlds; explorer by episode.

    worlds: int (E,), of the rows, which may have one in common.
    """
    goals = room.goals[worlds]
    explorer = of_worlds(explorer_returns(room, goals, episodes), worlds)
    return {
        "oracle": float(of_worlds(room.best_return(goals), worlds).mean()),
        "random": float(room.random_return()[np.unique(worlds)].mean()),
        "explorer": explorer.mean(axis=0).tolist(),
    }


def explorer_returns(room: DarkRoom, goals: np.ndarray, episodes: int) -> np.ndarray:
    """Returns what an explorer gets in worlds of goals (E, 2), (E, episodes).

    Until it finds the goal it goes the same way in all worlds: to the nearest cell that
    it has not seen. Where it finds the goal it stays, and goes there in later episodes.
    """
    found = np.full((room.size, room.size), episodes * room.steps)
    for step in range(episodes * room.steps):
        if step % room.steps == 0:
            place = np.array(room.start)
        unseen = np.argwhere(found > step)
        if not len(unseen):
            break
        aim = unseen[np.abs(unseen - place).sum(axis=-1).argmin()]
        place = room.move(place, room.best_actions(place, aim))
        found[tuple(place)] = min(found[tuple(place)], step)
    found_in, at = np.divmod(found[tuple(goals.T)], room.steps)  # (E,)
    order = np.sign(np.arange(episodes) - found_in[:, None])  # before, there, after
    gained = np.stack([0 * at, room.steps - at, room.best_return(goals)], axis=-1)
    return np.take_along_axis(gained, order + 1, axis=1).astype(float)
