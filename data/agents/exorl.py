"""ExoRL: public episodes checked, their rewards computed for a task, and packed."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data.agents import environments
from data.agents.environments import Environment, check_simulator, check_task
from data.agents.episodes import (
    DOMAINS,
    BadEpisode,
    Buffer,
    Episode,
    read_episode,
    steps_of,
)
from data.agents.hidden_physics import HiddenPhysics
from data.agents.trajectory_file import TrajectoryFile, TrajectoryWriter
from data.files import describe_file, refuse_existing
from data.json_text import read_json_object

# ExoRL's own loader keeps the first million of up to ten.
MAX_TRANSITIONS = 1_000_000
# Of files that may be skipped: more are not an accident.
BAD_SHARE = 0.01
# Largest difference of an observation from what physics makes it, and of physics from
# what a world's hidden physics make of those before.
TOLERANCE = 1e-4
# Rows whose observation, and whose next physics, are computed again.
CHECKED_ROWS = 5
QUANTILES = (0, 10, 25, 50, 75, 90, 100)
ON_BAD = ("error", "skip")

RELABELLINGS = ("exact", "exorl", "stored")

# From hidden physics and the steps that an action is held for to what, in a world like
# that, should be done: from an observation to an action, cut to [-1, 1] here.
Expert = Callable[[HiddenPhysics, int], Callable[[np.ndarray], np.ndarray]]


@dataclass(frozen=True)
class Selection:
    """Episodes to pack, and how they have to be.

    relabelling: "exact", rewards as the environment gives them; "exorl", as ExoRL's
      own code computes them; "stored", those in the files, whatever they were for.
    on_bad: "error", or "skip" for up to 1 % of the files.
    max_transitions: whole episodes are taken of each world, in the order of their
      numbers, as long as they have no more steps than this, and one at least.
    action_repeat: steps of the environment that are packed as one, whose reward is
      their sum; their actions must be equal.
    """

    relabelling: str = "exact"
    on_bad: str = "error"
    max_transitions: int = MAX_TRANSITIONS
    action_repeat: int = 1


def pack(
    buffer: Buffer,
    task: str,
    cache: Path,
    selection: Selection | None = None,
    expert: Expert | None = None,
) -> TrajectoryFile:
    """Packs a buffer's episodes for a task: `cache`/domain/algorithm/task.

    Its worlds, if it has any, are numbered. Their hidden physics, of their meta.json,
    go to `worlds_described`. One file is read at a time. Where an
    episode is bad, nothing is left behind.

    Args:
      buffer: where the episodes lie.
      task: whose rewards are computed (see `environments.tasks`).
      cache: where packed trajectories are kept.
      selection: which episodes are taken; `Selection()` unless it is given.
      expert: says what should have been done, of cart-poles alone; None: it is not.

    Raises:
      BadEpisode: a file is not an episode of the domain, or of another model of it.
      ValueError: the task is unknown, or more than 1 % of the files are bad.
      FileNotFoundError: there are no episodes.
      FileExistsError: something has that name already; it is not touched.
      ImportError: dm_control is missing, where rewards are to be computed.
    """
    selection = selection or Selection()
    directory = Path(cache) / buffer.domain / buffer.algorithm / task
    refuse_existing(directory)
    _check_task(buffer.domain, task, selection)
    files = [_Files(world, selection) for world in buffer.worlds()]
    about = _about(buffer, task, selection)
    about["worlds_described"] = [some.hidden and vars(some.hidden) for some in files]
    with (
        tqdm(desc="packing", unit=" steps", unit_scale=True, disable=None) as bar,
        TrajectoryWriter(directory, about) as writer,
    ):
        for number, some in enumerate(files):
            world = some.hidden or HiddenPhysics()
            act = expert and expert(world, selection.action_repeat)
            for episode, rewards in some.read(task):
                steps = _joined(episode, rewards, selection.action_repeat)
                target = act and np.clip([act(seen) for seen in steps[0]], -1, 1)
                writer.write(*steps, target=target, world=number)
                bar.update(episode.steps)
        largest = max(some.largest for some in files)
        writer.about["largest_difference_from_stored"] = largest
        writer.about["sources"] = [row for some in files for row in some.good]
        writer.about["bad_files"] = [row for some in files for row in some.bad]
    return TrajectoryFile.open(directory)


def _about(buffer: Buffer, task: str, selection: Selection) -> dict[str, Any]:
    """Returns the origin of packed trajectories, for their index."""
    is_computed = selection.relabelling != "stored"
    simulator = environments.versions() if is_computed else {}
    return {
        "domain": buffer.domain,
        "algorithm": buffer.algorithm,
        "task": task,
        "relabelling": selection.relabelling,
        "action_repeat": selection.action_repeat,
        "generator": _generator(buffer),
        "versions": {"numpy": np.__version__} | simulator,
    }


def describe(trajectories: TrajectoryFile) -> str:
    """Describes a trajectory file in a few lines."""
    index, returns = trajectories.index, trajectories.returns
    lengths, size = trajectories.lengths, trajectories.steps.nbytes / 1e6
    marks = " ".join(f"{q:>8}%" for q in QUANTILES)
    values = " ".join(f"{v:>9.2f}" for v in np.percentile(returns, QUANTILES))
    difference = index["largest_difference_from_stored"]
    return (
        f"{index['domain']} {index['task']}, gathered by {index['algorithm']}, "
        f"rewards {index['relabelling']}\n"
        f"{len(returns):,} episodes of {lengths.min()} to {lengths.max()} steps, "
        f"{lengths.sum():,} steps, {size:,.1f} MB\n"
        f"returns  {marks}\n         {values}\n"
        f"largest difference from stored rewards: {difference}\n"
        f"bad files skipped: {len(index['bad_files'])}\n"
        f"written to {trajectories.directory}"
    )


def _check_task(domain: str, task: str, selection: Selection) -> None:
    """Checks that there are rewards for the task, computed or stored."""
    if selection.relabelling != "stored":
        check_task(domain, task)
        return check_simulator()
    if DOMAINS[domain].reward != 1:
        raise ValueError(
            f"{domain} stores {DOMAINS[domain].reward} rewards a step, for as many "
            "tasks: which one is whose is not known here"
        )
    if environments.tasks(domain):
        check_task(domain, task)
    elif not task.isidentifier():
        raise ValueError(f"{task=} must be the plain name of a task")


def _generator(buffer: Buffer) -> dict[str, Any] | None:
    """Returns tools/make_exorl.py's note on data that it made; None for others."""
    path = buffer.directory / "meta.json"
    if not path.is_file():
        return None
    try:
        return read_json_object(path)
    except ValueError as error:
        raise ValueError(f"{error}, or remove it") from error


class _Files:
    """A world's files, of which those within the selection's limits are read.

    hidden: physics of the world; None where they are dm_control's.
    good: name, size, digest and steps of each episode. bad: name and reason.
    largest: difference of a reward from the stored one.
    """

    def __init__(self, buffer: Buffer, selection: Selection):
        self._buffer, self._selection = buffer, selection
        self._paths = buffer.scan()
        described = (_generator(buffer) or {}).get("hidden_physics")
        self.hidden = None if described is None else HiddenPhysics.of(described)
        self.largest = 0.0
        self.good: list[dict[str, Any]] = []
        self.bad: list[dict[str, str]] = []

    def read(self, task: str) -> Iterator[tuple[Episode, np.ndarray]]:
        """Yields the good episodes, each with its rewards of a task, float (T,)."""
        environment = None
        if self._selection.relabelling != "stored":
            environment = Environment(self._buffer.domain, task, self.hidden)
        world, taken = self._buffer.algorithm.partition("/")[2], 0
        for path in self._paths:
            name = Path(world, path.name).as_posix()
            try:
                # By its name, so that no file is read in vain.
                steps = steps_of(path)
                if self.good and taken + steps > self._selection.max_transitions:
                    break
                episode = read_episode(path, self._buffer.domain)
                _check_repeats(episode, self._selection.action_repeat)
                rewards = _rewards(episode, environment, self._selection)
            except BadEpisode as error:
                if self._selection.on_bad == "error":
                    raise
                logging.getLogger(__name__).warning("skipped %s", error)
                self.bad.append({"file": name, "reason": error.reason})
                self._check_share(len(self._paths))
                continue
            taken += steps
            self.good.append({"file": name, **describe_file(path), "steps": steps})
            difference = np.abs(rewards - episode.reward[1:, 0]).max()
            self.largest = max(self.largest, float(difference))
            yield episode, rewards
        self._check_share(len(self.good) + len(self.bad))

    def _check_share(self, files: int) -> None:
        if len(self.bad) > BAD_SHARE * files:
            first = self.bad[0]
            raise ValueError(
                f"{len(self.bad)} of {files} files of {self._buffer.directory} are "
                f"bad, more than {BAD_SHARE:.0%}; the first is {first['file']}: "
                f"{first['reason']}"
            )


def _check_repeats(episode: Episode, action_repeat: int) -> None:
    actions = episode.action[1:]
    held = actions[np.arange(len(actions)) // action_repeat * action_repeat]
    if (held != actions).any():
        row = int((held != actions).any(axis=1).argmax()) + 1
        raise BadEpisode(
            episode.path,
            f"action {row} differs from the one before it, so actions were not "
            f"held for {action_repeat=} steps: give the number that they were held for",
        )


def _joined(
    episode: Episode, rewards: np.ndarray, action_repeat: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns observations, actions and rewards, one for each action that is held."""
    first = np.arange(0, episode.steps, action_repeat)
    rewards = np.add.reduceat(rewards, first)
    return episode.observation[first], episode.action[1:][first], rewards


def _rewards(
    episode: Episode, environment: Environment | None, selection: Selection
) -> np.ndarray:
    """Returns the rewards of an episode whose physics are those of the environment."""
    if environment is None:
        return episode.reward[1:, 0]
    try:
        error = observation_error(environment, episode)
        moved = physics_error(environment, episode) if environment.hidden else 0.0
        with_action = selection.relabelling == "exact"
        rewards = computed_rewards(environment, episode, with_action)
    except ValueError as refusal:
        raise BadEpisode(episode.path, str(refusal)) from refusal
    model = "domain or another version of its model"
    for off, found, expected, other in (
        (error, "observations", f"{environment.domain}'s physics makes them", model),
        (moved, "physics", f"{environment.hidden} makes of those before", "world"),
    ):
        if not off <= TOLERANCE:  # which nan is not
            raise BadEpisode(
                episode.path,
                f"{found} are {off:.3g} off from what {expected}, more than "
                f"{TOLERANCE}: the file is of another {other}",
            )
    return rewards


def computed_rewards(
    environment: Environment, episode: Episode, with_action: bool = True
) -> np.ndarray:
    """Rewards as the environment gave, or would have given them: float64 (T,).

    with_action: False for ExoRL's own code, which leaves the action out. Rewards that
      depend on it, as a cart-pole's, are up to a quarter higher there.

    Raises:
      ValueError: the simulator refuses a state of the episode.
    """
    rewards = []
    steps = zip(episode.physics[1:], episode.action[1:], strict=True)
    for state, action in steps:
        environment.set_physics(state)
        if with_action:
            environment.set_control(action)
        rewards.append(environment.reward())
    return np.array(rewards)


def observation_error(environment: Environment, episode: Episode) -> float:
    """Returns the largest difference of observations from physics, in a few rows.

    It is small for the environment's own domain and model, and for no other.

    Raises:
      ValueError: the simulator refuses a state of the episode.
    """
    columns, differences = environment.recomputable, []
    for row in np.linspace(0, episode.steps, CHECKED_ROWS).astype(int):
        environment.set_physics(episode.physics[row])
        difference = environment.observation() - episode.observation[row]
        differences.append(np.abs(difference[columns]))
    # Not a number where physics are beyond numbers, as `max` of Python's is not.
    return float(np.max(differences))


def physics_error(environment: Environment, episode: Episode) -> float:
    """Returns the largest difference of physics from what a step makes, in a few rows.

    It is small for the world that the episode is of, and for no other: observations
    and rewards do not tell worlds apart.

    Raises:
      ValueError: the simulator refuses a state of the episode.
    """
    differences = []
    for row in np.linspace(0, episode.steps - 1, CHECKED_ROWS).astype(int):
        after = environment.next_physics(episode.physics[row], episode.action[row + 1])
        differences.append(np.abs(after - episode.physics[row + 1]))
    return float(np.max(differences))
