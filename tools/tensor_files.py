"""Tensors in safetensors files, one file or several with an index, as published models.

Read slice by slice, each slice from the bytes that hold it; written file by file, to a
directory that appears whole or not at all.
"""

import json
import shutil
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F32", "BF16", "F16"}
"""Types that are read, as safetensors calls them; float32 holds them all exactly."""


class TensorFiles:
    """The tensors of a directory, by name; a context manager that closes the files."""

    def __init__(self, directory: Path):
        """Opens the files and reads what tensors they hold, but no tensor.

        Raises:
          FileNotFoundError: the directory, or a file that the index names, is missing.
          ValueError: a file is no safetensors file or cut short, or a tensor has a type
            that is no floating-point number of 16 or 32 bits.
        """
        self._slices = {}
        with ExitStack() as opened:
            for path in _paths(directory):
                self._open(path, opened)
            self._files = opened.pop_all()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {name: tuple(s.get_shape()) for name, s in self._slices.items()}

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A part of a tensor, in the type that it is stored in."""
        return self._slices[name][index]

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._slices.clear()
        self._files.close()

    def _open(self, path: Path, opened: ExitStack) -> None:
        try:
            file = opened.enter_context(safe_open(path, "numpy"))
        except SafetensorError as error:
            raise ValueError(
                f"{path} is no whole safetensors file ({error}): copy it anew"
            ) from error
        for name in file.keys():
            part = file.get_slice(name)
            if part.get_dtype() not in DTYPES:
                raise ValueError(
                    f"{name} in {path} has type {part.get_dtype()}, not one of "
                    f"{', '.join(sorted(DTYPES))}: quantised models cannot be read"
                )
            self._slices[name] = part


class TensorFilesWriter:
    """Writes tensors to a new directory of files of a limited size.

    A context manager: files are written to a hidden sibling of `directory`, which takes
    its name when the block ends, and is removed when the block raises.
    """

    def __init__(
        self, directory: Path, tensor_bytes: Mapping[str, int], file_bytes: int
    ):
        """Plans the files.

        Args:
          directory: does not exist yet, or is empty.
          tensor_bytes: size of every tensor, in the order in which they will come.
          file_bytes: of the largest file; a larger tensor has one of its own.

        Raises:
          FileExistsError: the directory is not empty.
          ValueError: files of no bytes.
        """
        if file_bytes < 1:
            raise ValueError(f"{file_bytes=} must be at least 1")
        check_absent(directory)
        self._directory = directory
        self._bytes = dict(tensor_bytes)
        self._plan = _plan(tensor_bytes, file_bytes)
        self._held: dict[str, np.ndarray] = {}
        self._map: dict[str, str] = {}

    @property
    def partial(self) -> Path:
        """Where the files are until the block ends."""
        return self._partial

    def __enter__(self) -> "TensorFilesWriter":
        self._directory.parent.mkdir(parents=True, exist_ok=True)
        name = f".{self._directory.name}.{uuid.uuid4().hex}.partial"
        self._partial = self._directory.with_name(name)
        self._partial.mkdir()
        return self

    def write(self, name: str, tensor: np.ndarray) -> None:
        """Takes the next tensor; writes a file when it has all of its tensors."""
        number = len(set(self._map.values()))
        self._held[name] = tensor
        if list(self._held) != self._plan[number]:
            return
        files = len(self._plan)
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        file = WHOLE if files == 1 else file
        # transformers refuses files that do not say this.
        save_file(self._held, self._partial / file, metadata={"format": "pt"})
        self._map |= dict.fromkeys(self._held, file)
        self._held.clear()

    def __exit__(self, kind: type | None, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            shutil.rmtree(self._partial, ignore_errors=True)

    def _finish(self) -> None:
        missing = self._bytes.keys() - self._map.keys()
        if missing:
            raise ValueError(
                f"tensors were never written: {', '.join(sorted(missing))}"
            )
        if len(self._plan) > 1:
            index = {
                "metadata": {"total_size": sum(self._bytes.values())},
                "weight_map": self._map,
            }
            (self._partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        self._partial.rename(self._directory)


def check_absent(directory: Path) -> None:
    """Raises FileExistsError if there is something at `directory` already."""
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise FileExistsError(
            f"{directory} already exists and is left as it is: remove it or choose "
            "another output"
        )


def _plan(tensor_bytes: Mapping[str, int], file_bytes: int) -> list[list[str]]:
    """Names of the tensors of each file."""
    files, left = [], 0
    for name, size in tensor_bytes.items():
        if size > left:
            files.append([])
            left = max(file_bytes, size)
        files[-1].append(name)
        left -= size
    return files


def _paths(directory: Path) -> list[Path]:
    """The files that hold a model's tensors."""
    if (directory / INDEX).is_file():
        try:
            names = set(
                json.loads((directory / INDEX).read_text())["weight_map"].values()
            )
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{directory / INDEX} is no index of tensors "
                f"({type(error).__name__}: {error}): copy it anew"
            ) from error
        paths = [directory / name for name in sorted(names)]
    else:
        paths = [directory / WHOLE]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist: copy the model anew, or save it as safetensors"
            )
    return paths
