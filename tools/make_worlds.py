"""Makes learning histories of cart-poles whose physics are hidden, in ExoRL's format.

    python -m tools.make_worlds --output DATA
    python -m tools.pack_exorl --root DATA --domain cartpole --algorithm worlds \\
        --task swingup --action-repeat 5 --cache CACHE

Each world has a motor, masses and a length of its own, which no observation shows:
DATA/cartpole/worlds/world_000/meta.json says them. Its episodes go from noise to a
controller that knows the world, by way of one that believes in another world, as if
they were learnt. The same seed makes the same files.
"""

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data.agents.environments import Environment
from data.agents.episodes import WORLD, Buffer, write_episode
from data.agents.hidden_physics import DOMAIN, HiddenPhysics
from tasks.command_line import as_program, at_least
from tools.lib.exorl import rollouts
from tools.lib.exorl.controller import controller
from tools.lib.exorl.rollouts import EXPONENTS, Noise, quantiles, write_meta

ALGORITHM, TASK, PROGRAM = "worlds", "swingup", "tools/make_worlds.py"
# Standard deviation of an episode's grade around that of its place.
SCATTER = 0.1
# Of the noise at grade 0, in actions; it falls to none at grade 1.
SCALES = 0.5, 1.5


@dataclass(frozen=True)
class WorldsRecipe:
    """Worlds to draw and record.

    worlds: how many; the first ones are the same for any number.
    episodes: of each world.
    action_repeat: steps that every action is held for.
    """

    worlds: int
    episodes: int
    seed: int
    action_repeat: int = 5


def make(recipe: WorldsRecipe, output: Path, processes: int) -> Buffer:
    """Writes `output`/cartpole/worlds, whole or not at all.

    In it are world_000, … of ExoRL's format, with their hidden physics in meta.json.
    Their episodes are in the order in which a learner would have made them.

    Raises:
      FileExistsError: there are such worlds already; they are not touched.
      ValueError: actions would be held for longer than an episode.
      ImportError: dm_control is missing.
    """
    rollouts.check_held(recipe.action_repeat)
    buffer = Buffer(output, DOMAIN, ALGORITHM)
    with rollouts.new_data(buffer.directory, processes) as (folder, map_worlds):
        record = functools.partial(_record, recipe, folder)
        recorded = map_worlds(record, range(recipe.worlds))
        progress = {"total": recipe.worlds, "unit": " worlds", "disable": None}
        returns = np.array(list(tqdm(recorded, **progress)))
        found = {
            "all": quantiles(returns),
            "best of a world": quantiles(returns.max(axis=1)),
            "last of a world": quantiles(returns[:, -1]),
        }
        write_meta(folder, PROGRAM, recipe, returns=found)
    return buffer


def _record(recipe: WorldsRecipe, folder: Path, number: int) -> list[float]:
    """Records a world in a folder of its own; returns its episodes' returns."""
    directory = folder / WORLD.format(number)
    (directory / "buffer").mkdir(parents=True)
    rng = np.random.default_rng([recipe.seed, number])
    world, other = HiddenPhysics.draw(rng), HiddenPhysics.draw(rng)
    environment = Environment(DOMAIN, TASK, world)
    own, others = (controller(one, recipe.action_repeat) for one in (world, other))
    rows = []
    for episode, place in enumerate(np.linspace(0, 1, recipe.episodes)):
        rng = np.random.default_rng([recipe.seed, number, 1 + episode])
        share, doubt, noise = _grade(rng, place)

        def act(
            seen: np.ndarray, share: float = share, doubt: float = doubt
        ) -> np.ndarray:
            right, wrong = (np.clip(p(seen), -1, 1) for p in (own, others))
            return share * ((1 - doubt) * right + doubt * wrong)

        stem = directory / "buffer" / f"episode_{episode:06d}"
        seed, repeat = int(rng.integers(2**31)), recipe.action_repeat
        done = rollouts.roll_out(environment, act, noise, seed, repeat, stem)
        write_episode(done)
        row = {"episode": episode, "share": share, "doubt": doubt, "noise": vars(noise)}
        rows.append(row | {"return": float(done.reward.sum(dtype=np.float64))})
    found: dict[str, Any] = {
        "hidden_physics": vars(world),
        "doubted_physics": vars(other),
        "stored_task": TASK,
        "episodes": rows,
    }
    write_meta(directory, PROGRAM, recipe, **found)
    return [row["return"] for row in rows]


def _grade(rng: np.random.Generator, place: float) -> tuple[float, float, Noise]:
    """Draws how well an episode does, by its place in its world, from 0 to 1.

    Returns which share of an action is the controllers', which share of that the
    controller of another world's, and the noise that is added.
    """
    grade = np.clip(place + SCATTER * rng.normal(), 0, 1)
    # As noise takes more than its share of the return, so that returns rise evenly.
    share = float(np.sqrt(grade))
    doubt = (1 - share) * rng.uniform()
    scale = (1 - share) * rng.uniform(*SCALES)
    return share, doubt, Noise(float(rng.choice(EXPONENTS)), scale)


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    parser = rollouts.recording_arguments(__doc__, episodes=24, action_repeat=5)
    parser.add_argument(
        "--worlds", default=60, type=at_least(1), help="default: %(default)s"
    )
    given = parser.parse_args(arguments)
    recipe = WorldsRecipe(given.worlds, given.episodes, given.seed, given.action_repeat)
    print(rollouts.describe(make(recipe, given.output, given.processes).directory))


if __name__ == "__main__":
    sys.exit(main())
