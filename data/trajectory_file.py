"""Trajectory files: the episodes of one task, packed to be memory-mapped.

A directory:

    index.json   format version, what was packed and how, and figures of every episode
    steps.npy    float32: observation, action and reward of every step

Step t of an episode is what the agent saw, what it did there, and the reward that this
gave. Episodes follow each other; where all have T steps, `steps.npy` is (episodes, T,
columns), and (steps, columns) otherwise. Opening a file of any size reads no steps.
"""

import io
import json
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data.versioned import read_versioned

VERSION = 1
INDEX = "index.json"
STEPS = "steps.npy"
REMEDY = "pack the episodes again with tools/pack_exorl.py"
# What NumPy's header takes for any array of three axes; it keeps room to grow.
HEADER_BYTES = 128


@dataclass(frozen=True, eq=False)
class TrajectoryFile:
    """Packed episodes, memory-mapped.

    steps: float32 (steps of all episodes, columns): observation, action, reward.
    offsets: int64 (episodes + 1,), where each episode starts, and where the last ends.
    returns: float64 (episodes,), sums of rewards.
    observation_mean, observation_std: float32 (observation size,), over all steps.
    index: all of index.json.
    """

    directory: Path
    steps: np.ndarray
    offsets: np.ndarray
    returns: np.ndarray
    observation_mean: np.ndarray
    observation_std: np.ndarray
    index: Mapping[str, Any]

    @classmethod
    def open(cls, directory: Path) -> "TrajectoryFile":
        """Maps a trajectory file after checking that it is what index.json says.

        Raises:
          FileNotFoundError: the directory or one of its files is missing.
          ValueError: a file is empty, cut short, of another format or damaged.
        """
        directory = Path(directory)
        index = _read_index(directory)
        try:
            lengths = np.array(index["lengths"], np.int64)
            returns = np.array(index["returns"], np.float64)
            mean = np.array(index["observation_mean"], np.float32)
            std = np.array(index["observation_std"], np.float32)
            columns = index["observation_size"] + index["action_size"] + 1
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{directory / INDEX} does not describe trajectories "
                f"({type(error).__name__}: {error}): {REMEDY}"
            ) from error
        fitting = len(lengths) == len(returns) and lengths.size and lengths.min() > 0
        if not fitting or not len(mean) == len(std) == index["observation_size"]:
            raise ValueError(f"{directory / INDEX} contradicts itself: {REMEDY}")
        shape = _shape(lengths, columns)
        steps = _map(directory / STEPS, shape).reshape(-1, columns)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        return cls(directory, steps, offsets, returns, mean, std, index)

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
    def action_repeat(self) -> int:
        """Steps of the environment for which each action is held."""
        return self.index.get("action_repeat", 1)


def top_episodes(
    returns: np.ndarray, lengths: np.ndarray, share: float = 0.1
) -> np.ndarray:
    """The episodes of the highest returns that hold up to a share of all steps.

    At least one: what behaviour cloning of the best 10 % (BC-10%) is trained on in the
    Decision Transformer paper (2106.01345). Sorted from best to worst; of equal
    returns, the later episode comes first, as there.

    Args:
      returns, lengths: of each episode.
      share: of the steps, above 0 and up to 1.

    Raises:
      ValueError: the share is none, or there are no episodes.
    """
    if not 0 < share <= 1 or not len(returns):
        raise ValueError(
            f"{share=} of {len(returns)} episodes must be above 0, up to 1, and of "
            "some episodes"
        )
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
    _sizes: tuple[int, int] = (0, 0)
    _moments: _Moments = field(default_factory=_Moments)

    def __enter__(self) -> "TrajectoryWriter":
        self.directory = Path(self.directory)
        refuse_existing(self.directory)
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        name = f".{self.directory.name}.{uuid.uuid4().hex}.partial"
        self._partial = self.directory.with_name(name)
        self._partial.mkdir()
        self._file = (self._partial / STEPS).open("wb")
        self._file.write(bytes(HEADER_BYTES))
        return self

    def write(
        self, observation: np.ndarray, action: np.ndarray, reward: np.ndarray
    ) -> None:
        """Appends an episode of T steps: (T, observation), (T, action) and (T,).

        Raises:
          ValueError: the sizes are not those of the episodes before.
        """
        sizes = observation.shape[1], action.shape[1]
        if self.lengths and sizes != self._sizes:
            raise ValueError(
                f"episode {len(self.lengths)} has observations and actions of {sizes}, "
                f"those before of {self._sizes}: pack one domain at a time"
            )
        self._sizes = sizes
        rows = np.column_stack([observation, action, reward]).astype("<f4")
        self._file.write(rows.tobytes())
        self.lengths.append(len(rows))
        self.returns.append(float(rows[:, -1].sum(dtype=np.float64)))
        self._moments.add(rows[:, : self._sizes[0]])

    def __exit__(self, kind: type | None, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._file.close()
            shutil.rmtree(self._partial, ignore_errors=True)

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
            "observation_mean": self._moments.mean.tolist(),
            "observation_std": self._moments.std.tolist(),
            "lengths": self.lengths,
            "returns": self.returns,
        }
        (self._partial / INDEX).write_text(json.dumps(index, indent=1) + "\n")
        try:
            self._partial.rename(self.directory)
        except OSError:
            # Another process may have packed the same since the block began.
            refuse_existing(self.directory)
            raise


def refuse_existing(directory: Path) -> None:
    """Raises FileExistsError if there is something at `directory`."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    raise FileExistsError(
        f"{directory} already exists and is left as it is: remove it or choose another "
        "output"
    )


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


def _read_index(directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        raise FileNotFoundError(f"there are no trajectories {directory}: {REMEDY}")
    return read_versioned(
        directory / INDEX, VERSION, what="these are no trajectories", remedy=REMEDY
    )


def _map(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Maps an array, having checked that the file holds exactly that."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {REMEDY}")
    size = path.stat().st_size
    expected = HEADER_BYTES + int(np.prod(shape)) * np.dtype(np.float32).itemsize
    with path.open("rb") as file:
        intact = size == expected and file.read(HEADER_BYTES) == _header(shape)
    if not intact:
        raise ValueError(
            f"{path} has {size} bytes, but {INDEX} says an array of {shape}, which is "
            f"{expected}: the file was cut short or replaced; copy it anew or {REMEDY}"
        )
    # A plain array over the map: indexing a np.memmap costs several times as much.
    return np.asarray(np.load(path, mmap_mode="r"))
