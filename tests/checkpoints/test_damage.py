"""Damaged steps: no wrong bit is used, and nothing good is lost."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints.small_state import (
    LEAVES_COROUTINES,
    STEPS,
    Told,
    abstract,
    assert_restores,
    checkpoints,
    content,
    state,
)
from tests.runs import assert_equal_bits
from training.weights import SavedParameters

pytestmark = LEAVES_COROUTINES


def data_files(step: Path) -> list[Path]:
    """The files that hold arrays."""
    return sorted(p for p in (step / "state").rglob("d/*") if p.is_file())


def largest(step: Path) -> Path:
    return max(data_files(step), key=lambda path: path.stat().st_size)


def flip(file: Path, place: int, bit: int = 0) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1 << bit
    file.write_bytes(content)


def flip_the_middle(step: Path) -> None:
    flip(largest(step), largest(step).stat().st_size // 2)


def truncate(step: Path) -> None:
    file = largest(step)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty_the_directory(step: Path) -> None:
    shutil.rmtree(step)
    step.mkdir()


def put_a_directory_for_the_data(step: Path) -> None:
    file = largest(step)
    file.unlink()
    file.mkdir()


def take_from_another_step(step: Path, part: str) -> None:
    shutil.rmtree(step / part)
    shutil.copytree(step.parent / "10" / part, step / part)


def change_a_digest(step: Path) -> None:
    path = step / "meta" / "metadata"
    meta = json.loads(path.read_text())
    meta["leaves"]["params.matrix"]["digest"] += 1
    path.write_text(json.dumps(meta))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped bit": flip_the_middle,
    "truncated": truncate,
    "empty data": lambda step: largest(step).write_bytes(b""),
    "empty directory": empty_the_directory,
    "no state": lambda step: shutil.rmtree(step / "state"),
    "no meta": lambda step: shutil.rmtree(step / "meta"),
    "no manifest": lambda step: (step / "state" / "manifest.ocdbt").unlink(),
    "a directory for the data": put_a_directory_for_the_data,
    "cut meta": lambda step: (step / "meta" / "metadata").write_text('{"step": 3'),
    "another step's state": lambda step: take_from_another_step(step, "state"),
    "another step": lambda step: take_from_another_step(step, ""),
    "another digest": change_a_digest,
}


@pytest.mark.thorough(quick=2)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_step_is_set_aside_and_the_one_before_it_taken(
    directory: Path, told: Told, damage: str
) -> None:
    DAMAGES[damage](directory / "30")
    before = content(directory)
    # Who reads parameters alone is refused, and moves nothing.
    with pytest.raises(ValueError, match="step 30 of .* is damaged: .*/30/"):
        SavedParameters(directory.parent).restore(abstract(state(0)["params"]))
    assert content(directory) == before
    before = content(directory / "30")
    with checkpoints(directory, told) as saved:
        saved.check_fingerprint()
        assert_restores(saved, 20)
        assert saved.latest_step() == 20
        # It is out of the way of the run that makes this step again.
        saved.save(30, state(30))
    assert content(directory / "damaged" / "30") == before
    assert len(told) == 1 and told[0].startswith("WARNING: step 30 is damaged")
    assert f"{directory}/30" in told[0] and f"{directory}/damaged" in told[0]
    with checkpoints(directory, told) as saved:
        assert_restores(saved, 30)
    assert len(told) == 1


@pytest.mark.thorough
def test_two_damaged_steps_are_set_aside(directory: Path, told: Told) -> None:
    flip_the_middle(directory / "30")
    empty_the_directory(directory / "20")
    with checkpoints(directory, told) as saved:
        assert_restores(saved, 10)
        saved.save(20, state(20))
    truncate(directory / "20")
    with checkpoints(directory, told) as saved:
        assert_restores(saved, 10)
    names = {path.name for path in (directory / "damaged").iterdir()}
    assert names == {"20", "20.1", "30"}
    assert [line[:24] for line in told] == [
        f"WARNING: step {n} is dama" for n in (30, 20, 20)
    ]


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize("damage", list(DAMAGES)[:6])
def test_where_no_step_is_good_nothing_moves_and_the_run_is_refused(
    directory: Path, told: Told, damage: str
) -> None:
    for step in STEPS:
        DAMAGES[damage](directory / str(step))
    before = content(directory)
    with checkpoints(directory, told) as saved:
        with pytest.raises(ValueError, match="no checkpoint in .* is good") as caught:
            saved.restore(abstract(state(0)))
    lines = str(caught.value).splitlines()[1:]
    for step, line in zip(reversed(STEPS), lines, strict=True):
        assert f"{directory}/{step}" in line
    assert content(directory) == before and not (directory / "damaged").exists()


def test_no_flipped_bit_of_any_file_gives_wrong_weights(
    directory: Path, told: Told, original: Path, rng: np.random.Generator
) -> None:
    """Anywhere: arrays, manifests, meta data, names and the JSON's syntax."""
    taken = []
    files = sorted(p for p in (directory / "30").rglob("*") if p.stat().st_size)
    files = [p for p in files if p.is_file()]
    for file in files * 2:
        shutil.rmtree(directory)
        shutil.copytree(original, directory)
        place, bit = int(rng.integers(file.stat().st_size)), int(rng.integers(8))
        flip(file, place, bit)
        with checkpoints(directory, told) as saved:
            restored, meta = saved.restore(abstract(state(0)))
        assert_equal_bits(restored, state(meta["step"]))
        taken.append(meta["step"])
        assert ("30" in {p.name for p in directory.iterdir()}) == (meta["step"] == 30)
    assert taken.count(20) >= 4  # most flips matter
