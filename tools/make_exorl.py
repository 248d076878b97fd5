"""Makes data for in-context RL in ExoRL's format, with dm_control, in minutes.

    python -m tools.make_exorl --domain cartpole --output DATA
    python -m tools.make_exorl --domain walker --tasks stand run --episodes 500 \\
        --cap 0.6 --output DATA
    python -m tools.pack_exorl --root DATA --domain cartpole --algorithm es_replay \\
        --task swingup --cache CACHE

What is written, DATA/DOMAIN/es_replay/, is not ExoRL: no exploration algorithm gathered
it. A search for good policies, by an evolution strategy, keeps all that it tries. Most
episodes are new ones of policies drawn evenly from the whole range of returns that it
found, with some noise; the rest are noise alone. Rewards are the first
task's; tools/pack_exorl.py computes the others'. The same seed makes the same files.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data.agents import environments
from data.agents.environments import Environment
from data.agents.episodes import DOMAINS, Buffer, write_episode
from data.agents.exorl import computed_rewards
from tasks.command_line import as_program, at_least, share
from tools.lib.exorl import policy_search, rollouts
from tools.lib.exorl.policy_search import Family, Found, search, stratify
from tools.lib.exorl.rollouts import EXPONENTS, Map, Noise, quantiles

ALGORITHM, PROGRAM = "es_replay", "tools/make_exorl.py"
# The tasks of ExoRL's paper that there are environments for.
TASKS = {
    "cartpole": ("swingup",),
    "cheetah": ("run",),
    "jaco": tuple(environments.JACO_TARGETS),
    "walker": ("stand", "walk", "run"),
}
# Episodes of a search, over all tasks.
SEARCH_EPISODES = {"cartpole": 192, "cheetah": 1920, "jaco": 1920, "walker": 1920}
# Of noise alone, and of noise that is added to a policy's actions.
SCALES, ADDED_SCALES = (0.3, 1.0), (0.0, 0.05, 0.1, 0.2)
# Episodes that standardise the observations of linear policies.
SCOUTS = 4
LEAST_STD = 1e-2
# How often an episode above the cap is rolled out again, by another policy.
ROUNDS = 20


@dataclass(frozen=True)
class Recipe:
    """A data set to make.

    tasks: whose policies are searched for; episodes are shared among them.
    episodes: in the whole data set.
    search_episodes: about how many the search may take, over all tasks.
    noise_share: of the episodes are noise alone.
    cap: no episode returns more than this share of the best that the search found;
      None: there is no limit.
    action_repeat: steps that every action is held for.
    """

    domain: str
    tasks: tuple[str, ...]
    episodes: int
    seed: int
    search_episodes: int
    noise_share: float = 0.2
    cap: float | None = None
    action_repeat: int = 1

    def check(self) -> None:
        """Raises ValueError if nothing can be made of it."""
        for task in self.tasks:
            environments.check_task(self.domain, task)
        if len(set(self.tasks)) < len(self.tasks):
            raise ValueError(f"{self.tasks=} must be tasks, each of them once")
        if self.cap is not None and not 0 < self.cap <= 1:
            raise ValueError(f"cap={self.cap} must be above 0 and up to 1")
        rollouts.check_held(self.action_repeat)

    def rng(self, *place: int) -> np.random.Generator:
        """Returns the generator of what is drawn at a place of the recipe."""
        return np.random.default_rng([self.seed, *place])


@dataclass(frozen=True, eq=False)
class Attempt:
    """One episode to roll out; what it becomes depends on nothing else.

    task: whose return counts.
    parameters: of the policy, or None for noise alone.
    noise: added to the policy's actions, or None.
    seed: of the episode's beginning, and of the noise.
    number: of the file to write if the return is no more than `limit`; or None.
    """

    task: str
    parameters: np.ndarray | None
    noise: Noise | None
    seed: int
    number: int | None = None
    limit: float = math.inf


def make(recipe: Recipe, output: Path, processes: int) -> Buffer:
    """Writes `output`/domain/es_replay, whole or not at all.

    Raises:
      FileExistsError: there is such a data set already; it is not touched.
      ValueError: the recipe makes nothing, or too few policies are below its cap.
      ImportError: dm_control is missing.
    """
    recipe.check()
    buffer = Buffer(output, recipe.domain, ALGORITHM)
    with rollouts.new_data(buffer.directory, processes) as (folder, map_attempts):
        (folder / "buffer").mkdir()
        found = _fill(recipe, folder / "buffer", map_attempts)
        rollouts.write_meta(folder, PROGRAM, recipe, **found)
    return buffer


def _fill(recipe: Recipe, folder: Path, map_attempts: Map) -> dict[str, Any]:
    """Writes the episodes; returns their description."""
    family, count = _family(recipe), -(-recipe.search_episodes // len(recipe.tasks))
    roll = functools.partial(_roll, recipe, family, folder)

    def returns_of(attempts: Sequence[Attempt], what: str) -> list[float]:
        progress = {"total": len(attempts), "unit": " episodes", "disable": None}
        return list(tqdm(map_attempts(roll, attempts), desc=what, **progress))

    def searched(task: str, rng: np.random.Generator) -> Found:
        def returns(policies: np.ndarray, seeds: np.ndarray) -> list[float]:
            pairs = zip(policies, seeds.tolist(), strict=True)
            attempts = [Attempt(task, policy, None, seed) for policy, seed in pairs]
            return returns_of(attempts, f"search for {task}")

        return search(returns, family, count, rng)

    found = {t: searched(t, recipe.rng(1, n)) for n, t in enumerate(recipe.tasks)}
    draw, missing = _plan(recipe, found), range(recipe.episodes)
    attempts: dict[int, Attempt] = {}
    returns: dict[int, float] = {}
    for tries in range(ROUNDS):
        drawn = {number: draw(number, tries) for number in missing}
        attempts |= drawn
        returns |= zip(drawn, returns_of([*drawn.values()], "episodes"), strict=True)
        missing = [n for n, attempt in drawn.items() if returns[n] > attempt.limit]
        if not missing:
            return _description(recipe, found, attempts, returns)
    raise ValueError(
        f"{len(missing)} of {recipe.episodes} episodes returned more than "
        f"{recipe.cap=} of the best, {ROUNDS} times over: raise the cap, or search "
        f"longer than {recipe.search_episodes=}"
    )


def _family(recipe: Recipe) -> Family:
    """Returns the policies of the domain; linear ones see standardised observations."""
    if recipe.domain == "cartpole":
        policy = functools.partial(policy_search.believing, recipe.action_repeat)
        return Family(np.ones(4), 0.8, 0.4, policy)
    environment = Environment(recipe.domain, recipe.tasks[0])
    noise = Noise(1.0, SCALES[0])
    seeds = recipe.rng(0).integers(2**31, size=SCOUTS).tolist()
    scouts = [rollouts.roll_out(environment, None, noise, seed) for seed in seeds]
    seen = np.concatenate([scout.observation for scout in scouts]).astype(np.float64)
    # What never moves in a scout's episode must not be blown up when it does.
    mean, std = seen.mean(axis=0), np.maximum(seen.std(axis=0), LEAST_STD)
    start = np.zeros(DOMAINS[recipe.domain].action * (len(mean) + 1))
    return Family(start, 0.15, 0.3, functools.partial(policy_search.linear, mean, std))


def _plan(recipe: Recipe, found: dict[str, Found]) -> Callable[[int, int], Attempt]:
    """Returns a function that draws an episode's next attempt, of a number of tries."""
    count = round(recipe.noise_share * recipe.episodes)
    noise_alone = set(recipe.rng(2).permutation(recipe.episodes)[:count].tolist())
    limits = dict.fromkeys(found, math.inf)
    if recipe.cap is not None:
        limits = {t: recipe.cap * float(f.returns.max()) for t, f in found.items()}
    strata = {t: stratify(f.returns, limits[t]) for t, f in found.items()}

    def draw(number: int, tries: int) -> Attempt:
        rng = recipe.rng(3, number, tries)
        task = recipe.tasks[number % len(recipe.tasks)]
        if number in noise_alone:
            parameters = None
            noise = Noise(rng.choice(EXPONENTS), rng.choice(SCALES))
        else:
            of_task = strata[task]
            policy = rng.choice(of_task[rng.integers(len(of_task))])
            parameters, scale = found[task].parameters[policy], rng.choice(ADDED_SCALES)
            noise = Noise(1.0, scale) if scale else None
        seed = int(rng.integers(2**31))
        return Attempt(task, parameters, noise, seed, number, limits[task])

    return draw


# One takes as long to make as an episode.
_environment = functools.cache(Environment)


def _roll(recipe: Recipe, family: Family, folder: Path, attempt: Attempt) -> float:
    """Rolls out an attempt, writes it if it is one of the data; returns its return."""
    act = None
    if attempt.parameters is not None:
        act = family.policy(attempt.parameters)
    environment, stored = (
        _environment(recipe.domain, task) for task in (attempt.task, recipe.tasks[0])
    )
    stem = None if attempt.number is None else folder / f"episode_{attempt.number:06d}"
    how = attempt.noise, attempt.seed, recipe.action_repeat, stem
    episode = rollouts.roll_out(environment, act, *how)
    total = float(episode.reward.sum(dtype=np.float64))
    if stem is not None and total <= attempt.limit:
        if stored is not environment:
            rewards = np.float32([0.0, *computed_rewards(stored, episode)])
            episode = dataclasses.replace(episode, reward=rewards[:, None])
        write_episode(episode)
    return total


def _description(
    recipe: Recipe,
    found: dict[str, Found],
    attempts: dict[int, Attempt],
    returns: dict[int, float],
) -> dict[str, Any]:
    """Returns what meta.json says of the search and of the episodes."""
    of_task: dict[str, list[float]] = {}
    for number, attempt in attempts.items():
        of_task.setdefault(attempt.task, []).append(returns[number])
    return {
        "stored_task": recipe.tasks[0],
        "search_returns": {t: quantiles(f.returns) for t, f in found.items()},
        "returns": {t: quantiles(some) for t, some in of_task.items()},
        "episodes": [
            {
                "episode": number,
                "task": attempt.task,
                "policy": attempt.parameters is not None,
                "noise": attempt.noise and asdict(attempt.noise),
                "return": returns[number],
            }
            for number, attempt in attempts.items()
        ],
    }


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    parser = rollouts.recording_arguments(__doc__, episodes=300, action_repeat=1)
    add = parser.add_argument
    add("--domain", required=True, choices=list(TASKS))
    add("--tasks", nargs="+", metavar="TASK", help="default: those of ExoRL's paper")
    add("--search-episodes", type=at_least(1), help=f"default: {SEARCH_EPISODES}")
    alone = "share of the episodes that are noise alone (default: %(default)s)"
    add("--noise-share", default=0.2, type=share, help=alone)
    add("--cap", type=float, help="keep returns below this share of the best")
    given = vars(parser.parse_args(arguments))
    output, processes = given.pop("output"), given.pop("processes")
    given["tasks"] = tuple(given["tasks"] or TASKS[given["domain"]])
    given["search_episodes"] = (
        given["search_episodes"] or SEARCH_EPISODES[given["domain"]]
    )
    print(rollouts.describe(make(Recipe(**given), output, processes).directory))


if __name__ == "__main__":
    sys.exit(main())
