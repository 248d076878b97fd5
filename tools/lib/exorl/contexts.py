"""What agents read before they act: their own episodes, others', or nothing."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import ml_collections
import numpy as np

from data.agents.chains import Chains
from data.agents.trajectory_file import TrajectoryFile
from tasks import exorl, trajectories
from tools.lib.exorl.scenes import Recording, Scene, stage


@dataclass(frozen=True)
class Context:
    """Episodes in a context, in their order.

    scenes: each by its number in its scene. before: how many at the beginning are not
    what is asked for, but of `source`. drawn: how many at the beginning
    are of drawn actions. forgets: before what the context is emptied (see `Play.play`).
    """

    scenes: list[tuple[Scene, int]]
    source: str
    before: int = 0
    drawn: int = 0
    forgets: str = "nothing"


def chains_without_the_best(
    file: TrajectoryFile, episodes: np.ndarray, rows: int, length: int
) -> np.ndarray:
    """Returns chains of episodes without the best of each: (rows, length - 1).

    Raises:
      ValueError: there are too few.
    """
    chains = Chains(file, episodes, length, exorl.HELD_OUT_SEED)
    return np.stack([chains.chain(row)[:-1] for row in range(rows)])


def world_contexts(
    file: TrajectoryFile,
    worlds: np.ndarray,
    seeds: np.ndarray,
    random: Sequence[int],
    processes: int = 1,
) -> dict[str, Context]:
    """Returns contexts of rows that are of these worlds, int (n,), in turn.

    seeds: (E, episodes). random: numbers of episodes of drawn actions in a context.
    processes: see `stage`.
    """
    (rows, episodes), task = seeds.shape, task_name(file)
    own, other = (
        stage(file, np.resize(order, rows), seeds, processes)
        for order in (worlds, np.roll(worlds, 1))
    )
    numbers = [(own, number) for number in range(episodes)]
    elsewhere = [(other, number) for number in range(episodes - 1)]
    found = {
        "own": Context(numbers, task),
        "empty": Context(numbers, task, forgets="episode"),
        "none": Context(numbers, task, forgets="step"),
    }
    if len(worlds) > 1 and elsewhere:
        found["other"] = Context([*elsewhere, numbers[-1]], task, episodes - 1)
    for count in random:
        drawn = [numbers[number % episodes] for number in range(count)]
        found[f"random_{count}"] = Context([*drawn, numbers[-1]], task, count, count)
    return found


def contexts(
    config: ml_collections.ConfigDict,
    options: argparse.Namespace,
    file: TrajectoryFile,
    worlds: np.ndarray,
    seeds: np.ndarray,
) -> dict[str, Context]:
    """Returns the contexts by name; worlds: int (n,), of the rows in turn.

    seeds: int (E, episodes).

    Raises:
      ValueError, FileNotFoundError: something in the options or the config is wrong.
    """
    (rows, episodes), single = seeds.shape, "empty"
    if (file.worlds != file.worlds[0]).any():
        if options.other:
            raise ValueError("--other is for trajectories of one world: leave it out")
        found = world_contexts(file, worlds, seeds, options.random, options.processes)
        return {single: found[single]} if config.agent.chain_length == 1 else found
    for option in ("random", "trained"):
        if getattr(options, option):
            raise ValueError(
                f"--{option} is for trajectories of many worlds: leave it out"
            )
    acting = stage(file, np.resize(worlds, rows), seeds, options.processes)
    numbers = [(acting, number) for number in range(episodes)]

    def recorded(file: TrajectoryFile, among: np.ndarray) -> Context:
        chains = chains_without_the_best(file, among, rows, episodes)
        count, recording = chains.shape[1], Recording(file, chains)
        before = [(recording, number) for number in range(count)]
        return Context([*before, numbers[-1]], task_name(file), count)

    found = {single: Context(numbers, task_name(file), forgets="episode")}
    if config.agent.chain_length == 1:
        return found
    found = {"own": Context(numbers, task_name(file)), **found}
    held_out = trajectories.episodes(config, file, "validation")
    found["recorded"] = recorded(file, held_out)
    if options.other:
        changed = config.copy_and_resolve_references()
        changed.data.trajectories = str(options.other)
        other = trajectories.opened(changed)
        found["other"] = recorded(other, np.arange(len(other.returns)))
    return found


def asked(found: dict[str, Context], names: Sequence[str] | None) -> dict[str, Context]:
    """Returns the contexts of these names, and those after drawn episodes; None: all.

    Raises:
      ValueError: there is no such context, or none is left.
    """
    if names is None:
        return found
    chosen = {name: c for name, c in found.items() if c.drawn or name in names}
    unknown = [name for name in names if name not in found]
    if unknown or not chosen:
        raise ValueError(
            f"--contexts {' '.join(names)}: give some of {', '.join(found)}"
        )
    return chosen


def task_name(file: TrajectoryFile) -> str:
    """Returns the domain and the task of trajectories."""
    return f"{file.index['domain']} {file.index['task']}"
