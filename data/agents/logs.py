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

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from data.agents.episodes import ACTION_TOLERANCE, BadEpisode
from data.agents.trajectory_file import TrajectoryFile, TrajectoryWriter
from data.files import describe_file

NEEDED = ("observations", "actions", "rewards")
ENDS = ("terminations", "truncations")


def read_log(path: Path) -> dict[str, np.ndarray]:
    """Reads the arrays of a file, with T or T + 1 rows; all but two are (T,).

    Raises:
      ValueError: it is damaged, arrays are missing, of unlike lengths or no numbers, or
        an action is outside [-1, 1].
    """
    try:
        with path.open("rb") as file, np.load(file) as archive:
            read = dict(archive)
    except Exception as error:  # of damaged bytes: not a closed list
        raise ValueError(f"unreadable npz ({error})") from error
    if "observation" in read:
        read["observations"] = read["observation"]
        for name in {"action", "reward"} & read.keys():
            read[f"{name}s"] = read[name][1:]
        if "discount" in read:
            read["terminations"] = read["discount"][1:] == 0
    missing = [name for name in NEEDED if name not in read]
    if missing:
        raise ValueError(f"missing {missing}, has {sorted(read)}")
    log = {name: np.atleast_1d(read[name]) for name in NEEDED}
    steps = len(log["actions"])
    log |= {name: read.get(name, np.zeros(steps, bool)) for name in ENDS}
    for name, values in log.items():
        sizes = (steps, steps + 1) if name == "observations" else (steps,)
        rows = len(values) if name in NEEDED[:2] else values.size
        if rows not in sizes or values.dtype.kind not in "biuf":
            raise ValueError(
                f"{name} must have numbers for each of {steps} actions, got "
                f"{values.dtype} of {values.shape}"
            )
        log[name] = values.reshape(rows, -1) if name in NEEDED[:2] else values.ravel()
    is_outside = ~(np.abs(log["actions"]) <= 1 + ACTION_TOLERANCE).all(axis=1)
    if is_outside.any():
        step = int(is_outside.argmax())
        raise ValueError(
            f"actions must be in [-1, 1], got {log['actions'][step].tolist()} in step "
            f"{step}: scale them, and write numbers of discrete ones as one-hot rows"
        )
    return log


def pack_logs(files: Sequence[Path], directory: Path) -> TrajectoryFile:
    """Packs the episodes of files, whose rewards are taken as they are.

    Raises:
      BadEpisode: as `read_log`, or episodes have unlike sizes.
      FileExistsError: `directory` exists already; it is not touched.
    """
    about = {"domain": "log", "task": directory.name, "sources": []}
    with TrajectoryWriter(directory, about) as writer:
        for path in files:
            try:
                _write(writer, read_log(path))
            except ValueError as error:
                raise BadEpisode(path, str(error)) from error
            about["sources"].append({"file": path.name, **describe_file(path)})
    return TrajectoryFile.open(directory)


def _write(writer: TrajectoryWriter, log: dict[str, np.ndarray]) -> None:
    """Writes the episodes of a file, each up to its own end."""
    terminated = log["terminations"].astype(bool)
    is_end = terminated | log["truncations"].astype(bool)
    is_end[-1:] = True
    for begin, end in pairwise([0, *np.flatnonzero(is_end) + 1]):
        steps = slice(begin, end)
        writer.write(
            log["observations"][steps],
            log["actions"][steps],
            log["rewards"][steps],
            terminated=bool(terminated[end - 1]),
        )
