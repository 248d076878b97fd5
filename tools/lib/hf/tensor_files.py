"""Tensors in safetensors files, one file or several with an index, as published models.

Read slice by slice, each slice from the bytes that hold it; written file by file.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from data.json_text import parse_json, read_json_object, short
from tools.lib.hf import mxfp4
from tools.lib.hf.names import LAYER
from tools.lib.hf.names import TENSORS as WHOLE

INDEX = "model.safetensors.index.json"
HEADER_BYTES = 100_000_000
"""Of what a file says of its tensors; the library reads no more either."""
NAME_LETTERS = 256
DTYPES = {"F32", "BF16", "F16"}
"""Types that are read, as safetensors calls them; float32 holds them all exactly."""


class TensorFiles:
    """Tensors of a directory, by name; a context manager that closes the files."""

    def __init__(self, directory: Path, whole: str = WHOLE):
        """Opens the files and reads their lists of tensors, but no tensor.

        whole: name of the file where there is one.

        Raises:
          FileNotFoundError: the directory, or a file that the index names, is missing.
          ValueError: a file is not a safetensors file or cut short, files and index
            contradict each other, or a tensor has a type that is not floating-point
            number of 16 or 32 bits.
        """
        self._slices = {}
        file_of = _indexed(directory)
        with ExitStack() as opened:
            for path in sorted({*file_of.values()}) or [_file(directory, whole)]:
                self._open(path, file_of, opened)
            missing = sorted(file_of.keys() - self._slices.keys())
            if missing:
                raise ValueError(
                    f"{file_of[missing[0]]} has no tensor {short(missing[0])}, "
                    f"which {INDEX} says lies there (and {len(missing) - 1} more): "
                    "copy the model again"
                )
            self._files = opened.pop_all()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every tensor."""
        return {name: tuple(s.get_shape()) for name, s in self._slices.items()}

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Reads a part of a tensor, in the type that it is stored in."""
        return self._slices[name][index]

    def rename(self, new_name: Callable[[str], str | None]) -> list[str]:
        """Gives the tensors other names; returns those that get none.

        Raises:
          ValueError: two tensors would have one name.
        """
        kept = {}
        left_out = []
        for name, tensor in self._slices.items():
            new = new_name(name)
            if not new:
                left_out.append(name)
            elif new in kept:
                raise ValueError(f"two tensors are {new}: copy the model again")
            else:
                kept[new] = tensor
        self._slices = kept
        return left_out

    def leave_out(self, layers: Iterable[int]) -> int:
        """Leaves out the tensors of these layers; returns how many."""
        begins = tuple(LAYER.format(layer=number) for number in layers)
        left_out = [name for name in self._slices if name.startswith(begins)]
        for name in left_out:
            del self._slices[name]
        return len(left_out)

    def dequantise(self) -> int:
        """Makes one tensor of each pair that is one in MXFP4; returns how many.

        Raises:
          ValueError: the two do not belong together.
        """
        before = len(self._slices)
        self._slices = mxfp4.dequantised(self._slices)
        return before - len(self._slices)

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._slices.clear()
        self._files.close()

    def _open(self, path: Path, file_of: Mapping[str, Path], opened: ExitStack) -> None:
        """Takes the tensors of a file, but for those that the index has in another."""
        _check_names(path)
        try:
            file = opened.enter_context(safe_open(path, "numpy"))
        except SafetensorError as error:
            raise ValueError(
                f"{path} is not a whole safetensors file "
                f"({' '.join(str(error).split())}): copy it again"
            ) from error
        for name in file.keys():
            if not name.isprintable() or len(name) > NAME_LETTERS:
                raise ValueError(
                    f"{path} has a tensor {short(name)}, which is not a name: copy it "
                    "again"
                )
            if file_of.get(name, path) != path:
                continue
            if name in self._slices:
                raise ValueError(
                    f"{path} and another file hold {name}, and {INDEX} names neither "
                    "for it: copy the model again"
                )
            part = file.get_slice(name)
            is_packed = name.endswith((mxfp4.BLOCKS, mxfp4.SCALES))
            if part.get_dtype() not in {*DTYPES, *["U8"] * is_packed}:
                raise ValueError(
                    f"{name} in {path} has type {part.get_dtype()}, not one of "
                    f"{', '.join(sorted(DTYPES))}: save the model in one of them "
                    "(where it is quantised, without that)"
                )
            self._slices[name] = part


def write_tensors(
    directory: Path,
    tensors: Iterator[tuple[str, np.ndarray]],
    tensor_bytes: Mapping[str, int],
    file_bytes: int,
    whole: str = WHOLE,
) -> None:
    """Writes tensors to files of a limited size, and holds one file's at a time.

    tensor_bytes: size of every tensor, in the order in which they come.
    file_bytes: of the largest file; a larger tensor has one of its own.
    whole: name of the file where there is one.
    """
    plan = _plan(tensor_bytes, file_bytes)
    file_of: dict[str, str] = {}
    for number, names in enumerate(plan, 1):
        file = f"model-{number:05d}-of-{len(plan):05d}.safetensors"
        file = whole if len(plan) == 1 else file
        # transformers refuses files that do not say this.
        metadata = {"format": "pt"}
        held = itertools.islice(tensors, len(names))
        save_file(dict(held), directory / file, metadata=metadata)
        file_of |= dict.fromkeys(names, file)
    if len(plan) > 1:
        total = {"total_size": sum(tensor_bytes.values())}
        index = {"metadata": total, "weight_map": file_of}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _plan(tensor_bytes: Mapping[str, int], file_bytes: int) -> list[list[str]]:
    """Names of the tensors of each file."""
    files: list[list[str]] = []
    left = 0  # bytes that still go into the last file
    for name, size in tensor_bytes.items():
        if size > left:
            files.append([])
            left = max(file_bytes, size)
        files[-1].append(name)
        left -= size
    return files


def _indexed(directory: Path) -> dict[str, Path]:
    """Returns the file of every tensor, by the index; {} without an index.

    Links are followed: the cache of Hugging Face's hub consists of them.
    """
    index = directory / INDEX
    if not index.is_file():
        return {}
    files = read_json_object(index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ValueError(
            f"{index} is not an index of tensors: weight_map must name the file of "
            f"every tensor, got {short(files)}; copy it again"
        )
    known: dict[str, Path] = {}
    for file in files.values():
        if not isinstance(file, str):
            raise ValueError(
                f"{index} must name files, got {short(file)}: copy it again"
            )
        known[file] = known.get(file) or _file(directory, file)
    if (directory / WHOLE).is_file() and directory / WHOLE not in known.values():
        raise ValueError(
            f"{directory} holds {WHOLE}, and {INDEX} that names other files: which of "
            "them is the model is not known; move the other away"
        )
    return {name: known[file] for name, file in files.items()}


def _file(directory: Path, name: str) -> Path:
    """Returns a file of the directory or of one inside it, which must exist."""
    relative = Path(name)
    if relative.is_absolute() or ".." in relative.parts or not name.isprintable():
        raise ValueError(
            f"{directory / INDEX} names {short(name)}, which is not a file "
            f"inside of {directory}: copy it again"
        )
    if not (directory / relative).is_file():
        raise FileNotFoundError(
            f"{directory / relative} does not exist: copy the model again, or save it "
            "as safetensors"
        )
    return directory / relative


def _check_names(path: Path) -> None:
    """Raises ValueError if a name stands twice: the library takes the last of them."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > min(path.stat().st_size, HEADER_BYTES):
            return  # which the library refuses
        header = file.read(size)
    try:
        parse_json(header)
    except ValueError as error:
        raise ValueError(
            f"{path} is not a whole safetensors file (its header: {error}): copy it "
            "again"
        ) from error
