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
    asked for, but of `source`. drawn: how many at the beginning are of drawn actions.
    forgets: before what the context is emptied (see `Play.play`).
    """

    scenes: list[tuple[Scene, int]]
    source: str
    before: int = 0
    drawn: int = 0
    forgets: str = "nothing"


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
    own = stage(file, np.resize(worlds, rows), seeds, processes)
    numbers = [(own, number) for number in range(episodes)]
    found = {
        "own": Context(numbers, task),
        "empty": Context(numbers, task, forgets="episode"),
        "none": Context(numbers, task, forgets="step"),
    }
    if len(worlds) > 1 and episodes > 1:
        rolled = np.resize(np.roll(worlds, 1), rows)
        other = stage(file, rolled, seeds, processes)
        elsewhere = [(other, number) for number in range(episodes - 1)]
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
    """Returns the contexts that are asked for, by name.

    worlds: int (n,), of the rows in turn. seeds: int (E, episodes).

    Raises:
      ValueError, FileNotFoundError: something in the options or the config is wrong.
    """
    are_many = bool((file.worlds != file.worlds[0]).any())
    for option in ("other",) if are_many else ("random", "split"):
        if getattr(options, option) not in (None, [], "test"):
            of = "one world" if are_many else "many worlds"
            raise ValueError(f"--{option} is for trajectories of {of}: leave it out")
    found = world_contexts(file, worlds, seeds, options.random, options.processes)
    if config.agent.chain_length == 1:
        found = {"empty": found["empty"]}
    elif not are_many:
        found = {name: found[name] for name in ("own", "empty")}
        held_out = trajectories.episodes(config, file, "test")
        last = found["own"].scenes[-1]
        found["recorded"] = _recorded(file, held_out, seeds.shape, last)
        if options.other:
            changed = config.copy_and_resolve_references()
            changed.data.trajectories = str(options.other)
            other = trajectories.opened(changed)
            numbers = np.arange(len(other.returns))
            found["other"] = _recorded(other, numbers, seeds.shape, last)
    return asked(found, options.contexts)


def _recorded(
    file: TrajectoryFile,
    episodes: np.ndarray,
    size: tuple[int, int],
    last: tuple[Scene, int],
) -> Context:
    """Returns chains of recorded episodes, the best one of each replaced by the last.

    size: rows, and episodes in a context.

    Raises:
      ValueError: there are too few.
    """
    rows, length = size
    chains = Chains(file, episodes, length, exorl.HELD_OUT_SEED)
    chosen = np.stack([chains.chain(row)[:-1] for row in range(rows)])
    recording = Recording(file, chosen)
    before = [(recording, number) for number in range(length - 1)]
    return Context([*before, last], task_name(file), length - 1)


def asked(found: dict[str, Context], names: Sequence[str] | None) -> dict[str, Context]:
    """Returns the contexts of these names, or all, and the ones of drawn actions.

    Raises:
      ValueError: a name has no context, or no context is left.
    """
    if names is None:
        return found
    chosen = {name: c for name, c in found.items() if c.drawn or name in names}
    if {*names} - found.keys() or not chosen:
        raise ValueError(
            f"--contexts {' '.join(names)}: give some of {', '.join(found)}"
        )
    return chosen


def task_name(file: TrajectoryFile) -> str:
    """Returns the domain and the task of trajectories."""
    return f"{file.index['domain']} {file.index['task']}"
