"""ExoRL: public episodes checked, their rewards computed for a task, and packed."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from data.agents.environments import FAMILIES, Environment, versions
from data.agents.episodes import BadEpisode, Buffer, Episode, read_episode, steps_of
from data.agents.trajectory_file import TrajectoryFile, TrajectoryWriter
from data.files import describe_file, refuse_existing
from data.progress import progress

# ExoRL's own loader keeps the first million of up to ten.
MAX_TRANSITIONS = 1_000_000
# Largest difference of an observation from what physics makes it.
TOLERANCE = 1e-4
# Rows whose observation is computed again.
CHECKED_ROWS = 5


@dataclass(frozen=True)
class Selection:
    """Episodes to pack, and how they have to be.

    max_transitions: whole episodes are taken, in the order of their numbers, as long as
      they have no more steps than this, and one at least.
    action_repeat: steps of the environment that are packed as one, whose reward is
      their sum; their actions must be equal.
    piece: packed steps of the pieces that episodes are cut into, each an episode of its
      own; what is left over is not packed. 0: whole episodes.
    worlds, seed: how many targets of a family of tasks are drawn, and by which seed.
    """

    max_transitions: int = MAX_TRANSITIONS
    action_repeat: int = 1
    piece: int = 0
    worlds: int = 100
    seed: int = 0


def pack(
    buffer: Buffer,
    tasks: Sequence[str],
    cache: Path,
    selection: Selection | None = None,
) -> list[TrajectoryFile]:
    """Packs a buffer's episodes for each of some tasks: `cache`/domain/algorithm/task.

    Of a family of tasks, each with its target is a world: all have the same steps, and
    rewards of their own. One file is read at a time, once for all tasks. Where an
    episode is bad, nothing is left behind.

    Raises:
      BadEpisode: a file is not an episode of the domain, or of another model of it.
      ValueError: a task is unknown.
      FileNotFoundError: there are no episodes.
      FileExistsError: something has one of these names already; it is not touched.
      ImportError: dm_control is missing.
    """
    selection = selection or Selection()
    folder = Path(cache) / buffer.domain / buffer.algorithm
    for task in tasks:
        refuse_existing(folder / task)
    environments = [_environment(buffer.domain, task, selection) for task in tasks]
    paths = _taken(buffer, selection.max_transitions)
    with contextlib.ExitStack() as stack:
        steps = sum(map(steps_of, paths))
        bar = stack.enter_context(progress(steps, " steps", "packing"))
        writers = []
        for environment in environments:
            about = _about(buffer, environment, selection)
            writer = TrajectoryWriter(folder / environment.task, about)
            writers.append(stack.enter_context(writer))
        for path in paths:
            episode = read_episode(path, buffer.domain)
            _check_repeats(episode, selection.action_repeat)
            source = {"file": path.name, **describe_file(path), "steps": episode.steps}
            for writer, environment in zip(writers, environments, strict=True):
                rewards = _rewards(episode, environment)
                for observation, action, sums in _joined(episode, rewards, selection):
                    writer.write(observation, action, sums)
                stored = np.abs(rewards - episode.reward[1:, 0]).max()
                difference = "largest_difference_from_stored"
                writer.about[difference] = max(writer.about[difference], float(stored))
                writer.about["sources"].append(source)
            bar.update(episode.steps)
    return [TrajectoryFile.open(folder / task) for task in tasks]


def _taken(buffer: Buffer, most: int) -> list[Path]:
    """Returns the first files of a buffer, of at most `most` steps, but at least one.

    By the names of the files, so that none is read in vain.
    """
    paths = buffer.scan()
    count = 0
    for end in accumulate(map(steps_of, paths)):
        if end > most:
            break
        count += 1
    return paths[: max(count, 1)]


def _environment(domain: str, task: str, selection: Selection) -> Environment:
    """Returns the environment of a task, or of the drawn targets of a family."""
    family = FAMILIES.get((domain, task))
    if family is None:
        return Environment(domain, task)
    rng = np.random.default_rng(selection.seed)
    largest = np.array(family.largest)
    # The first targets are the same for any number of them.
    drawn = rng.uniform(-largest, largest, (selection.worlds, len(largest)))
    return Environment(domain, task, drawn)


def _about(
    buffer: Buffer, environment: Environment, selection: Selection
) -> dict[str, Any]:
    """Returns what an index says of the origin of its trajectories."""
    about = {
        "domain": buffer.domain,
        "algorithm": buffer.algorithm,
        "task": environment.task,
        "action_repeat": selection.action_repeat,
        "versions": {"numpy": np.__version__} | versions(),
        "largest_difference_from_stored": 0.0,
        "sources": [],
    }
    if environment.targets is not None:
        targets = environment.targets.tolist()
        about["worlds_described"] = [{"target": target} for target in targets]
    return about


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
    episode: Episode, rewards: np.ndarray, selection: Selection
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields observations, actions and rewards of pieces, one for each held action."""
    first = np.arange(0, episode.steps, selection.action_repeat)
    rewards = np.add.reduceat(rewards, first, axis=1)  # (W, steps)
    steps = selection.piece or len(first)
    for start in range(0, len(first) - steps + 1, steps):
        piece = slice(start, start + steps)
        rows = first[piece]
        yield episode.observation[rows], episode.action[1:][rows], rewards[:, piece]


def _rewards(episode: Episode, environment: Environment) -> np.ndarray:
    """Returns the rewards of an episode whose physics are those of the environment."""
    try:
        off = observation_error(environment, episode)
        rewards = computed_rewards(environment, episode)
    except ValueError as refusal:
        raise BadEpisode(episode.path, str(refusal)) from refusal
    if not off <= TOLERANCE:  # which nan is not
        raise BadEpisode(
            episode.path,
            f"observations are {off:.3g} off from what {environment.domain}'s physics "
            f"makes them, more than {TOLERANCE}: the file is of another domain or "
            "another version of its model",
        )
    return rewards


def computed_rewards(environment: Environment, episode: Episode) -> np.ndarray:
    """Rewards as the environment gave, or would have given them: float64 (W, T).

    ExoRL's own code leaves the action out: rewards that depend on it, as a cart-pole's,
    are up to a quarter higher there.

    Raises:
      ValueError: the simulator refuses a state of the episode.
    """
    rewards = []
    steps = zip(episode.physics[1:], episode.action[1:], strict=True)
    for state, action in steps:
        environment.set_physics(state)
        environment.set_control(action)
        rewards.append(environment.rewards())
    return np.stack(rewards, axis=1)


def observation_error(environment: Environment, episode: Episode) -> float:
    """Returns the largest difference of observations from physics, in a few rows.

    It is small for the environment's own domain and model, and for no other.

    Raises:
      ValueError: the simulator refuses a state of the episode.
    """
    columns = environment.recomputable
    differences = []
    for row in np.linspace(0, episode.steps, CHECKED_ROWS).astype(int):
        environment.set_physics(episode.physics[row])
        difference = environment.observation() - episode.observation[row]
        differences.append(np.abs(difference[columns]))
    # Not a number where physics are beyond numbers, as `max` of Python's is not.
    return float(np.max(differences))
