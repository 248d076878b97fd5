"""The trajectories of a config of task "exorl", and which episodes of them are used."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np

from data.agents import trajectory_file
from data.agents.chains import split_episodes, top_episodes
from data.agents.trajectory_file import TrajectoryFile
from data.remote import as_path
from tasks.config_errors import names_fields

SIZES = ("observation_size", "action_size")
"""Fields of config.agent that are 0 where the trajectories say them."""


def directory(config: ml_collections.ConfigDict) -> Path:
    """Returns the directory of the packed trajectories.

    Raises:
      ValueError: the config names none.
    """
    if not config.data.trajectories:
        raise ValueError(
            'config.data.trajectories="" names no trajectories: give the directory '
            "that tools/pack_exorl.py or tools/make_dark_room.py made"
        )
    return as_path(config.data.trajectories)


def identify(config: ml_collections.ConfigDict) -> tuple[str, str, str]:
    """Returns the data's field, its digest, and a note of what was not compared.

    Raises:
      FileNotFoundError, ValueError: the trajectories are missing or damaged.
    """
    digest, note = trajectory_file.identify(
        directory(config), compare=config.data.compare_digests
    )
    return "data.trajectories", digest, note


@names_fields
def opened(config: ml_collections.ConfigDict) -> TrajectoryFile:
    """Opens the packed trajectories.

    Raises:
      FileNotFoundError, ValueError: they are missing or damaged, or do not match the
        config.
    """
    file = TrajectoryFile.open(directory(config))
    agent = config.agent
    longest = int(file.lengths.max())
    for name in SIZES:
        if agent[name] not in (0, getattr(file, name)):
            raise ValueError(
                f"config.agent.{name}={agent[name]}, but {file.directory} has "
                f"{getattr(file, name)}: set the config to that, or to 0"
            )
    if longest > agent.episode_steps:
        raise ValueError(
            f"{config.agent.episode_steps=}, but {file.directory} has an episode of "
            f"{longest} steps: set the config to that, and context_tokens to hold it"
        )
    return file


def of_split(
    config: ml_collections.ConfigDict, file: TrajectoryFile, split: str
) -> np.ndarray:
    """Returns the numbers of all episodes of a split, of SPLITS.

    Raises:
      ValueError: there are too few to split.
    """
    data = config.data
    return split_episodes(file.worlds, data.held_out_share, data.split_seed)[split]


def check_trained(
    config: ml_collections.ConfigDict, settings: Mapping[str, Any]
) -> None:
    """Refuses other trajectories, or others held out, than an agent was trained with.

    settings: that its parameters were saved with; empty where they are not known.

    Raises:
      ValueError: one differs, with both values.
    """
    field, digest, _ = identify(config)
    names = "held_out_share", "split_seed"
    here = {f"data.{name}": config.data[name] for name in names}
    for name, given in (here | {f"{field}.contents": digest}).items():
        trained = settings.get(name, given)
        if trained != given:
            raise ValueError(
                f"config.{name}={given}, but {config.workdir} was trained with "
                f"{trained}: what is held out here may be what it was trained on; set "
                "it back"
            )


def episodes(
    config: ml_collections.ConfigDict, file: TrajectoryFile, split: str
) -> np.ndarray:
    """Returns the numbers of a split's episodes that are read: the best, or all.

    Raises:
      ValueError: a share that leaves none.
    """
    numbers = of_split(config, file, split)
    if config.data.top_share == 1:
        return numbers
    lengths = file.lengths[numbers]
    returns = file.returns[numbers]
    return np.sort(numbers[top_episodes(returns, lengths, config.data.top_share)])
