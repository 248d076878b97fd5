"""The data set that tools/make_exorl.py makes: a search's policies, played again."""

import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.agents import environments
from data.agents.environments import Environment
from data.agents.episodes import DOMAINS, Buffer
from data.agents.exorl import QUANTILES
from tools.lib.exorl.policies import Linear, Noise, PolicyFamily, SwingUp
from tools.lib.exorl.rollouts import MOST_STEPS, Attempt, Roller, new_data, roll_out
from tools.lib.exorl.search import Found, search, stratify

ALGORITHM = "es_replay"
# The tasks of ExoRL's paper that there are environments for.
TASKS = {
    "cartpole": ("swingup",),
    "cheetah": ("run",),
    "jaco": tuple(environments.JACO_TARGETS),
    "walker": ("stand", "walk", "run"),
}
# Episodes of a search, over all tasks.
SEARCH_EPISODES = {"cartpole": 192, "cheetah": 1920, "jaco": 1920, "walker": 1920}
# Noise alone, and noise that is added to a policy's actions.
EXPONENTS, SCALES = (0.0, 1.0, 2.0), (0.3, 1.0)
ADDED_SCALES = (0.0, 0.05, 0.1, 0.2)
# Episodes that standardise the observations of linear policies.
SCOUTS = 4
LEAST_STD = 1e-2
# How often an episode above the cap is rolled out again, by another policy.
ROUNDS = 20


@dataclass(frozen=True)
class Recipe:
    """A data set to make; equal recipes make the same files.

    tasks: whose policies are searched for; episodes are shared among them.
    episodes: in the whole data set.
    search_episodes: about how many the search may take, over all tasks.
    noise_share: of the episodes are noise alone.
    cap: no episode returns more than this share of the best that the search found;
      None: there is no limit.
    action_repeat: steps that every action is held for.

    Raises:
      ValueError: a field is not what it has to be.
    """

    domain: str
    tasks: tuple[str, ...]
    episodes: int
    seed: int
    search_episodes: int
    noise_share: float = 0.2
    cap: float | None = None
    action_repeat: int = 1

    def __post_init__(self):
        for task in self.tasks:
            environments.check_task(self.domain, task)
        if not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise ValueError(f"{self.tasks=} must be tasks, each of them once")
        if self.episodes < 1 or self.search_episodes < 1 or self.seed < 0:
            raise ValueError(
                f"{self.episodes=} and {self.search_episodes=} must be at least 1, and "
                f"{self.seed=} at least 0"
            )
        if not 1 <= self.action_repeat <= MOST_STEPS:
            raise ValueError(
                f"action_repeat={self.action_repeat} must be at least 1, and at most "
                f"the {MOST_STEPS} steps of an episode"
            )
        cap = 1.0 if self.cap is None else self.cap
        if not 0 <= self.noise_share <= 1 or not 0 < cap <= 1:
            raise ValueError(
                f"noise_share={self.noise_share} must be from 0 to 1, and "
                f"cap={self.cap} above 0 and up to 1"
            )


def make(recipe: Recipe, output: Path, processes: int) -> Buffer:
    """Writes `output`/domain/es_replay, whole or not at all.

    Args:
      recipe: what is made.
      output: directory of data sets, with or without others.
      processes: how many roll out episodes; they change nothing of what is made.

    Raises:
      FileExistsError: there is such a data set already; it is not touched.
      ValueError: there are no processes, or too few policies below the cap.
      ImportError: dm_control is missing.
    """
    buffer = Buffer(output, recipe.domain, ALGORITHM)
    where, repeat = (recipe.domain, recipe.tasks[0]), recipe.action_repeat
    with new_data(buffer.directory, processes) as (folder, map_batches):
        (folder / "buffer").mkdir()
        meta = _fill(recipe, folder, Roller(*where, processes, map_batches, repeat))
        (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    return buffer


def _fill(recipe: Recipe, directory: Path, roller: Roller) -> dict[str, Any]:
    """Writes the episodes; returns their description."""
    family = _family(recipe)
    share = -(-recipe.search_episodes // len(recipe.tasks))
    found = {
        task: search(roller, family, task, share, _rng(recipe, 1, number))
        for number, task in enumerate(recipe.tasks)
    }
    plan = _Plan(recipe, directory / "buffer", found)
    returns = np.full(recipe.episodes, np.inf)
    attempts: dict[int, Attempt] = {}
    missing = np.arange(recipe.episodes)
    for tries in range(ROUNDS):
        drawn = {number: plan.draw(number, tries) for number in missing.tolist()}
        attempts |= drawn
        drawn = list(drawn.values())
        returns[missing] = roller.returns(family, drawn, "episodes")
        missing = missing[returns[missing] > [attempt.limit for attempt in drawn]]
        if not missing.size:
            return _meta(recipe, found, attempts, returns)
    raise ValueError(
        f"{missing.size} of {recipe.episodes} episodes returned more than "
        f"{recipe.cap=} of the best, {ROUNDS} times over: raise the cap, or search "
        f"longer than {recipe.search_episodes=}"
    )


def _rng(recipe: Recipe, *place: int) -> np.random.Generator:
    return np.random.default_rng([recipe.seed, *place])


def _family(recipe: Recipe) -> PolicyFamily:
    if recipe.domain == "cartpole":
        return SwingUp()
    environment = Environment(recipe.domain, recipe.tasks[0])
    noise = Noise(1.0, SCALES[0])
    seeds = _rng(recipe, 0).integers(2**31, size=SCOUTS)
    scouts = [Attempt(recipe.tasks[0], None, noise, int(seed)) for seed in seeds]
    found = [roll_out(environment, None, scout).observation for scout in scouts]
    observations = np.concatenate(found).astype(np.float64)
    # What never moves in a scout's episode must not be blown up when it does.
    std = np.maximum(observations.std(axis=0), LEAST_STD)
    return Linear(observations.mean(axis=0), std, DOMAINS[recipe.domain].action)


class _Plan:
    """Which policy and which noise an episode is rolled out with."""

    def __init__(self, recipe: Recipe, folder: Path, found: dict[str, Found]):
        self._recipe, self._folder, self._found = recipe, folder, found
        count = round(recipe.noise_share * recipe.episodes)
        self._noise_alone = set(_rng(recipe, 2).permutation(recipe.episodes)[:count])
        self._limits, self._strata = {}, {}
        for task, policies in found.items():
            limit = np.inf
            if recipe.cap is not None:
                limit = recipe.cap * float(policies.returns.max())
            self._limits[task] = limit
            self._strata[task] = stratify(policies.returns, limit)

    def draw(self, number: int, tries: int) -> Attempt:
        """Draws the attempt at an episode after `tries` others were above the cap."""
        rng = _rng(self._recipe, 3, number, tries)
        task = self._recipe.tasks[number % len(self._recipe.tasks)]
        parameters = None
        if number in self._noise_alone:
            noise = Noise(rng.choice(EXPONENTS), rng.choice(SCALES))
        else:
            strata = self._strata[task]
            policy = rng.choice(strata[rng.integers(len(strata))])
            parameters = self._found[task].parameters[policy]
            scale = rng.choice(ADDED_SCALES)
            noise = Noise(1.0, scale) if scale else None
        return Attempt(
            task,
            parameters,
            noise,
            int(rng.integers(2**31)),
            self._folder / f"episode_{number:06d}",
            self._limits[task],
        )


def _meta(
    recipe: Recipe,
    found: dict[str, Found],
    attempts: dict[int, Attempt],
    returns: np.ndarray,
) -> dict[str, Any]:
    of_task = {
        task: returns[[n for n in attempts if attempts[n].task == task]]
        for task in recipe.tasks
    }
    return {
        **origin("tools/make_exorl.py", recipe),
        "stored_task": recipe.tasks[0],
        "search_returns": {t: quantiles(found[t].returns) for t in recipe.tasks},
        "returns": {t: quantiles(of_task[t]) for t in recipe.tasks if of_task[t].size},
        "episodes": [
            {
                "episode": number,
                "task": attempt.task,
                "policy": attempt.parameters is not None,
                "noise": attempt.noise and asdict(attempt.noise),
                "return": float(returns[number]),
            }
            for number, attempt in attempts.items()
        ],
    }


def origin(program: str, recipe: Any) -> dict[str, Any]:
    """Returns what made a data set, for its meta.json; recipe: a dataclass."""
    return {
        "generator": f"{program} of Annulus: no data of ExoRL",
        "recipe": asdict(recipe),
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            **environments.versions(),
        },
    }


def describe(buffer: Buffer) -> str:
    """Describes what was made in a few lines."""
    meta = json.loads((buffer.directory / "meta.json").read_text())
    lines = []
    for what, returns in meta["returns"].items():
        row = ", ".join(f"{name} {value:.1f}" for name, value in returns.items())
        lines.append(f"{what}: returns {row}")
    return "\n".join([*lines, f"written to {buffer.directory}"])


def quantiles(returns: np.ndarray) -> dict[str, float]:
    """Returns the quantiles of returns by name, for a meta.json."""
    values = np.percentile(returns, QUANTILES).round(3).tolist()
    return {f"{q}%": value for q, value in zip(QUANTILES, values, strict=True)}
