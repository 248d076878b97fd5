"""What a start finds of the programs that an earlier one has compiled."""

import re
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from tests import buckets
from tests.small.runs import kept_in
from training import compilation


def leave(directory: Path) -> None:
    assert list(directory.glob("jit_cubed-*-cache"))


def damage(directory: Path) -> None:
    for file in directory.glob("*-cache"):
        file.write_bytes(file.read_bytes()[:-9])


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
    return counted.found, "\n".join(lines)


# What happens during a second start => programs that it and the third find, and what
# each of them says.
@pytest.mark.parametrize(
    ("happens", "found", "said"),
    [
        (leave, [1, 1], ["", ""]),
        (damage, [0, 1], ["Error reading .* 'jit_cubed': .*; the run goes on", ""]),
        (block, [0, 0], ["Error reading .* File exists", "not kept: .* be written to"]),
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
