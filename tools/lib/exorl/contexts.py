"""What agents read before they act: their own episodes, others', or nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.agents.trajectory_file import TrajectoryFile
from tools.lib.exorl.scenes import Scene, scene


@dataclass(frozen=True)
class Context:
    """Episodes in a context, in their order.

    scenes: each in a scene, with the seeds of its rows, int (E,).
    before: how many at the beginning are not asked for.
    drawn: how many at the beginning are of drawn actions.
    forgets: whether the context is emptied before every episode.
    """

    scenes: list[tuple[Scene, np.ndarray]]
    before: int = 0
    drawn: int = 0
    forgets: bool = False


def contexts(
    file: TrajectoryFile,
    worlds: np.ndarray,
    seeds: np.ndarray,
    random: Sequence[int] = (),
    asked: Sequence[str] | None = None,
) -> dict[str, Context]:
    """Returns contexts of rows that are of these worlds, int (n,), in turn, by name.

    seeds: (E, episodes). random: numbers of episodes of drawn actions in a context.
    asked: names of some; None for all. Those of drawn actions are there in any case.

    Raises:
      ValueError: a name has no context, or no context is left.
    """
    rows, episodes = seeds.shape
    own = scene(file, np.resize(worlds, rows))
    numbers = [(own, of_rows) for of_rows in seeds.T]
    found = {
        "own": Context(numbers),
        "empty": Context(numbers, forgets=True),
    }
    if len(worlds) > 1 and episodes > 1:
        other = scene(file, np.resize(np.roll(worlds, 1), rows))
        elsewhere = [(other, of_rows) for of_rows in seeds.T[:-1]]
        found["other"] = Context([*elsewhere, numbers[-1]], episodes - 1)
    for count in random:
        drawn = [numbers[number % episodes] for number in range(count)]
        found[f"random_{count}"] = Context([*drawn, numbers[-1]], count, count)
    if asked is None:
        return found
    chosen = {name: c for name, c in found.items() if c.drawn or name in asked}
    if {*asked} - found.keys() or not chosen:
        raise ValueError(
            f"--contexts {' '.join(asked)}: give some of {', '.join(found)}"
        )
    return chosen
