"""Trajectory files: the episodes of one task, packed.

A directory:

    index.json   format version, what was packed and how, and figures of every episode
    steps.npy    float32: observation, action, what to do and reward of every step
    rewards.npy  float32, where the same steps are of many worlds: of every episode the
                 rewards in each world, instead of those in steps.npy

Step t of an episode is the observation, the action taken there, and its reward; where
they are known, between these the action that should have been taken. Episodes may be of
different worlds, which have their own dynamics or rewards, and are numbered.
Episodes follow each other; where all have T steps, `steps.npy` is (episodes, T,
columns), and (steps, columns) otherwise. index.json has its size and SHA-256. Opening a
file of any size reads no steps.

The same steps of many worlds are read as if they were written for each: the episodes of
the first world, those of the second, and so on.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from data.agents.environments import FAMILIES, Family
from data.json_text import is_number
from data.packed import PackedFormat, PackedWriter, StoredArray, truth, whole_number
from data.remote import as_path

STEPS = "steps.npy"
REWARDS = "rewards.npy"
FORMAT = PackedFormat(
    "trajectory file",
    "index.json",
    version=1,
    remedy="make them again: tools/pack_exorl.py, or tools/make_dark_room.py",
    make="python -m tools.pack_exorl, or tools.make_dark_room",
    # How episodes ended is said of the same steps: a run that goes on has other files.
    origin=("terminated",),
)
identify = FORMAT.identify
# What NumPy's header takes for any array of three axes; it keeps room to grow.
HEADER_BYTES = 128


@dataclass(frozen=True, eq=False)
class TrajectoryFile:
    """Packed episodes.

    steps: float32 (steps of all episodes, columns), on disk: observation, action,
      target if `has_targets`, reward if `rewards` is None.
    rewards: float32 (steps x worlds,), on disk, episode by episode and in it world by
      world, where the same steps are of many.
    offsets: int64 (episodes + 1,), where each episode starts, and where the last ends.
    returns: float64 (episodes,), sums of rewards.
    worlds: int64 (episodes,), the world of each episode; 0 where there is one.
    observation_mean, observation_std: float32 (observation size,), over all steps.
    index: all of index.json.
    """

    directory: Path
    steps: StoredArray
    rewards: StoredArray | None
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
        directory = as_path(directory)
        index = FORMAT.read_index(directory)
        with FORMAT.parsing(directory, "trajectories"):
            for name in ("observation_size", "action_size"):
                whole_number(name, index[name], least=1)
            whole_number("action_repeat", index.get("action_repeat", 1), least=1)
            for steps in index["lengths"]:
                whole_number("a length", steps, least=1)
            recorded = np.array(index["lengths"], np.int64)
            returns = _numbers(index, "returns", np.float64)
            shared = whole_number("shared_by", index.get("shared_by", 1), least=1)
            worlds = index.get("worlds", [0] * len(recorded))
            if shared > 1:
                worlds = (np.arange(len(returns)) // len(recorded)).tolist()
            for world in worlds:
                whole_number("a world", world)
            worlds = np.array(worlds, np.int64)
            mean = _numbers(index, "observation_mean", np.float32)
            std = _numbers(index, "observation_std", np.float32)
            targets = index["action_size"] * truth(index, "has_targets")
            columns = index["observation_size"] + index["action_size"] + targets
            columns += shared == 1
            counts = {shared * len(recorded), len(returns), len(worlds)}
            for ended in index.get("terminated", []):
                truth({"terminated": ended}, "terminated")
            counts.add(len(index.get("terminated", returns)))
            fitting = len(counts) == 1 and recorded.size and std.min() >= 0
            if not fitting or not len(mean) == len(std) == index["observation_size"]:
                raise ValueError("it contradicts itself")
            header = _header(recorded, 1, columns)
            rewards_header = _header(recorded, shared)
        rows = int(recorded.sum())
        stored = partial(FORMAT.open_array, dtype=np.float32)
        steps = stored(directory / STEPS, shape=(rows, columns), header=header)
        rewards = None
        if shared > 1:
            shape = (shared * rows,)
            path = directory / REWARDS
            rewards = stored(path, shape=shape, header=rewards_header)
        return cls(
            directory=directory,
            steps=steps,
            rewards=rewards,
            offsets=np.concatenate([[0], np.cumsum(np.tile(recorded, shared))]),
            returns=returns,
            worlds=worlds,
            observation_mean=mean,
            observation_std=std,
            index=index,
        )

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """Reads steps by their numbers, int of any shape: float32 (..., columns).

        Raises:
          ValueError: a number is not finite.
          OSError: they cannot be read.
        """
        steps = self._take(numbers)
        finite = np.isfinite(steps).all(axis=-1)
        if not finite.all():
            bad = numbers[~finite].flat[0]
            raise ValueError(
                f"{self.steps.path} has a number that is not finite in step "
                f"{bad} (in episode {np.searchsorted(self.offsets, bad, 'right') - 1}"
                f"): it was damaged; copy it again or {FORMAT.remedy}"
            )
        return steps

    def _take(self, numbers: np.ndarray) -> np.ndarray:
        """Reads the columns of steps, and the rewards in their worlds."""
        if self.rewards is None:
            return self.steps.take(numbers)
        count = self.rewards.size // self.steps.shape[0]
        worlds, rows = np.divmod(numbers, self.steps.shape[0])
        offsets = self.offsets[: (len(self.offsets) - 1) // count + 1]
        episodes = np.searchsorted(offsets, rows, "right") - 1
        begins = offsets[episodes]
        # Rewards of an episode: those in its first world, in the second, and so on.
        of_world = count * begins + worlds * (offsets[episodes + 1] - begins)
        rewards = self.rewards.take(of_world + rows - begins)
        steps = self.steps.take(rows)
        columns = [steps, rewards[..., None]]
        if self.family:
            seen = steps[..., : self.observation_size]
            targets = self.family.best(seen, self.targets[worlds])
            columns.insert(1, targets.astype(np.float32))
        return np.concatenate(columns, axis=-1)

    def describe(self) -> str:
        """Describes the episodes and their returns in two lines."""
        lengths = self.lengths
        returns = self.returns
        ends = ""
        if self.terminated is not None:
            ended = int(self.terminated.sum())
            ends = f"; {ended:,} terminated, {len(lengths) - ended:,} cut"
        return (
            f"{len(lengths):,} episodes of {lengths.min()} to {lengths.max()} steps, "
            f"{lengths.sum():,} steps; returns {returns.min():.2f} to "
            f"{returns.max():.2f}, mean {returns.mean():.2f}{ends}\n"
            f"written to {self.directory}"
        )

    @cached_property
    def family(self) -> Family | None:
        """The family of tasks that the worlds are of; None of one task."""
        return FAMILIES.get((self.index.get("domain", ""), self.index.get("task", "")))

    @cached_property
    def targets(self) -> np.ndarray:
        """Targets of a family's worlds, float64 (worlds, k)."""
        described = self.index["worlds_described"]
        return np.array([world["target"] for world in described])

    @cached_property
    def lengths(self) -> np.ndarray:
        """Steps of each episode, int64 (episodes,)."""
        return np.diff(self.offsets)

    @property
    def terminated(self) -> np.ndarray | None:
        """Whether each episode ended by itself and was not cut; None: not known."""
        ended = self.index.get("terminated")
        return None if ended is None else np.array(ended, bool)

    @property
    def observation_size(self) -> int:
        return self.index["observation_size"]

    @property
    def action_size(self) -> int:
        return self.index["action_size"]

    @property
    def has_targets(self) -> bool:
        """Whether the steps say what should have been done there."""
        return self.family is not None or self.index.get("has_targets", False)

    @property
    def action_repeat(self) -> int:
        """Steps of the environment for which each action is held."""
        return self.index.get("action_repeat", 1)


class TrajectoryWriter(PackedWriter):
    """Streams episodes to a new trajectory file (see `PackedWriter`).

    about: what index.json says besides; it may grow until the block ends.

    Raises:
      FileExistsError: `directory` exists and is not empty; nothing in it is touched.
      ValueError: the block ends without an episode.
    """

    format = FORMAT

    def __init__(self, directory: Path, about: dict[str, Any]):
        super().__init__(directory)
        self.about = about
        self.lengths: list[int] = []
        self.returns: list[list[float]] = []
        self.worlds: list[int] = []
        self.terminated: list[bool] = []
        self._sizes: tuple[int, ...] = ()
        self._shared_by = 1
        # Observations less the first one, whose squares keep their digits.
        self._first = np.zeros(0)
        self._sums: Any = 0.0
        self._squares: Any = 0.0

    def __enter__(self) -> Self:
        super().__enter__()
        self._file = self._open(STEPS)
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
        terminated: bool | None = None,
    ) -> None:
        """Appends an episode of T steps: (T, observation), (T, action) and (T,).

        reward: or (W, T), in each of W worlds that have the same steps, W the same for
          all episodes.
        target: what should have been done, in the form of the actions; for all episodes
          or none. world: number of the world that the episode is of, from 0.
        terminated: whether the task was over at the end, and not cut there; for all
          episodes or none.

        Raises:
          ValueError: the shapes are not these, or other sizes than in the episodes
            before; there are no steps; or a number is not finite.
        """
        parts = [observation, action]
        if target is not None:
            parts.append(target)
        rewards = np.atleast_2d(reward)
        self._check(parts, rewards, world)
        sizes = tuple(part.shape[1] for part in parts)
        count = len(rewards)
        rows = np.column_stack([*parts, *rewards]).astype("<f4")
        if not np.isfinite(rows).all():
            raise ValueError(
                f"episode {len(self.lengths)} has numbers that are not finite in "
                f"float32, the first in step {np.argmin(np.isfinite(rows).all(axis=1))}"
            )
        observations = rows[:, : sizes[0]].astype(np.float64)
        if not self.lengths:
            self._sizes = sizes
            self._first = observations[0]
            self._shared_by = count
        if count > 1:
            if not self.lengths:
                self._rewards = self._open(REWARDS)
                self._rewards.write(bytes(HEADER_BYTES))
            self._rewards.write(rows[:, -count:].T.tobytes())
        steps = rows[:, :-count] if count > 1 else rows
        self._file.write(steps.tobytes())
        self.lengths.append(len(rows))
        self.returns.append(rows[:, -count:].sum(axis=0, dtype=np.float64).tolist())
        self.worlds.append(int(world))
        if terminated is not None:
            self.terminated.append(terminated)
        self._sums += (observations - self._first).sum(axis=0)
        self._squares += ((observations - self._first) ** 2).sum(axis=0)

    def _check(
        self, parts: Sequence[np.ndarray], rewards: np.ndarray, world: int
    ) -> None:
        """Raises ValueError where an episode's parts and rewards do not fit."""
        worlds, *steps = rewards.shape
        shapes = [part.shape for part in parts]
        sizes = tuple(shape[-1] for shape in shapes)
        fits = len(steps) == 1 and shapes == [(*steps, size) for size in sizes]
        fits &= 0 not in (*steps, *sizes, worlds)
        before = (self._sizes, self._shared_by) if self.lengths else (sizes, worlds)
        if not fits or world < 0 or (sizes, worlds) != before:
            raise ValueError(
                f"episode {len(self.lengths)} of {world=} has arrays of "
                f"{', '.join(map(str, shapes))} and rewards of {rewards.shape}: give "
                "(T, observation), (T, action), once or twice, and (T,), or (W, T) of "
                f"W worlds, and at least one of each; sizes must be {before[0]} and W "
                f"{before[1]}, as before: pack one domain at a time"
            )

    def _finish(self) -> dict[str, Any]:
        if not self.lengths:
            raise ValueError(f"no episodes were written to {self.directory}")
        lengths = np.array(self.lengths)
        shared = self._shared_by
        columns = sum(self._sizes) + (shared == 1)
        headers = {STEPS: _header(lengths, 1, columns)}
        if shared > 1:
            headers[REWARDS] = _header(lengths, shared)
        for name, header in headers.items():
            with (self._partial / name).open("r+b") as file:
                file.write(header)
        mean = self._sums / lengths.sum()
        variance = self._squares / lengths.sum() - mean**2
        return {
            **self.about,
            "observation_size": self._sizes[0],
            "action_size": self._sizes[1],
            "has_targets": len(self._sizes) > 2,
            "observation_mean": (self._first + mean).tolist(),
            "observation_std": np.sqrt(variance.clip(0)).tolist(),
            "lengths": self.lengths,
            "returns": np.array(self.returns).T.ravel().tolist(),
            **({"shared_by": shared} if shared > 1 else {"worlds": self.worlds}),
            **({"terminated": self.terminated} if self.terminated else {}),
        }


def _header(lengths: np.ndarray, worlds: int, columns: int | None = None) -> bytes:
    """Returns what NumPy writes before numbers of the steps of such episodes.

    worlds: that each step has numbers of. columns: of a step; None: one number.
    """
    shape = [int(worlds * lengths.sum())]
    if (lengths == lengths[0]).all():
        shape = [len(lengths), int(lengths[0])]
        if columns is None:
            shape.insert(1, worlds)
    shape += [] if columns is None else [columns]
    form = {"descr": "<f4", "fortran_order": False, "shape": tuple(shape)}
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, form)
    if header.tell() != HEADER_BYTES:
        raise ValueError(f"NumPy has no header of {HEADER_BYTES} bytes for these steps")
    return header.getvalue()


def _numbers(index: Mapping[str, Any], name: str, dtype: type) -> np.ndarray:
    """Reads a list of the description, (n,)."""
    numbers = index[name]
    most = float(np.finfo(dtype).max)
    if type(numbers) is not list or not all(map(is_number, numbers)):
        raise ValueError(f"{name} must be a list of finite numbers")
    if max(map(abs, numbers), default=0) > most:
        raise ValueError(f"{name} has a number above {most}")
    return np.array(numbers, dtype)
