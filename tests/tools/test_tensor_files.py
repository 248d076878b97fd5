"""safetensors files: parts read as they are, files planned by size, faults named."""

import json
import re
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.cases import pairs, table
from tests.support.fuzzing import altered, damaged, fuzz
from tools.lib.hf.names import EMBEDDING, HEAD
from tools.lib.hf.reading import _is_embedding
from tools.lib.hf.tensor_files import INDEX, WHOLE, TensorFiles, write_tensors

RNG = np.random.default_rng(8)
TENSORS = {
    name: RNG.standard_normal(shape).astype(np.float32)
    for name, shape in {"a": (4, 6), "b": (100,), "c": (3, 5), "d": (7,)}.items()
}
SIZES = {name: tensor.nbytes for name, tensor in TENSORS.items()}


def write(directory, file_bytes):
    directory.mkdir()
    write_tensors(directory, iter(TENSORS.items()), SIZES, file_bytes)
    return directory


@pytest.mark.parametrize("file_bytes, files", table("tensor_files.txt", "files"))
def test_files_hold_no_more_than_asked_and_are_read_as_one(tmp_path, file_bytes, files):
    directory = write(tmp_path / "out", file_bytes)
    found = sorted(directory.glob("*.safetensors"))
    if len(files) == 1:
        assert [path.name for path in directory.iterdir()] == [WHOLE]
    else:
        index = json.loads((directory / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(SIZES.values())
        weight_map = index["weight_map"]
        assert len(found) == len(files) and weight_map.keys() == TENSORS.keys()
        for number, (path, names) in enumerate(zip(found, files, strict=True), 1):
            assert path.name == f"model-{number:05d}-of-{len(files):05d}.safetensors"
            assert [n for n, file in weight_map.items() if file == path.name] == names
    with TensorFiles(directory) as opened:
        assert opened.shapes == {n: tensor.shape for n, tensor in TENSORS.items()}
        for name, tensor in TENSORS.items():
            index = (slice(1, 3),) * tensor.ndim
            np.testing.assert_array_equal(opened.read(name, index), tensor[index])


def read_all(directory):
    with TensorFiles(directory) as files:
        every = {name: (slice(None),) * len(s) for name, s in files.shapes.items()}
        return {name: files.read(name, index) for name, index in every.items()}


def assert_refused(directory, complaint, kind=ValueError):
    with pytest.raises(kind, match=complaint) as caught:
        TensorFiles(directory)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600


def test_missing_files_are_named(tmp_path):
    directory = write(tmp_path / "out", 160)
    second = directory / "model-00002-of-00003.safetensors"
    second.unlink()
    assert_refused(directory, f"{second.name} does not exist", FileNotFoundError)
    missing = "model.safetensors does not exist"
    assert_refused(tmp_path / "nowhere", missing, FileNotFoundError)


FIRST, SECOND = "one.safetensors", "two.safetensors"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A folder with "a" in one file and "b" in another, and the index of both."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": TENSORS["a"]}, folder / FIRST)
    save_file({"b": TENSORS["b"]}, folder / SECOND)
    write_index(folder, {"a": FIRST, "b": SECOND})
    return folder


def write_index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("right", [FIRST, SECOND])
def test_a_tensor_in_two_files_is_read_from_the_one_of_the_index(shards, right):
    for number, file in enumerate((FIRST, SECOND)):
        held = {"ab"[number]: TENSORS["ab"[number]], "c": TENSORS["c"] + number}
        save_file(held, shards / file)
    write_index(shards, {"a": FIRST, "b": SECOND, "c": right})
    found = read_all(shards)
    assert found.keys() == {"a", "b", "c"}
    np.testing.assert_array_equal(found["c"], TENSORS["c"] + (right == SECOND))
    write_index(shards, {"a": FIRST, "b": SECOND})
    assert_refused(shards, "two.safetensors and another file hold c, and")


def test_links_and_folders_inside_are_followed(shards, tmp_path):
    blob = (shards / FIRST).rename(tmp_path / "blob")
    (shards / FIRST).symlink_to("../blob")  # as in the cache of the hub
    (shards / "more").mkdir()
    (shards / SECOND).rename(shards / "more" / SECOND)
    write_index(shards, {"a": FIRST, "b": f"more/{SECOND}"})
    assert read_all(shards).keys() == {"a", "b"} and blob.is_file()


@pytest.mark.parametrize(("index", "complaint"), pairs("tensor_files.txt", "index"))
def test_a_bad_index_is_refused_in_a_line(shards, tmp_path, index, complaint):
    save_file({"c": TENSORS["c"]}, tmp_path / "out.safetensors")
    (shards / INDEX).write_text(index.replace("{shards}", str(shards)))
    assert_refused(shards, re.escape(complaint))


def test_two_models_in_a_folder_are_refused(shards):
    save_file({"a": TENSORS["a"]}, shards / WHOLE)
    assert_refused(shards, "which of them is the model is not known")
    write_index(shards, {"a": WHOLE})
    assert read_all(shards).keys() == {"a"}


GOOD = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
ONE = json.dumps(GOOD).encode()


def safetensors(header, numbers=bytes(range(24)), length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + numbers


KNOWN = {"GOOD": GOOD, "ONE": ONE, "bytes": bytes, "safetensors": safetensors}
BAD_HEADERS = dict(table("tensor_files.txt", "header", **KNOWN))


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_a_bad_header_is_refused_in_a_line(tmp_path, name):
    (tmp_path / WHOLE).write_bytes(BAD_HEADERS[name])
    complaint = "model.safetensors (is not a whole safe|has a tensor '.*not a name)"
    assert_refused(tmp_path, complaint)


@pytest.mark.parametrize("dtype", ["float64", "int8"])
def test_types_that_are_not_read_are_named(tmp_path, dtype):
    save_file({"a": np.zeros(3, dtype)}, tmp_path / WHOLE)
    name = {"float64": "F64", "int8": "I8"}[dtype]
    complaint = (
        f"a in .* has type {name}, not one of BF16, F16, F32: save the model in "
    )
    assert_refused(tmp_path, complaint)


@pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("rounds_head", [True, False])
def test_a_tied_head_may_be_stored_in_another_precision(tmp_path, kind, rounds_head):
    exact = np.float32([[1 / 3, -2.0], [1e-3, 60_000]])
    tensors = {EMBEDDING.name: exact, HEAD.name: exact}
    name = HEAD.name if rounds_head else EMBEDDING.name
    tensors[name] = exact.astype(kind)
    save_file(tensors, tmp_path / WHOLE)
    with TensorFiles(tmp_path) as files:
        assert _is_embedding(files, files.shapes)
    tensors[name] = (exact * 1.01).astype(kind)
    save_file(tensors, tmp_path / WHOLE)
    with (
        TensorFiles(tmp_path) as files,
        pytest.raises(ValueError, match="lm_head.weight is not model.embed_tokens.we"),
    ):
        _is_embedding(files, files.shapes)


def stored(path: Path) -> dict[str, bytes]:
    """The bytes of every tensor of a file, by the format's own description."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    found = json.loads(content[8:start])
    found.pop("__metadata__", None)
    offsets = {name: entry["data_offsets"] for name, entry in found.items()}
    return {n: content[start + a : start + b] for n, (a, b) in offsets.items()}


@pytest.mark.parametrize(
    "attempts", [300, pytest.param(20_000, marks=pytest.mark.slow)]
)
def test_a_damaged_file_is_read_as_it_is_or_refused(tmp_path, attempts):
    path = tmp_path / WHOLE
    save_file(TENSORS, path)
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:start])

    def attempt(rng):
        match rng.integers(3):
            case 0:
                path.write_bytes(damaged(whole, rng))
            case 1:
                path.write_bytes(damaged(whole[:start], rng) + whole[start:])
            case _:
                text = altered(header, rng).encode("utf-8", "surrogatepass")
                path.write_bytes(safetensors(text, whole[start:]))
        return read_all(tmp_path)

    def check(found):
        expected = stored(path)
        assert {name: array.tobytes() for name, array in found.items()} == expected

    counts = fuzz(attempts, attempt, check, most_bytes=20 << 20)
    assert counts["read"] > attempts // 20 and counts["refused"] > attempts // 2
