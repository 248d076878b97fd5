"""Packs a Minari dataset for training; or writes packed trajectories as one.

    python -m tools.pack_minari --dataset D4RL/pen/human-v2 --cache trajectories
    python -m tools.pack_minari --dataset annulus/walker-v0 \\
        --trajectories trajectories/walker/rnd/run

The first reads what `minari download` brought, with gymnasium spaces of numbers (also
in dictionaries and tuples) and actions of a bounded Box or of one Discrete number, and
writes trajectories/minari/D4RL/pen/human-v2; `tools.evaluate exorl` rolls agents out in
the dataset's own environment. The second writes the steps of the first world. Packed
trajectories have no state after the last action: the last one stands there twice.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.agents.environments import INSTALL
from data.agents.trajectory_file import TrajectoryFile, TrajectoryWriter
from tasks.command_line import Parser, as_program
from tools.lib.exorl.scenes import flat, to_agent


def check_spaces(name: str) -> None:
    """Raises ValueError if Minari, to know a dataset's spaces, would run its code."""
    from minari.dataset.minari_storage import MinariStorage
    from minari.storage.datasets_root_dir import get_dataset_path

    about = MinariStorage.read_raw_metadata(Path(get_dataset_path(name)) / "data")
    if not {"observation_space", "action_space"} <= about.keys():
        raise ValueError(
            f"{name} must have an observation_space and an action_space in its "
            "metadata: without them Minari runs the code that it names as environment"
        )


def pack(dataset: Any, directory: Path, clip: bool = False) -> TrajectoryFile:
    """Packs a `minari.MinariDataset`.

    clip: whether actions outside their Box become the nearest in it.

    Raises:
      FileExistsError: something has that name already; it is not touched.
      ValueError: as `to_agent` and `flat`, with the episode's number.
    """
    about = {"domain": "minari", "task": dataset.id}
    if dataset.env_spec is not None:
        about["environment"] = dataset.env_spec.to_json()
    space = dataset.action_space
    with TrajectoryWriter(directory, about) as writer:
        for number, episode in enumerate(dataset.iterate_episodes()):
            actions = episode.actions
            if clip and hasattr(space, "low"):
                actions = np.clip(actions, space.low, space.high)
            try:
                actions = to_agent(actions, space)
                seen = flat(episode.observations)[: len(actions)]
            except ValueError as error:
                raise ValueError(f"episode {number}: {error}") from error
            writer.write(seen, actions, np.asarray(episode.rewards, np.float64))
    return TrajectoryFile.open(directory)


def write(file: TrajectoryFile, name: str) -> Any:
    """Writes the episodes of the first world as a Minari dataset, which is returned.

    Raises:
      ValueError: there is such a dataset already, or Minari refuses the name.
    """
    import minari
    from gymnasium.spaces import Box
    from minari.data_collector import EpisodeBuffer

    buffers = []
    observed = file.observation_size
    for number in np.flatnonzero(file.worlds == file.worlds[0]):
        steps = file.read(np.arange(*file.offsets[number : number + 2]))
        ended = np.arange(len(steps)) == len(steps) - 1
        buffers.append(
            EpisodeBuffer(
                id=int(number),
                observations=np.concatenate([steps, steps[-1:]])[:, :observed],
                actions=steps[:, observed : observed + file.action_size],
                rewards=steps[:, -1],
                terminations=np.zeros_like(ended),
                truncations=ended,
            )
        )
    return minari.create_dataset_from_buffers(
        name,
        buffers,
        observation_space=Box(-np.inf, np.inf, (observed,)),
        action_space=Box(-1, 1, (file.action_size,)),
    )


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    parser = Parser(__doc__)
    add = parser.add_argument
    clip = "pack the nearest action of their Box for those outside"
    add("--clip-actions", action="store_true", help=clip)
    add("--dataset", required=True, help="Minari's name of it")
    one = parser.add_mutually_exclusive_group(required=True)
    packed = "directory of packed trajectories, to which it is added"
    one.add_argument("--cache", type=Path, help=packed)
    one.add_argument("--trajectories", type=Path, help="packed ones, to write as it")
    chosen = parser.parse_args(arguments)
    try:
        import minari
    except ImportError as error:
        raise ImportError(f"this needs {error.name}: {INSTALL}") from error
    if chosen.trajectories:
        made = write(TrajectoryFile.open(chosen.trajectories), chosen.dataset)
        print(f"{made.total_episodes:,} episodes written as {made.id}")
        return
    check_spaces(chosen.dataset)
    dataset = minari.load_dataset(chosen.dataset)
    directory = chosen.cache / "minari" / chosen.dataset
    print(pack(dataset, directory, chosen.clip_actions).describe())


if __name__ == "__main__":
    sys.exit(main())
