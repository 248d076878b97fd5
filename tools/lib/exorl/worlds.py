"""What tools/make_worlds.py makes: learning histories of many cart-poles."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data.agents.environments import Environment
from data.agents.episodes import WORLD, Buffer, write_episode
from data.agents.hidden_physics import DOMAIN, HiddenPhysics
from tools.lib.exorl.controller import controller
from tools.lib.exorl.policies import Noise, Policy
from tools.lib.exorl.replay import EXPONENTS, origin, quantiles
from tools.lib.exorl.rollouts import MOST_STEPS, Attempt, new_data, roll_out

ALGORITHM, TASK = "worlds", "swingup"
# Standard deviation of an episode's grade around that of its place.
SCATTER = 0.1
# Of the noise at grade 0, in actions; it falls to none at grade 1.
SCALES = 0.5, 1.5


@dataclass(frozen=True)
class WorldsRecipe:
    """Worlds to draw and record; equal recipes make the same files.

    worlds: how many; the first ones are the same for any number.
    episodes: of each world.
    action_repeat: steps that every action is held for.

    Raises:
      ValueError: a field is not what it has to be.
    """

    worlds: int
    episodes: int
    seed: int
    action_repeat: int = 5

    def __post_init__(self):
        if self.worlds < 1 or self.episodes < 1 or self.seed < 0:
            raise ValueError(
                f"{self.worlds=} and {self.episodes=} must be at least 1, and "
                f"{self.seed=} at least 0"
            )
        if not 1 <= self.action_repeat <= MOST_STEPS:
            raise ValueError(
                f"action_repeat={self.action_repeat} must be at least 1, and at most "
                f"the {MOST_STEPS} steps of an episode"
            )


@dataclass(frozen=True)
class Grade:
    """How well a policy does, between noise and a controller that knows its world.

    share: of what it does that is the controllers', from 0 to 1.
    doubt: of that, the share of the controller of another world, from 0 to 1.
    noise: what is added.
    """

    share: float
    doubt: float
    noise: Noise

    @classmethod
    def draw(cls, rng: np.random.Generator, place: float) -> "Grade":
        """Draws a grade; place: of the episode in its world, from 0 to 1."""
        grade = np.clip(place + SCATTER * rng.normal(), 0, 1)
        # As noise takes more than its share of the return, so that returns rise evenly.
        share = float(np.sqrt(grade))
        doubt = (1 - share) * rng.uniform()
        scale = (1 - share) * rng.uniform(*SCALES)
        return cls(share, doubt, Noise(float(rng.choice(EXPONENTS)), scale))

    def policy(self, own: Policy, other: Policy) -> Policy:
        """Mixes the policy that knows its world with another world's."""

        def act(observation: np.ndarray) -> np.ndarray:
            right, wrong = (np.clip(p(observation), -1, 1) for p in (own, other))
            return self.share * ((1 - self.doubt) * right + self.doubt * wrong)

        return act


def make(recipe: WorldsRecipe, output: Path, processes: int) -> Buffer:
    """Writes `output`/cartpole/worlds, whole or not at all.

    In it are world_000, … of ExoRL's format, with their hidden physics in meta.json.
    Their episodes are in the order in which a learner would have made them.

    Args:
      recipe: what is made.
      output: directory of data sets, with or without others.
      processes: how many record worlds; they change nothing of what is made.

    Raises:
      FileExistsError: there are such worlds already; they are not touched.
      ValueError: there are no processes.
      ImportError: dm_control is missing.
    """
    buffer = Buffer(output, DOMAIN, ALGORITHM)
    with new_data(buffer.directory, processes) as (folder, map_worlds):
        record = functools.partial(_record, recipe, folder)
        numbers = range(recipe.worlds)
        progress = {"total": recipe.worlds, "unit": " worlds", "disable": None}
        returns = np.array(list(tqdm(map_worlds(record, numbers), **progress)))
        meta = origin("tools/make_worlds.py", recipe)
        meta["returns"] = {
            "all": quantiles(returns),
            "best of a world": quantiles(returns.max(axis=1)),
            "last of a world": quantiles(returns[:, -1]),
        }
        _write(folder / "meta.json", meta)
    return buffer


def _record(recipe: WorldsRecipe, folder: Path, number: int) -> list[float]:
    """Records a world in a folder of its own; returns its episodes' returns."""
    directory = folder / WORLD.format(number)
    (directory / "buffer").mkdir(parents=True)
    rng = np.random.default_rng([recipe.seed, number])
    world, other = HiddenPhysics.draw(rng), HiddenPhysics.draw(rng)
    environment = Environment(DOMAIN, TASK, world)
    knowing = [controller(one, recipe.action_repeat) for one in (world, other)]
    rows = []
    for episode, place in enumerate(np.linspace(0, 1, recipe.episodes)):
        rng = np.random.default_rng([recipe.seed, number, 1 + episode])
        grade = Grade.draw(rng, place)
        stem = directory / "buffer" / f"episode_{episode:06d}"
        attempt = Attempt(TASK, None, grade.noise, int(rng.integers(2**31)), stem)
        act = grade.policy(*knowing)
        done = roll_out(environment, act, attempt, recipe.action_repeat)
        write_episode(done)
        rows.append(
            {
                "episode": episode,
                "share": grade.share,
                "doubt": grade.doubt,
                "noise": vars(grade.noise),
                "return": float(done.reward.sum(dtype=np.float64)),
            }
        )
    meta = origin("tools/make_worlds.py", recipe) | {
        "hidden_physics": world.describe(),
        "doubted_physics": other.describe(),
        "stored_task": TASK,
        "episodes": rows,
    }
    _write(directory / "meta.json", meta)
    return [row["return"] for row in rows]


def _write(path: Path, meta: dict[str, Any]) -> None:
    path.write_text(json.dumps(meta, indent=1) + "\n")
