"""What a start finds of the programs that an earlier one has compiled."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.small.runs import kept_in
from tests.support import buckets
from training import compilation


def leave(directory: Path) -> None:
    assert list(directory.glob("jit_cubed-*-cache"))


def cut(directory: Path) -> None:
    for file in directory.glob("*-cache"):
        file.write_bytes(file.read_bytes()[:-9])


def flip(directory: Path) -> None:
    for file in directory.glob("*-cache"):
        entry = bytearray(file.read_bytes())
        entry[len(entry) // 2] ^= 1
        file.write_bytes(entry)


def swap(directory: Path) -> None:
    """Puts the whole program of another function in the place of ours."""
    (file,) = directory.glob("jit_cubed-*-cache")
    jax.jit(lambda x: x + 1)(np.float32(3))
    (other,) = directory.glob("jit__lambda-*-cache")
    other.replace(file)


def without_digest(directory: Path) -> None:
    """Leaves a file as JAX writes it."""
    (file,) = directory.glob("jit_cubed-*-cache")
    file.write_bytes(file.read_bytes()[32:])


def block(directory: Path) -> None:
    directory.rename(directory.with_name("away"))
    directory.write_text("of mine")


def start(
    directory: str, happens: Callable[[Path], None] = lambda _: None
) -> tuple[int, str]:
    """Compiles a program: whether it was found, and what was said."""

    def cubed(x: jax.Array) -> jax.Array:
        return x**3

    lines: list[str] = []
    keeping = compilation.kept_in(directory, lines.append)
    with kept_in(None), compilation.counted() as counted, keeping:
        happens(Path(directory))
        assert jax.jit(cubed)(np.float32(3)) == 27
    assert counted.seconds > 0
    return counted.reused, "\n".join(lines)


DAMAGES = (cut, flip, swap, without_digest)
NOT_OURS = "jit_cubed-.* is not what was written under this name; the run goes on"


# What happens during a second start => programs that it and the third find, and what
# each of them says.
@pytest.mark.parametrize(
    ("happens", "found", "said"),
    [
        (leave, [1, 1], ["", ""]),
        *((damage, [0, 1], [NOT_OURS, ""]) for damage in DAMAGES),
        (block, [0, 0], ["cannot be written .*", "not kept: .* be written to"]),
    ],
)
def test_programs_are_kept_for_the_next_start(
    tmp_path, monkeypatch, happens, found, said
):
    monkeypatch.setattr(compilation, "LEAST_SECONDS", 0)
    directory = str(tmp_path / "programs")
    assert start(directory) == (0, "")
    later = start(directory, happens), start(directory)
    assert [number for number, _ in later] == found
    for line, (_, lines) in zip(said, later, strict=True):
        assert re.fullmatch(line and f"WARNING: .*{line}.*", lines)


def test_buckets_keep_programs_too(monkeypatch):
    monkeypatch.setattr(compilation, "LEAST_SECONDS", 0)
    with buckets.in_memory() as files:
        assert [start("gs://mine/run/programs") for _ in range(2)] == [(0, ""), (1, "")]
        assert [name for name in files if "run/programs/jit_cubed-" in name]


def test_the_oldest_programs_make_room(tmp_path, monkeypatch):
    monkeypatch.setattr(compilation, "MOST_BYTES", 300)
    programs = compilation.Programs(str(tmp_path), pytest.fail)
    for seconds, key in enumerate("abc"):
        programs.put(key, bytes(50))
        (file,) = tmp_path.glob(f"{key}-*")
        os.utime(file, (seconds, seconds))
    (tmp_path / "older-cache").write_bytes(bytes(40))  # of JAX itself
    os.utime(tmp_path / "older-cache", (0, 0))
    programs.put("b", bytes(60))
    assert [programs.get(key) for key in "abc"] == [None, bytes(60), bytes(50)]
    assert len(list(tmp_path.iterdir())) == 2


def test_buckets_without_times_lose_programs_too(monkeypatch):
    monkeypatch.setattr(compilation, "MOST_BYTES", 100)
    with buckets.in_memory() as files:
        programs = compilation.Programs("gs://mine/programs", pytest.fail)
        for key in "abc":
            programs.put(key, bytes(50))
            assert [path for path in files if f"programs/{key}-" in path]
        assert len(files) == 1


def test_the_first_fault_alone_is_said_and_none_is_met_again(tmp_path):
    lines: list[str] = []
    programs = compilation.Programs(str(tmp_path), lines.append)
    for key in "ab":
        programs.put(key, b"program")
    cut(tmp_path)
    (tmp_path / "c-sha256-cache").mkdir()
    assert [programs.get(key) for key in "cab"] == [None] * 3
    assert re.fullmatch("WARNING: .*c-sha256-cache cannot be read .*", *lines)
    assert not list(tmp_path.iterdir())
