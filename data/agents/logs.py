"""Episodes that bring their own rewards, as a robot's log: .npz files of one task.

    observations  (T, …), or (T + 1, …) with what was seen after the last action
    actions       (T, A), in [-1, 1]
    rewards       (T,)
    terminations  (T,), optional: true where the task was over after the step
    truncations   (T,), optional: true where the episode was cut after the step

Names and meaning are those of gymnasium and Minari. A file is one episode, or several
in a row, each up to a step where one of the last two is true. What goes on to the end
of the file was cut there. Files of ExoRL's names (see `episodes`) are read too: their
row 0 has no step, physics are not needed, and a discount of 0 is a termination.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.agents.episodes import ACTION_TOLERANCE, BadEpisode
from data.agents.trajectory_file import TrajectoryFile, TrajectoryWriter
from data.files import describe_file

NEEDED = ("observations", "actions", "rewards")
EXORL_NAMES = {"observation": "observations", "action": "actions", "reward": "rewards"}


class LoggedEpisode(NamedTuple):
    """Steps of an episode, each (T, …), and whether the task was over at its end."""

    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    terminated: bool


def log_files(inputs: Sequence[Path]) -> list[Path]:
    """Lists the .npz files of files and folders, those of a folder by their names.

    Raises:
      FileNotFoundError: an input is missing, or a folder has none.
    """
    files = []
    for path in inputs:
        inside = sorted(path.rglob("*.npz")) if path.is_dir() else [path]
        if not inside or not path.exists():
            raise FileNotFoundError(
                f"{path} must be an .npz file, or a folder that has some: arrays "
                f"{', '.join(NEEDED)} of an episode (np.savez)"
            )
        files += inside
    return files


def read_log(path: Path) -> Iterator[LoggedEpisode]:
    """Yields the episodes of a file.

    Raises:
      BadEpisode: it is damaged, arrays are missing, of unlike lengths or no numbers, or
        an action is outside [-1, 1].
    """
    try:
        with np.load(path) as archive:
            arrays = _named(dict(archive))
    except Exception as error:  # of damaged bytes: not a closed list
        raise BadEpisode(path, f"unreadable npz ({error})") from error
    missing = [name for name in NEEDED if name not in arrays]
    if missing:
        raise BadEpisode(path, f"missing {missing}, has {sorted(arrays)}")
    steps = len(arrays["actions"])
    for name in ("terminations", "truncations"):
        arrays.setdefault(name, np.zeros(steps, bool))
    for name, values in arrays.items():
        lengths = (steps, steps + 1) if name == "observations" else (steps,)
        is_one = name in ("observations", "actions") or values.size == steps
        if len(values) not in lengths or not is_one or values.dtype.kind not in "biuf":
            raise BadEpisode(
                path,
                f"{name} must have numbers for each of {steps} actions, got "
                f"{values.dtype} of {values.shape}",
            )
    actions = arrays["actions"].reshape(steps, -1)
    is_outside = ~(np.abs(actions) <= 1 + ACTION_TOLERANCE).all(axis=1)
    if is_outside.any():
        step = int(is_outside.argmax())
        raise BadEpisode(
            path,
            f"actions must be in [-1, 1], got {actions[step].tolist()} in step {step}: "
            "scale them, and write numbers of discrete ones as one-hot rows",
        )
    terminations = arrays["terminations"].reshape(steps).astype(bool)
    ends = terminations | arrays["truncations"].reshape(steps).astype(bool)
    ends[-1:] = True
    for begin, end in pairwise([0, *np.flatnonzero(ends) + 1]):
        yield LoggedEpisode(
            observations=arrays["observations"][begin:end].reshape(end - begin, -1),
            actions=actions[begin:end],
            rewards=arrays["rewards"].reshape(steps)[begin:end].astype(np.float64),
            terminated=bool(terminations[end - 1]),
        )


def _named(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays that are read, by gymnasium's names."""
    if "observation" not in arrays:
        names = (*NEEDED, "terminations", "truncations")
        return {name: np.atleast_1d(arrays[name]) for name in names if name in arrays}
    # Row 0 of ExoRL's arrays is the reset: what was seen, and no action or reward.
    named = {new: arrays[old][1:] for old, new in EXORL_NAMES.items() if old in arrays}
    named["observations"] = arrays["observation"]
    if "discount" in arrays:
        named["terminations"] = arrays["discount"][1:] == 0
    return named


def pack_logs(files: Sequence[Path], directory: Path) -> TrajectoryFile:
    """Packs the episodes of files, whose rewards are taken as they are.

    Raises:
      BadEpisode: as `read_log`, or episodes have unlike sizes.
      FileExistsError: `directory` exists already; it is not touched.
    """
    about = {"domain": "log", "task": directory.name, "sources": []}
    with TrajectoryWriter(directory, about) as writer:
        for path in files:
            for episode in read_log(path):
                try:
                    writer.write(
                        episode.observations,
                        episode.actions,
                        episode.rewards,
                        terminated=episode.terminated,
                    )
                except ValueError as error:
                    raise BadEpisode(path, str(error)) from error
            about["sources"].append({"file": path.name, **describe_file(path)})
    return TrajectoryFile.open(directory)
