"""Episodes rolled out in dm_control, by policies and noise, in many processes."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import batched
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data.agents.environments import Environment, check_simulator
from data.agents.episodes import DOMAINS, Episode, write_episode
from data.agents.relabel import exact_rewards
from data.new_directory import NewDirectory
from tools.lib.exorl.policies import Noise, Policy, PolicyFamily

# What a process does with one environment, which takes as long to make as an episode.
ATTEMPTS_AT_A_TIME = 16
# No episode of ExoRL is longer; noise is drawn for as many steps.
MOST_STEPS = 1000

# The built-in map, or that of a pool of processes.
Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


@dataclass(frozen=True, eq=False)
class Attempt:
    """One episode to roll out; what it becomes depends on nothing else.

    task: whose return counts.
    parameters: of the policy, or None for noise alone.
    noise: added to the policy's actions, or None.
    seed: of the episode's beginning, and of the noise.
    stem: path of the file to write up to its length, if the return is no more than
      `limit`; None: nothing is written.
    """

    task: str
    parameters: np.ndarray | None
    noise: Noise | None
    seed: int
    stem: Path | None = None
    limit: float = math.inf


@dataclass(frozen=True, eq=False)
class Roller:
    """Rolls out attempts in a domain.

    stored_task: whose rewards are written, whatever task an episode was gathered for.
    processes: how many of them `map_batches` has.
    action_repeat: steps that every action is held for.
    """

    domain: str
    stored_task: str
    processes: int
    map_batches: Map
    action_repeat: int = 1

    def returns(
        self, family: PolicyFamily | None, attempts: Sequence[Attempt], what: str
    ) -> list[float]:
        """Returns the return of every attempt on its task, in their order.

        Args:
          family: of the policies; none for noise alone.
          attempts: what is rolled out.
          what: name of the progress bar.
        """
        share = -(-len(attempts) // self.processes)
        batches = list(batched(attempts, min(share, ATTEMPTS_AT_A_TIME)))
        roll = partial(
            _roll_batch, self.domain, self.stored_task, self.action_repeat, family
        )
        returns = []
        with tqdm(
            desc=what, total=len(attempts), unit=" episodes", disable=None
        ) as progress:
            for some in self.map_batches(roll, batches):
                returns += some
                progress.update(len(some))
        return returns


@contextlib.contextmanager
def new_data(directory: Path, processes: int) -> Iterator[tuple[Path, Map]]:
    """Yields a folder that takes the directory's name when the block ends, and a map.

    processes: how many the map has.

    Raises:
      FileExistsError: there is such a data set already; it is not touched.
      ValueError: there are no processes.
      ImportError: dm_control is missing.
    """
    if processes < 1:
        raise ValueError(f"{processes=} must be at least 1")
    check_simulator()
    new = NewDirectory(directory)
    try:
        if processes == 1:
            yield new.partial, map
        else:
            # A process that is forked would hold the locks of JAX's threads.
            spawn = get_context("spawn")
            with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
                yield new.partial, pool.map
        new.appear()
    finally:
        new.remove()


def roll_out(
    environment: Environment,
    act: Policy | None,
    attempt: Attempt,
    action_repeat: int = 1,
) -> Episode:
    """Rolls out one episode, with the rewards of the environment's task.

    Args:
      environment: where.
      act: what the attempt's noise is added to; None: to nothing.
      attempt: of which the noise, the seed and the path are taken.
      action_repeat: steps that every action is held for; all are in the episode.
    """
    size = DOMAINS[environment.domain].action
    noise = np.zeros((MOST_STEPS, size))
    if attempt.noise is not None:
        rng = np.random.default_rng(attempt.seed)
        noise = attempt.noise.draw(rng, MOST_STEPS, size)
    observations = [environment.reset(attempt.seed)]
    actions, rewards = [np.zeros(size, np.float32)], [0.0]
    physics = [environment.physics()]
    for number, offset in enumerate(noise):
        if number % action_repeat == 0:
            wanted = offset if act is None else offset + act(observations[-1])
            # The number that is stored is the one that acts.
            action = np.clip(wanted, -1, 1).astype(np.float32)
        step = environment.step(action)
        observations.append(step.observation)
        actions.append(action)
        rewards.append(step.reward)
        physics.append(environment.physics())
        if step.last:
            break
    return Episode(
        path=_path(attempt.stem, len(rewards) - 1),
        observation=np.array(observations),
        action=np.array(actions),
        reward=np.array(rewards, np.float32)[:, None],
        discount=np.ones((len(rewards), 1), np.float32),
        physics=np.array(physics),
    )


def _path(stem: Path | None, steps: int) -> Path | None:
    return None if stem is None else stem.with_name(f"{stem.name}_{steps}.npz")


def _roll_batch(
    domain: str,
    stored_task: str,
    action_repeat: int,
    family: PolicyFamily | None,
    attempts: Sequence[Attempt],
) -> list[float]:
    tasks = dict.fromkeys([*(attempt.task for attempt in attempts), stored_task])
    environments = {task: Environment(domain, task) for task in tasks}
    returns = []
    for attempt in attempts:
        act = None
        if attempt.parameters is not None:
            act = family.policy(attempt.parameters)
        episode = roll_out(environments[attempt.task], act, attempt, action_repeat)
        returns.append(float(episode.reward.sum(dtype=np.float64)))
        if attempt.stem is None or returns[-1] > attempt.limit:
            continue
        if attempt.task != stored_task:
            rewards = exact_rewards(environments[stored_task], episode)
            stored = np.array([0.0, *rewards], np.float32)[:, None]
            episode = dataclasses.replace(episode, reward=stored)
        write_episode(episode)
    return returns
