"""Trajectory files: the episodes of one task, packed.

A directory:

    index.json   format version, what was packed and how, and figures of every episode
    steps.npy    float32: observation, action, what to do and reward of every step

Step t of an episode is the observation, the action taken there, and its reward; where
they are known, between these the action that should have been taken. Episodes may be of
different worlds, which have their own dynamics or rewards, and are numbered.
Episodes follow each other; where all have T steps, `steps.npy` is (episodes, T,
columns), and (steps, columns) otherwise. index.json has its size and SHA-256. Opening a
file of any size reads no steps.
"""

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data.json_text import is_number
from data.new_directory import NewDirectory, refuse_bucket
from data.stored_array import StoredArray
from data.versioned import (
    FILES,
    check_files,
    describe_file,
    digest,
    read_versioned,
    whole_number,
)

VERSION = 1
INDEX = "index.json"
STEPS = "steps.npy"
REMEDY = "make them again: tools/pack_exorl.py, or tools/make_dark_room.py"
# What NumPy's header takes for any array of three axes; it keeps room to grow.
HEADER_BYTES = 128


@dataclass(frozen=True, eq=False)
class TrajectoryFile:
    """Packed episodes.

    steps: float32 (steps of all episodes, columns), on disk: observation, action,
      target if `has_targets`, reward.
    offsets: int64 (episodes + 1,), where each episode starts, and where the last ends.
    returns: float64 (episodes,), sums of rewards.
    worlds: int64 (episodes,), the world of each episode; 0 where there is one.
    observation_mean, observation_std: float32 (observation size,), over all steps.
    index: all of index.json.
    """

    directory: Path
    steps: StoredArray
    offsets: np.ndarray
    returns: np.ndarray
    worlds: np.ndarray
    observation_mean: np.ndarray
    observation_std: np.ndarray
    index: Mapping[str, Any]

    @classmethod
    def open(cls, directory: Path) -> "TrajectoryFile":
        """Opens a trajectory file after checking that it is what index.json says.

        Raises:
          FileNotFoundError: the directory or one of its files is missing.
          ValueError: a file is empty, cut short, of another format or damaged.
        """
        directory = Path(directory)
        index = _read_index(directory)
        try:
            for name in ("observation_size", "action_size"):
                whole_number(name, index[name], least=1)
            whole_number("action_repeat", index.get("action_repeat", 1), least=1)
            for steps in index["lengths"]:
                whole_number("a length", steps, least=1)
            lengths = np.array(index["lengths"], np.int64)
            returns = _numbers(index, "returns", np.float64)
            worlds = index.get("worlds", [0] * len(lengths))
            for world in worlds:
                whole_number("a world", world)
            worlds = np.array(worlds, np.int64)
            mean = _numbers(index, "observation_mean", np.float32)
            std = _numbers(index, "observation_std", np.float32)
            columns = index["observation_size"] + index["action_size"] + 1
            if _flag(index, "has_targets"):
                columns += index["action_size"]
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise ValueError(
                f"{directory / INDEX} does not describe trajectories "
                f"({type(error).__name__}: {error}): {REMEDY}"
            ) from error
        episodes = {len(lengths), len(returns), len(worlds)}
        fitting = len(episodes) == 1 and lengths.size and std.min() >= 0
        if not fitting or not len(mean) == len(std) == index["observation_size"]:
            raise ValueError(f"{directory / INDEX} contradicts itself: {REMEDY}")
        path = directory / STEPS
        _check_file(path, _shape(lengths, columns))
        rows = int(lengths.sum()), columns
        steps = StoredArray(path, np.dtype(np.float32), rows, offset=HEADER_BYTES)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        return cls(directory, steps, offsets, returns, worlds, mean, std, index)

    def read(self, places: np.ndarray) -> np.ndarray:
        """Reads the steps at these places, int of any shape: float32 (..., columns).

        Raises:
          ValueError: a number is not finite.
          OSError: they cannot be read.
        """
        found = self.steps.take(places)
        finite = np.isfinite(found).all(axis=-1)
        if not finite.all():
            raise ValueError(
                f"{self.steps.path} has a number that is not finite in step "
                f"{places[~finite].flat[0]} (in episode "
                f"{np.searchsorted(self.offsets, places[~finite].flat[0], 'right') - 1}"
                f"): it was damaged; copy it again or {REMEDY}"
            )
        return found

    @property
    def lengths(self) -> np.ndarray:
        """Steps of each episode, int64 (episodes,)."""
        return np.diff(self.offsets)

    @property
    def observation_size(self) -> int:
        return self.index["observation_size"]

    @property
    def action_size(self) -> int:
        return self.index["action_size"]

    @property
    def has_targets(self) -> bool:
        """Whether the steps say what should have been done there."""
        return self.index.get("has_targets", False)

    @property
    def action_repeat(self) -> int:
        """Steps of the environment for which each action is held."""
        return self.index.get("action_repeat", 1)


def identify(directory: Path, *, compare: bool = False) -> tuple[str, str]:
    """Returns a file's digest, and a note of what was not compared with it.

    compare: a file of any size with its digest (see `versioned.check_files`).

    Raises:
      FileNotFoundError, ValueError: it is missing or damaged.
    """
    path, index = Path(directory) / INDEX, _read_index(Path(directory))
    return digest(index), check_files(path, index, whole=compare, remedy=REMEDY)


def top_episodes(
    returns: np.ndarray, lengths: np.ndarray, share: float = 0.1
) -> np.ndarray:
    """Returns the episodes of the highest returns, up to a share of all steps.

    At least one: what behaviour cloning of the best 10 % (BC-10%) is trained on in the
    Decision Transformer paper (2106.01345). Sorted from best to worst; of equal
    returns, the later episode comes first, as there.

    Args:
      returns, lengths: of each episode.
      share: of the steps, above 0 and up to 1.

    Raises:
      ValueError: the share is out of range, or an episode has no return.
    """
    if not 0 < share <= 1 or not len(returns) == len(lengths) > 0:
        raise ValueError(
            f"{share=} of {len(returns)} episodes must be above 0, up to 1, and of "
            f"some episodes, of which {len(lengths)} have a length"
        )
    if np.isnan(returns).any():
        raise ValueError(f"episode {np.argmax(np.isnan(returns))} has no return")
    best_first = np.argsort(returns, kind="stable")[::-1]
    within = np.cumsum(lengths[best_first]) <= share * np.sum(lengths)
    return best_first[: max(int(within.sum()), 1)]


@dataclass
class _Moments:
    """Mean, and squared differences from it, joined part by part (Chan et al.)."""

    count: int = 0
    mean: Any = 0.0
    squares: Any = 0.0

    def add(self, values: np.ndarray) -> None:
        """Joins (n, columns) more."""
        values = values.astype(np.float64)
        count, mean = len(values), values.mean(axis=0)
        total = self.count + count
        step = mean - self.mean
        self.squares += ((values - mean) ** 2).sum(axis=0)
        self.squares += step**2 * (self.count * count / total)
        self.mean = self.mean + step * (count / total)
        self.count = total

    @property
    def std(self) -> np.ndarray:
        return np.sqrt(self.squares / self.count)


@dataclass
class TrajectoryWriter:
    """Streams episodes to a new trajectory file, which appears whole or not at all.

    A context manager: files are written to a hidden sibling of `directory`, which
    takes its name when the block ends, and is removed when the block raises. What is
    put into `about` until then comes to stand in index.json.

    Raises:
      FileExistsError: `directory` exists and is not empty; nothing in it is touched.
      ValueError: the block ends without an episode.
    """

    directory: Path
    about: dict[str, Any]
    lengths: list[int] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)
    worlds: list[int] = field(default_factory=list)
    _sizes: tuple[int, ...] = ()
    _moments: _Moments = field(default_factory=_Moments)

    def __enter__(self) -> "TrajectoryWriter":
        self.directory = Path(self.directory)
        self._new = NewDirectory(self.directory)
        self._file = (self._new.partial / STEPS).open("wb")
        self._file.write(bytes(HEADER_BYTES))
        return self

    def write(
        self,
        observation: np.ndarray,
        action: np.ndarray,
        reward: np.ndarray,
        *,
        target: np.ndarray | None = None,
        world: int = 0,
    ) -> None:
        """Appends an episode of T steps: (T, observation), (T, action) and (T,).

        target: what should have been done, in the form of the actions; for all episodes
          or none. world: number of the world that the episode is of, from 0.

        Raises:
          ValueError: the shapes are not these, or the sizes those of the episodes
            before; there are no steps; or a number is not finite.
        """
        parts = observation, action, *([] if target is None else [target])
        shapes = *(part.shape for part in parts), reward.shape
        if (
            [len(shape) for shape in shapes] != [2] * len(parts) + [1]
            or len({shape[0] for shape in shapes}) > 1
            or 0 in (*shapes[0], *shapes[1])
            or len({shape[1] for shape in shapes[1:-1]}) > 1
        ):
            aim = "" if target is None else f", {target.shape=}"
            raise ValueError(
                f"episode {len(self.lengths)} has {observation.shape=}, {action.shape=}"
                f"{aim}, {reward.shape=}: give (T, observation), (T, action)"
                f"{aim and ' twice'} and (T,), and at least one of each"
            )
        if world < 0:
            raise ValueError(
                f"{world=} of episode {len(self.lengths)} must be 0 or more"
            )
        sizes = tuple(part.shape[1] for part in parts)
        if self.lengths and sizes != self._sizes:
            raise ValueError(
                f"episode {len(self.lengths)} has observations and actions of {sizes}, "
                f"those before of {self._sizes}: pack one domain at a time"
            )
        self._sizes = sizes
        rows = np.column_stack([*parts, reward]).astype("<f4")
        if not np.isfinite(rows).all():
            raise ValueError(
                f"episode {len(self.lengths)} has numbers that are not finite in "
                f"float32, the first in step {np.argmin(np.isfinite(rows).all(axis=1))}"
            )
        self._file.write(rows.tobytes())
        self.lengths.append(len(rows))
        self.returns.append(float(rows[:, -1].sum(dtype=np.float64)))
        self.worlds.append(int(world))
        self._moments.add(rows[:, : self._sizes[0]])

    def __exit__(self, kind: type | None, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._file.close()
            self._new.remove()

    def _finish(self) -> None:
        if not self.lengths:
            raise ValueError(f"no episodes were written to {self.directory}")
        self._file.seek(0)
        self._file.write(_header(_shape(np.array(self.lengths), sum(self._sizes) + 1)))
        self._file.close()
        index = {
            "version": VERSION,
            **self.about,
            "observation_size": self._sizes[0],
            "action_size": self._sizes[1],
            "has_targets": len(self._sizes) > 2,
            "observation_mean": self._moments.mean.tolist(),
            "observation_std": self._moments.std.tolist(),
            "lengths": self.lengths,
            "returns": self.returns,
            "worlds": self.worlds,
            FILES: {STEPS: describe_file(self._new.partial / STEPS)},
        }
        (self._new.partial / INDEX).write_text(json.dumps(index, indent=1) + "\n")
        self._new.appear()


def _shape(lengths: np.ndarray, columns: int) -> tuple[int, ...]:
    uniform = (lengths == lengths[0]).all()
    rows = (len(lengths), int(lengths[0])) if uniform else (int(lengths.sum()),)
    return *rows, columns


def _header(shape: tuple[int, ...]) -> bytes:
    header = io.BytesIO()
    form = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, form)
    if header.tell() != HEADER_BYTES:
        raise RuntimeError(f"NumPy's header has {header.tell()} bytes for {shape=}")
    return header.getvalue()


def _numbers(index: Mapping[str, Any], name: str, dtype: type) -> np.ndarray:
    """Reads a list of the description, (n,)."""
    found, most = index[name], float(np.finfo(dtype).max)
    if type(found) is not list or not all(map(is_number, found)):
        raise ValueError(f"{name} must be a list of finite numbers")
    if max(map(abs, found), default=0) > most:
        raise ValueError(f"{name} has a number above {most}")
    return np.array(found, dtype)


def _flag(index: Mapping[str, Any], name: str) -> bool:
    """Reads a truth value of the description; False where it is not."""
    found = index.get(name, False)
    if type(found) is not bool:
        raise ValueError(f"{name}={found!r} must be true or false")
    return found


def _read_index(directory: Path) -> dict[str, Any]:
    refuse_bucket(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"there are no trajectories {directory}: {REMEDY}")
    return read_versioned(
        directory / INDEX, VERSION, what="these are not trajectories", remedy=REMEDY
    )


def _check_file(path: Path, shape: tuple[int, ...]) -> None:
    """Checks that the file holds exactly this array."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {REMEDY}")
    size = path.stat().st_size
    expected = HEADER_BYTES + int(np.prod(shape)) * np.dtype(np.float32).itemsize
    with path.open("rb") as file:
        intact = size == expected and file.read(HEADER_BYTES) == _header(shape)
    if not intact:
        raise ValueError(
            f"{path} has {size} bytes, but {INDEX} says an array of {shape}, which is "
            f"{expected}: the file was cut short or replaced; copy it again or {REMEDY}"
        )
