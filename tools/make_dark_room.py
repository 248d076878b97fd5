"""Makes trajectories of Dark Room, every goal a world of its own, in seconds.

    python -m tools.make_dark_room --room 10x10 --recorded exploration \\
        --output trajectories/dark_room/10x10/exploration
    python -m tools.make_dark_room --room 9x9 --recorded learning \\
        --output trajectories/dark_room/9x9/learning

What is written is packed already: a trajectory file for task "exorl", which knows the
best action of every step. Kinds of records are

    exploration   walks from cell to cell, drawn evenly; a tenth to the goal, with any
                  share of chance: for Decision-Pretrained Transformers
    learning      of each goal what tabular Q-learning did, from nothing on: for
                  Algorithm Distillation

The same seed makes the same files.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from data.agents.dark_room import ROOMS, DarkRoom, Recorded, learn, one_hot, record
from data.agents.trajectory_file import TrajectoryFile, TrajectoryWriter
from data.remote import as_path
from tasks.command_line import Parser, as_program, at_least

KINDS = ("exploration", "learning")
STEPS = 30_000
"""Of each goal, where the number of episodes is not given."""
KNOWING = 0.1
"""Share of the explorers that walk to the goal. Where more found it, or fewer cells
were seen, what is left to explore would be seldom learnt."""


def make(
    room_name: str, kind: str, episodes: int, seed: int, directory: Path
) -> TrajectoryFile:
    """Records `episodes` of every goal of a room, and packs them.

    Raises:
      FileExistsError: something has that name already; it is not touched.
    """
    room = ROOMS[room_name]
    rng = np.random.default_rng(seed)
    about = {"domain": "dark_room", "task": room_name, "recorded": kind, "seed": seed}
    about["worlds_described"] = [{"goal": goal.tolist()} for goal in room.goals]
    with TrajectoryWriter(directory, about) as writer:
        for worlds, recorded in _recorded(room, kind, episodes, rng):
            for world, places, actions, best_actions, rewards in zip(
                worlds, *recorded, strict=True
            ):
                seen = room.observe(places)
                best = one_hot(best_actions)
                writer.write(seen, one_hot(actions), rewards, target=best, world=world)
    return TrajectoryFile.open(directory)


def _recorded(
    room: DarkRoom, kind: str, episodes: int, rng: np.random.Generator
) -> Iterator[tuple[np.ndarray, Recorded]]:
    """Yields some episodes, and their worlds; those of a world in their order."""
    worlds = np.arange(len(room.goals))
    if kind == "learning":
        for recorded in learn(room, room.goals, episodes, rng):
            yield worlds, recorded
        return
    for world in worlds:
        strays = (rng.random(episodes) >= KNOWING).astype(float)
        epsilon = rng.random(episodes)
        of_all = np.full(episodes, world)
        yield of_all, record(room, room.goals[of_all], strays, epsilon, rng)


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--room", choices=list(ROOMS), required=True, help="its size")
    add("--recorded", choices=KINDS, required=True)
    add("--output", required=True, type=as_path, help="directory of the trajectories")
    episodes = f"of each goal (default: those of {STEPS:,} steps)"
    add("--episodes", type=at_least(2), help=episodes)
    add("--seed", default=0, type=at_least(0), help="default: %(default)s")
    chosen = parser.parse_args(arguments)
    episodes = chosen.episodes or STEPS // ROOMS[chosen.room].steps
    file = make(chosen.room, chosen.recorded, episodes, chosen.seed, chosen.output)
    print(file.describe())


if __name__ == "__main__":
    sys.exit(main())
