"""Damaged steps and failed saves: no wrong bit is used, and nothing good is lost."""

import errno
import gc
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax.sharding import SingleDeviceSharding

from training.checkpoint import Checkpoints
from training.weights import SavedParameters

# Orbax leaves coroutines behind where a read or a write fails.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(autouse=True)
def swept() -> Iterator[None]:
    """Collects them here, and not in whatever test comes next."""
    yield
    gc.collect()


FINGERPRINT = {"layers": 2}
STEPS = 10, 20, 30
Damage = Callable[[Path], None]


def state(step: int) -> Any:
    """Arrays of some types, other ones at every step."""
    draw = np.random.default_rng(step).standard_normal
    return {
        "step": jnp.int32(step),
        "params": {
            "matrix": jnp.asarray(draw((64, 48)), jnp.float32),
            "half": jnp.asarray(draw((33,)), jnp.bfloat16),
        },
    }


def abstract(tree: Any) -> Any:
    place = SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree
    )


class Told(list[str]):
    """What was said."""

    def __str__(self) -> str:
        return "\n".join(self)


@pytest.fixture
def told() -> Told:
    return Told()


def checkpoints(directory: Path, told: Told, keep: int = 3) -> Checkpoints:
    return Checkpoints(directory, keep=keep, fingerprint=FINGERPRINT, say=told.append)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps; tests must not change them."""
    directory = tmp_path_factory.mktemp("original") / "checkpoints"
    with checkpoints(directory, Told()) as saved:
        for step in STEPS:
            saved.save(step, state(step))
    return directory


@pytest.fixture
def directory(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "run" / "checkpoints")


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


def empty_the_data(step: Path) -> None:
    largest(step).write_bytes(b"")


def empty_the_directory(step: Path) -> None:
    shutil.rmtree(step)
    step.mkdir()


def remove_the_state(step: Path) -> None:
    shutil.rmtree(step / "state")


def remove_the_meta(step: Path) -> None:
    shutil.rmtree(step / "meta")


def remove_the_manifest(step: Path) -> None:
    (step / "state" / "manifest.ocdbt").unlink()


def cut_the_meta(step: Path) -> None:
    (step / "meta" / "metadata").write_text('{"step": 3')


def take_another_steps_state(step: Path) -> None:
    remove_the_state(step)
    shutil.copytree(step.parent / "10" / "state", step / "state")


def take_another_step(step: Path) -> None:
    shutil.rmtree(step)
    shutil.copytree(step.parent / "10", step)


def change_a_digest(step: Path) -> None:
    path = step / "meta" / "metadata"
    meta = json.loads(path.read_text())
    meta["leaves"]["params.matrix"]["digest"] += 1
    path.write_text(json.dumps(meta))


DAMAGES = [
    flip_the_middle,
    truncate,
    empty_the_data,
    empty_the_directory,
    remove_the_state,
    remove_the_meta,
    remove_the_manifest,
    cut_the_meta,
    take_another_steps_state,
    take_another_step,
    change_a_digest,
]


def content(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(f.relative_to(directory)): f.read_bytes() for f in files}


def assert_is(restored: Any, step: int) -> None:
    for ours, theirs in zip(
        jax.tree.leaves(restored), jax.tree.leaves(state(step)), strict=True
    ):
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_step_is_set_aside_and_the_one_before_it_taken(
    directory: Path, told: Told, damage: Damage
) -> None:
    damage(directory / "30")
    before = content(directory / "30")
    with checkpoints(directory, told) as saved:
        saved.check_fingerprint()
        restored, meta = saved.restore(abstract(state(0)))
        assert saved.latest_step() == meta["step"] == 20
        assert_is(restored, 20)
        # It is out of the way of the run that makes this step again.
        saved.save(30, state(30))
    assert content(directory / "damaged" / "30") == before
    assert len(told) == 1 and told[0].startswith("WARNING: step 30 is damaged")
    assert f"{directory}/30" in told[0] and f"{directory}/damaged" in told[0]
    with checkpoints(directory, told) as saved:
        assert_is(saved.restore(abstract(state(0)))[0], 30)
    assert len(told) == 1


def test_two_damaged_steps_are_set_aside(directory: Path, told: Told) -> None:
    flip_the_middle(directory / "30")
    empty_the_directory(directory / "20")
    with checkpoints(directory, told) as saved:
        assert_is(saved.restore(abstract(state(0)))[0], 10)
        saved.save(20, state(20))
    truncate(directory / "20")
    with checkpoints(directory, told) as saved:
        assert_is(saved.restore(abstract(state(0)))[0], 10)
    names = {path.name for path in (directory / "damaged").iterdir()}
    assert names == {"20", "20.1", "30"}
    assert [line[:24] for line in told] == [
        f"WARNING: step {n} is dama" for n in (30, 20, 20)
    ]


@pytest.mark.parametrize("damage", DAMAGES[:6])
def test_where_no_step_is_good_nothing_moves_and_the_run_is_refused(
    directory: Path, told: Told, damage: Damage
) -> None:
    for step in STEPS:
        damage(directory / str(step))
    before = content(directory)
    with checkpoints(directory, told) as saved:
        with pytest.raises(ValueError, match="no checkpoint in .* is good") as caught:
            saved.restore(abstract(state(0)))
    lines = str(caught.value).splitlines()[1:]
    for step, line in zip(reversed(STEPS), lines, strict=True):
        assert f"{directory}/{step}" in line
    assert content(directory) == before and not (directory / "damaged").exists()


def test_no_flipped_bit_of_any_file_gives_wrong_weights(
    directory: Path, told: Told, original: Path
) -> None:
    """Anywhere: arrays, manifests, meta data, names and the JSON's syntax."""
    rng = np.random.default_rng()
    taken = []
    files = sorted(p for p in (directory / "30").rglob("*") if p.stat().st_size)
    files = [p for p in files if p.is_file()]
    for file in files * 2:
        shutil.rmtree(directory)
        shutil.copytree(original, directory)
        place, bit = int(rng.integers(file.stat().st_size)), int(rng.integers(8))
        flip(file, place, bit)
        with checkpoints(directory, told) as saved:
            try:
                restored, meta = saved.restore(abstract(state(0)))
            except ValueError as error:
                # A key of the JSON may be one that only another program would write.
                assert "not saved by this trainer" in str(error), (file, place, bit)
                continue
        assert_is(restored, meta["step"])
        taken.append(meta["step"])
        assert ("30" in {p.name for p in directory.iterdir()}) == (meta["step"] == 30)
    assert taken.count(20) >= 4  # most flips matter


def test_a_passing_error_is_no_damage(
    directory: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(*args: Any, **options: Any) -> None:
        raise ValueError("UNAVAILABLE: the bucket does not answer")

    monkeypatch.setattr("orbax.checkpoint.PyTreeCheckpointHandler.restore", unavailable)
    before = content(directory)
    with checkpoints(directory, told) as saved:
        with pytest.raises(ValueError, match="the bucket does not answer"):
            saved.restore(abstract(state(0)))
    assert content(directory) == before and not told


@pytest.mark.parametrize("damage", DAMAGES)
def test_parameters_of_a_damaged_step_are_refused_and_left_alone(
    directory: Path, damage: Damage
) -> None:
    damage(directory / "30")
    before = content(directory)
    with pytest.raises(ValueError, match="step 30 of .* is damaged: .*/30/"):
        SavedParameters(directory.parent).restore(abstract(state(0)["params"]))
    assert content(directory) == before


# What Orbax does to a path in a save, first and last.
MOMENTS = ["write_text", "rename"]


def fill_the_disk(patch: pytest.MonkeyPatch, moment: str) -> None:
    def refuse(path: Any, *args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    patch.setattr(type(epath.Path("/")), moment, refuse)


def settle(saved: Checkpoints) -> None:
    """Waits for the save under way, as whatever comes next does."""
    saved.check_fingerprint()


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_goes_on_after_a_save_on_a_full_disk(
    directory: Path, told: Told, moment: str
) -> None:
    before = content(directory)
    with checkpoints(directory, told, keep=1) as saved:
        with pytest.MonkeyPatch.context() as patch:
            fill_the_disk(patch, moment)
            saved.save(40, state(40))
            settle(saved)
        # Nothing went, though only one step was to be kept.
        assert before.items() <= content(directory).items()
        assert saved.latest_step() == 30
        assert len(told) == 1
        parts = ["WARNING: step 40 was NOT saved", "No space left", str(directory)]
        assert all(part in told[0] for part in [*parts, "step 30"])
        saved.save(50, state(50))
        settle(saved)
        assert saved.latest_step() == 50
        assert_is(saved.restore(abstract(state(0)))[0], 50)
    assert len(told) == 1
    checkpoints(directory, told, keep=1).close()
    assert not [path for path in directory.iterdir() if "tmp" in path.name]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_second_failed_save_ends_the_run(
    directory: Path, told: Told, moment: str
) -> None:
    before = content(directory)
    with pytest.MonkeyPatch.context() as patch:
        fill_the_disk(patch, moment)
        with pytest.raises(OSError, match="step 50 was NOT .*before it failed too"):
            with checkpoints(directory, told, keep=1) as saved:
                saved.save(40, state(40))
                saved.save(50, state(50))
                saved.save(60, state(60))
    assert before.items() <= content(directory).items() and len(told) == 1


def test_a_last_save_that_fails_is_an_error(directory: Path, told: Told) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fill_the_disk(patch, "rename")
        with pytest.raises(OSError, match="step 40 was NOT saved .*No space left"):
            with checkpoints(directory, told) as saved:
                saved.save(40, state(40))


def test_a_failed_save_does_not_hide_the_error_that_ends_the_run(
    directory: Path, told: Told
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fill_the_disk(patch, "rename")
        with pytest.raises(ZeroDivisionError):
            with checkpoints(directory, told) as saved:
                saved.save(40, state(40))
                raise ZeroDivisionError
    assert "step 40 was NOT saved" in told[0]


def test_old_steps_go_only_when_the_new_one_is_there(
    directory: Path, told: Told
) -> None:
    seen = []
    rename = type(epath.Path("/")).rename

    def look(path: Any, target: Any) -> Any:
        seen.append({p.name for p in directory.iterdir()} & {"10", "20", "30"})
        return rename(path, target)

    with checkpoints(directory, told, keep=1) as saved:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(epath.Path("/")), "rename", look)
            saved.save(40, state(40))
            settle(saved)
    assert seen and all(there == {"10", "20", "30"} for there in seen)
    assert [path.name for path in directory.iterdir()] == ["40"]
