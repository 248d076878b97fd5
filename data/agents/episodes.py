"""Episodes of ExoRL, the public format: one compressed npz for each (2201.13425).

    ROOT/walker/rnd/buffer/episode_000017_1000.npz

A file of T steps has T + 1 rows of every array. Row 0 is the state after the reset,
with an action and a reward of zeros; action t leads from observation t - 1 to
observation t, for reward t. `physics` is the simulator's whole state, from which the
rewards of other tasks can be computed.
"""

import errno
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

NAMES = ("observation", "action", "reward", "discount", "physics")
# As ExoRL names them, and as the writer of its origin, URLB, does: 20220207T101112_…
FILE_NAME = re.compile(r"(?:episode|\d{8}T\d{6})_(\d+)_(\d+)\.npz")
# Actions are float32 numbers scaled to [-1, 1].
ACTION_TOLERANCE = 1e-6
OF_THE_FILE = (errno.ENOENT, errno.EISDIR, errno.EINVAL)
"""Errors of the file itself, or of an offset in it; others pass, as a disk's."""
MOST_ITEM_BYTES = 8
REASON_LETTERS = 300
HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
"""What reads an array's shape, order and type, by version."""


class Widths(NamedTuple):
    """Columns of a domain's arrays."""

    observation: int
    action: int
    physics: int
    reward: int = 1
    discount: int = 1


DOMAINS = {
    "cartpole": Widths(5, 1, 4),
    "cheetah": Widths(17, 6, 18),
    "jaco": Widths(42, 9, 18),
    "point_mass": Widths(4, 2, 4),
    "point_mass_maze": Widths(4, 2, 4, reward=4),
    "quadruped": Widths(78, 12, 57),
    "walker": Widths(24, 6, 18),
}


class BadEpisode(ValueError):
    """A file that is not an episode of its domain, in one line."""

    def __init__(self, path: Path, reason: str):
        super().__init__(f"{path}: {' '.join(reason.split())[:REASON_LETTERS]}")


@dataclass(frozen=True, eq=False)
class Episode:
    """A file's arrays as they are, row 0 included: (T + 1, width).

    observation, action, reward, discount: float32. physics: float64.
    """

    path: Path
    observation: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    discount: np.ndarray
    physics: np.ndarray

    @property
    def steps(self) -> int:
        return len(self.action) - 1


@dataclass(frozen=True)
class Buffer:
    """Directory of the episodes of one domain and algorithm: `root`/domain/algorithm.

    Raises:
      ValueError: ExoRL has no such domain.
    """

    root: Path
    domain: str
    algorithm: str

    def __post_init__(self):
        check_domain(self.domain)

    @property
    def directory(self) -> Path:
        return Path(self.root) / self.domain / self.algorithm

    def scan(self) -> list[Path]:
        """Lists the episodes' files, sorted by their numbers.

        Files whose names have none come last, for `read_episode` to refuse.

        Raises:
          FileNotFoundError: the directory is missing, or has no episode.
        """
        folder = self.directory / "buffer"
        remedy = (
            "unzip ExoRL's archive of the domain and algorithm there, or make data "
            "with tools/make_exorl.py"
        )
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no directory {folder}: {remedy}")
        paths = sorted(folder.glob("*.npz"), key=_number)
        if not paths:
            raise FileNotFoundError(f"{folder} holds no .npz file: {remedy}")
        return paths


def check_domain(domain: str) -> None:
    """Raises ValueError if ExoRL has no such domain."""
    if domain not in DOMAINS:
        raise ValueError(f"{domain=} must be one of {', '.join(DOMAINS)}")


def _number(path: Path) -> tuple[bool, int, str]:
    name = FILE_NAME.fullmatch(path.name)
    return name is None, int(name[1]) if name else 0, path.name


def steps_of(path: Path) -> int:
    """Returns the number of steps in a file's name.

    Raises:
      BadEpisode: the name is not that of an episode.
    """
    name = FILE_NAME.fullmatch(path.name)
    if name is None:
        raise BadEpisode(path, "name is not episode_<index>_<length>.npz")
    return int(name[2])


def read_episode(path: Path, domain: str) -> Episode:
    """Reads and checks one file. Arrays of other names are left alone.

    Memory is taken for what the file's name promises, and no more, whatever it holds.

    Raises:
      BadEpisode: the file is missing or damaged, or is not an episode of the domain.
      OSError: it cannot be read now, whatever it holds.
    """
    steps = steps_of(path)
    try:
        arrays = _read_arrays(path, steps, DOMAINS[domain])
    except (BadEpisode, MemoryError):
        raise
    # What zipfile, zlib and NumPy raise for damaged bytes is not a closed list.
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in OF_THE_FILE:
            raise
        reason = f"unreadable npz ({type(error).__name__}: {error})"
        raise BadEpisode(path, reason) from error
    types = {name: np.float32 for name in NAMES} | {"physics": np.float64}
    with np.errstate(over="ignore"):  # to infinity, which is refused
        arrays = {n: a.astype(types[n], copy=False) for n, a in arrays.items()}
    for complaint in _complaints(arrays):
        raise BadEpisode(path, complaint)
    return Episode(path, **arrays)


def _read_arrays(path: Path, steps: int, widths: Widths) -> dict[str, np.ndarray]:
    """Reads the arrays, each after checking that its header is an episode's."""
    arrays = {}
    with zipfile.ZipFile(path) as archive:
        names = sorted(name.removesuffix(".npy") for name in archive.namelist())
        missing = [name for name in NAMES if name not in names]
        if missing:
            raise BadEpisode(path, f"missing {missing}, has {names}")
        for name in NAMES:
            with archive.open(f"{name}.npy") as member:
                version = np.lib.format.read_magic(member)
                shape, _, dtype = HEADERS[version](member)
            expected = (steps + 1, getattr(widths, name))
            if shape != expected:
                raise BadEpisode(path, f"{name} has shape {shape}, expected {expected}")
            if dtype.kind != "f" or dtype.itemsize > MOST_ITEM_BYTES:
                wanted = "expected floating point of 16 to 64 bits"
                raise BadEpisode(path, f"{name} has type {dtype}, {wanted}")
            with archive.open(f"{name}.npy") as member:
                arrays[name] = np.lib.format.read_array(member, allow_pickle=False)
    return arrays


def _complaints(arrays: dict[str, np.ndarray]) -> Iterator[str]:
    """Yields what is wrong with the numbers of a file."""
    for name in NAMES:
        bad = ~np.isfinite(arrays[name])
        if bad.any():
            row = int(bad.any(axis=1).argmax())
            yield f"{name} has {bad.sum()} non-finite values, first at row {row}"
    largest = np.abs(arrays["action"]).max()
    if largest > 1 + ACTION_TOLERANCE:
        yield f"action outside [-1, 1] ({largest:.3f})"
    if arrays["action"][0].any():
        yield "row 0 is not the dummy reset row (action[0] != 0)"


def write_episode(episode: Episode) -> None:
    """Writes an episode's file in the public format, over whatever is there."""
    arrays = {name: getattr(episode, name) for name in NAMES}
    np.savez_compressed(episode.path, **arrays)
