"""safetensors files: parts read as they are, files planned by size, faults named."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from tools.tensor_files import INDEX, WHOLE, TensorFiles, TensorFilesWriter

RNG = np.random.default_rng(8)
TENSORS = {
    name: RNG.standard_normal(shape).astype(np.float32)
    for name, shape in {"a": (4, 6), "b": (100,), "c": (3, 5), "d": (7,)}.items()
}
SIZES = {name: tensor.nbytes for name, tensor in TENSORS.items()}


def write(directory, file_bytes, tensors=TENSORS):
    with TensorFilesWriter(directory, SIZES, file_bytes) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    return directory


@pytest.mark.parametrize(
    "file_bytes, files",
    [
        (10_000, [["a", "b", "c", "d"]]),
        (160, [["a"], ["b"], ["c", "d"]]),
        (500, [["a", "b"], ["c", "d"]]),
        (1, [["a"], ["b"], ["c"], ["d"]]),
    ],
)
def test_files_hold_no_more_than_asked_and_are_read_as_one(tmp_path, file_bytes, files):
    directory = write(tmp_path / "out", file_bytes)
    found = sorted(directory.glob("*.safetensors"))
    if len(files) == 1:
        assert [path.name for path in directory.iterdir()] == [WHOLE]
    else:
        weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
        for number, (path, names) in enumerate(zip(found, files, strict=True), 1):
            assert path.name == f"model-{number:05d}-of-{len(files):05d}.safetensors"
            assert [n for n, file in weight_map.items() if file == path.name] == names
    with TensorFiles(directory) as opened:
        assert opened.shapes == {n: tensor.shape for n, tensor in TENSORS.items()}
        for name, tensor in TENSORS.items():
            index = (slice(1, 3),) * tensor.ndim
            np.testing.assert_array_equal(opened.read(name, index), tensor[index])


def test_tensors_that_never_came_leave_no_directory(tmp_path):
    with pytest.raises(ValueError, match="never written: c, d"):
        write(tmp_path / "out", 500, {name: TENSORS[name] for name in "ab"})
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ValueError, match="file_bytes=0"):
        TensorFilesWriter(tmp_path / "out", SIZES, 0)
    (tmp_path / "file").write_text("kept")
    for taken in (tmp_path, tmp_path / "file"):
        with pytest.raises(FileExistsError, match="is left as it is"):
            TensorFilesWriter(taken, SIZES, 100)
    assert (tmp_path / "file").read_text() == "kept"


def test_damaged_and_missing_files_are_named(tmp_path):
    directory = write(tmp_path / "out", 160)
    second = directory / "model-00002-of-00003.safetensors"
    whole = second.read_bytes()
    second.write_bytes(whole[:-8])
    with pytest.raises(ValueError, match=f"{second.name} is no whole safetensors"):
        TensorFiles(directory)
    second.unlink()
    with pytest.raises(FileNotFoundError, match=f"{second.name} does not exist"):
        TensorFiles(directory)
    (directory / INDEX).write_text("{}")
    with pytest.raises(ValueError, match="is no index of tensors .KeyError"):
        TensorFiles(directory)
    with pytest.raises(FileNotFoundError, match="model.safetensors does not exist"):
        TensorFiles(tmp_path / "nowhere")


def test_types_that_are_no_floats_are_refused(tmp_path):
    save_file({"q": np.zeros(4, np.int8)}, tmp_path / WHOLE)
    with pytest.raises(ValueError, match="q in .* has type I8, not one of BF16, F16"):
        TensorFiles(tmp_path)
