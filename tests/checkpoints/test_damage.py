"""Damaged steps and failed saves: no wrong bit is used, and nothing good is lost."""

import errno
import functools
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from orbax.checkpoint._src.path import gcs_utils

from tests.small.runs import assert_equal_bits, files
from tests.small.states import (
    LEAVES_COROUTINES,
    STEPS,
    abstract,
    assert_restores,
    broken,
    checkpoints,
    state,
)
from tests.support import buckets
from training.saved.checkpoint import Manager, Newest, open_manager
from training.saved.stored_step import shows_damage
from training.saved.weights import SavedParameters

pytestmark = LEAVES_COROUTINES


def largest(step: Path) -> Path:
    """The largest file that holds arrays."""
    files = (p for p in (step / "state").rglob("d/*") if p.is_file())
    return max(sorted(files), key=lambda path: path.stat().st_size)


def flip(file: Path, place: int, bit: int = 0) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1 << bit
    file.write_bytes(content)


def flip_the_middle(step: Path) -> None:
    flip(largest(step), largest(step).stat().st_size // 2)


def truncate(step: Path) -> None:
    file = largest(step)
    os.truncate(file, file.stat().st_size // 2)


def make_a_directory(path: Path) -> None:
    """In the place of what is there."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.mkdir()


def take_from_another_step(step: Path, part: str) -> None:
    shutil.rmtree(step / part)
    shutil.copytree(step.parent / "10" / part, step / part)


def save_a_nan(step: Path) -> None:
    """As a trainer saved that did not look."""
    shutil.rmtree(step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.saved.stored_step.not_finite", lambda found: "")
        with checkpoints(step.parent) as saved:
            saved.save(int(step.name), broken(int(step.name)))


def change_meta(step: Path, old: str, new: str) -> None:
    path = step / "meta" / "metadata"
    text = path.read_text()
    path.write_text(re.sub(old, new, text, count=1))
    assert path.read_text() != text


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped bit": (flip_the_middle, "state"),
    "truncated": (truncate, "state"),
    "empty directory": (make_a_directory, "is missing"),
    "no state": (lambda step: shutil.rmtree(step / "state"), "state is missing"),
    "no meta": (lambda step: shutil.rmtree(step / "meta"), "meta is missing"),
    "a directory for the data": (lambda step: make_a_directory(largest(step)), "state"),
    "cut meta": (lambda step: change_meta(step, ".$", ""), "meta: JSONDecodeError"),
    "meta of others": (
        lambda s: (s / "meta" / "metadata").write_text('{"step": 30}'),
        "not saved by this trainer",
    ),
    "another step's state": (
        lambda s: take_from_another_step(s, "state"),
        "other bits",
    ),
    "another step": (lambda step: take_from_another_step(step, ""), "not as it was"),
    "another digest": (
        lambda s: change_meta(s, 'digest": ', 'digest": 1'),
        "not as it w",
    ),
    "a nan": (save_a_nan, "params.matrix holds 1 nan"),
}
"""What damages a step, and what is said of it."""


@pytest.mark.thorough(quick=2)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_step_is_set_aside_for_the_one_before(directory, logged, damage):
    act, what = DAMAGES[damage]
    act(directory / "30")
    before = files(directory)
    # Who reads parameters alone is refused, and moves nothing.
    with pytest.raises(ValueError, match=f"step 30 of .* is damaged: .*/30.*{what}"):
        SavedParameters(directory.parent).restore(abstract(state(0)["params"]))
    assert files(directory) == before
    before = files(directory / "30")
    with checkpoints(directory, logged.append) as saved:
        saved.check_fingerprint()
        assert_restores(saved, 20)
        assert saved.latest_step() == 20
    assert files(directory / "damaged" / "30") == before
    (line,) = logged
    assert line.startswith("WARNING: step 30 is damaged") and what in line
    assert f"{directory}/30" in line and f"{directory}/damaged" in line


@pytest.mark.thorough
def test_damaged_steps_are_out_of_the_way_of_new_ones(directory, logged):
    flip_the_middle(directory / "30")
    make_a_directory(directory / "20")
    with checkpoints(directory, logged.append) as saved:
        assert_restores(saved, 10)
        saved.save(20, state(20))
    truncate(directory / "20")
    with checkpoints(directory, logged.append) as saved:
        assert_restores(saved, 10)
    names = {path.name for path in (directory / "damaged").iterdir()}
    assert names == {"20", "20.1", "30"} and len(logged) == 3


@pytest.mark.quick
def test_where_no_step_is_good_nothing_moves_and_the_run_is_refused(directory):
    for step, damage in zip(STEPS, ("truncated", "no meta", "no state"), strict=True):
        DAMAGES[damage][0](directory / str(step))
    before = files(directory)
    with checkpoints(directory) as saved:
        with pytest.raises(ValueError, match="no checkpoint in .* is good") as caught:
            saved.restore(abstract(state(0)))
    lines = str(caught.value).splitlines()[1:]
    for step, line in zip(reversed(STEPS), lines, strict=True):
        assert f"{directory}/{step}" in line
    assert files(directory) == before and not (directory / "damaged").exists()


def test_no_flipped_bit_of_any_file_gives_wrong_weights(directory, original, rng):
    """Anywhere: arrays, manifests, meta data, names and the JSON's syntax."""
    taken = []
    files = sorted(p for p in (directory / "30").rglob("*") if p.stat().st_size)
    files = [p for p in files if p.is_file()]
    for file in files * 2:
        shutil.rmtree(directory)
        shutil.copytree(original, directory)
        place, bit = int(rng.integers(file.stat().st_size)), int(rng.integers(8))
        flip(file, place, bit)
        with checkpoints(directory) as saved:
            restored, meta = saved.restore(abstract(state(0)))
        assert_equal_bits(restored, state(meta["step"]))
        taken.append(meta["step"])
        assert ("30" in {p.name for p in directory.iterdir()}) == (meta["step"] == 30)
    assert taken.count(20) >= 4  # most flips matter


@pytest.mark.thorough
def test_steps_that_are_not_trusted_move_once(directory, logged):
    with checkpoints(directory, logged.append) as saved:
        saved.distrust(5, "of no use")
        saved.distrust(31, "of no use")
        assert saved.latest_step() == 30 and not logged
        saved.distrust(20, "of no use")
        assert saved.latest_step() == 10
        saved.save(20, state(20))
        saved.distrust(20, "of no use")
        assert saved.latest_step() == 20
    said = f"is not trusted and moves to {directory}/damaged: of no use"
    assert logged == [f"WARNING: step {step} {said}" for step in (30, 20)]


def within(cause: Exception) -> Exception:
    """As Orbax gives on an error of TensorStore in the middle of an array."""
    error = Exception("Encountered error while reading array index")
    error.__cause__ = cause
    return error


CODES = errno.EMFILE, errno.ESTALE, errno.EIO, errno.ENOMEM, errno.ETIMEDOUT
PASSING = [
    # As the operating system, TensorStore, JAX and clients of buckets raise them.
    *(OSError(code, os.strerror(code)) for code in (*CODES, errno.EACCES)),
    MemoryError(),
    ConnectionResetError("by the bucket"),
    RuntimeError("the client has no credentials"),
    ValueError("UNAVAILABLE: the bucket does not answer"),
    ValueError("ABORTED: Failed to open: Stale file handle [os_error_code='116']"),
    within(ValueError("UNKNOWN: Input/output error [os_error_code='5']")),
    # This status is also that of an array that cannot be unpacked.
    within(ValueError("FAILED_PRECONDITION: not connected [os_error_code='107']")),
]


@pytest.mark.parametrize("error", PASSING, ids=str)
def test_errors_that_may_pass_are_no_damage(error):
    assert not shows_damage(error)


def fail(patch: pytest.MonkeyPatch, holder: Any, name: str, errors: list) -> None:
    """Lets a function raise these errors, and work after them."""
    function = getattr(holder, name)

    def failing(*args: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return function(*args, **options)

    patch.setattr(holder, name, failing)


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize(
    ("handler", "error"),
    [
        (ocp.PyTreeCheckpointHandler, within(ValueError("UNKNOWN: no answer"))),
        (ocp.JsonCheckpointHandler, OSError(errno.EMFILE, "Too many open files")),
    ],
)
def test_what_could_not_be_read_is_tried_again(
    directory, logged, monkeypatch, handler, error
):
    before, waits = files(directory), []
    with checkpoints(directory, logged.append, sleep=waits.append) as saved:
        fail(monkeypatch, handler, "restore", 2 * [error])
        assert_restores(saved, 30)
        assert waits == [1, 4]
        fail(monkeypatch, handler, "restore", 100 * [error])
        said = "step 30 in .* cannot be read .4 attempts.* nothing was changed"
        with pytest.raises(OSError, match=said) as caught:
            saved.restore(abstract(state(0)))
    assert "\n" not in str(caught.value) and waits[2:] == [1, 4, 15]
    assert files(directory) == before and not logged


@pytest.mark.thorough
def test_a_list_that_could_not_be_read_is_read_again(directory, monkeypatch):
    waits, errors = [], [OSError(code, "gone") for code in (errno.ESTALE, errno.ENOENT)]
    fail(monkeypatch, Manager, "_load_checkpoint_infos", errors)
    with checkpoints(directory, sleep=waits.append) as saved:
        assert_restores(saved, 30)
    assert not errors and waits == [1, 4]


def fail_stat(patch: pytest.MonkeyPatch, step: Path, times: int) -> None:
    """Lets so many looks at a step's directory fail."""
    stat, failed = os.stat, []

    def failing(path: Any, *args: Any, **options: Any) -> Any:
        if path == str(step) and len(failed) < times:
            failed.append(path)
            raise OSError(errno.EIO, "Input/output error")
        return stat(path, *args, **options)

    patch.setattr(os, "stat", failing)


def test_a_step_that_is_named_but_cannot_be_looked_at_is_not_passed_over(
    directory, monkeypatch
):
    (directory / "30/commit_success.txt").unlink()
    (directory / "012").mkdir()
    (directory / "40").touch()
    waits = []
    fail_stat(monkeypatch, directory / "30", 1)
    with checkpoints(directory, sleep=waits.append) as saved:
        assert saved.latest_step() == 30
    assert waits == [1]
    fail_stat(monkeypatch, directory / "30", 10**6)
    with pytest.raises(OSError, match="30 is there, but could not be looked at"):
        SavedParameters(directory.parent)
    with pytest.raises(OSError, match="cannot be read .4 attempts.*/30 is there"):
        checkpoints(directory, sleep=waits.append)


def test_a_step_in_a_bucket_counts_when_its_save_has_ended(monkeypatch):
    # The check of this asks Google itself.
    monkeypatch.setattr(gcs_utils, "is_hierarchical_namespace_enabled", lambda _: False)
    with buckets.in_memory():
        opened = functools.partial(
            open_manager, "gs://mine/run", Newest(3), cleans=False
        )
        with monkeypatch.context() as patch:
            patch.setattr(PATH, "mkdir", lambda *_, **__: None)  # as in real buckets
            with opened() as manager:
                assert manager.latest_step() is None
        bucket = epath.Path("gs://mine/run")
        (bucket / "10/commit_success.txt").write_text("")
        (bucket / "20/state/part").write_text("")
        with opened() as manager:
            assert manager.latest_step() == 10
        monkeypatch.setattr(PATH, "exists", lambda _: False)
        with pytest.raises(OSError, match="run/10 is there, but could not be lo"):
            opened()


# Saves that fail or are refused: the run goes on where it can; nothing good goes.

PATH = type(epath.Path("/"))


def full_disk(moment: str = "rename") -> Any:
    full = OSError(errno.ENOSPC, "No space left on device")
    return mock.patch.object(PATH, moment, side_effect=full)


@pytest.mark.thorough
@pytest.mark.parametrize("moment", ["write_text", "rename"])
def test_a_run_goes_on_after_a_save_on_a_full_disk(directory, logged, moment):
    before = files(directory)
    with checkpoints(directory, logged.append, keep=1) as saved:
        with full_disk(moment):
            saved.save(40, state(40))
            saved.check_fingerprint()  # waits for the save, as whatever comes next does
        # Nothing went, though only one step was to be kept.
        assert before.items() <= files(directory).items()
        assert saved.latest_step() == 30
        assert len(logged) == 1
        parts = ["WARNING: step 40 was NOT saved", "No space left", str(directory)]
        assert all(part in logged[0] for part in [*parts, "step 30"])
        saved.save(50, state(50))
        saved.check_fingerprint()
        assert saved.latest_step() == 50
        assert_restores(saved, 50)
    assert len(logged) == 1
    # Orbax' threads of the save that failed may still be at it.
    deadline = time.monotonic() + 60
    while any("tmp" in path.name for path in directory.iterdir()):
        assert time.monotonic() < deadline
        checkpoints(directory, logged.append, keep=1).close()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("steps", "then", "said"),
    [
        ((40, 50, 60), None, "step 50 was NOT .*before it failed too"),
        ((40,), None, "step 40 was NOT saved .*No space left"),
        # A failed save leaves the error that ends the run.
        ((40,), ZeroDivisionError("other"), "other"),
    ],
    ids=["second", "last", "other"],
)
def test_a_second_failed_save_or_a_last_one_ends_the_run(
    directory, logged, steps, then, said
):
    before = files(directory)
    with full_disk(), pytest.raises(type(then) if then else OSError, match=said):
        with checkpoints(directory, logged.append, keep=1) as saved:
            for step in steps:
                saved.save(step, state(step))
                if step == 40:
                    saved.check_fingerprint()  # notices it, and forgets nothing
            if then:
                raise then
    assert before.items() <= files(directory).items()
    assert len(logged) == 1 and "step 40 was NOT saved" in logged[0]


@pytest.mark.thorough
def test_old_steps_go_only_when_the_new_one_is_there(directory, monkeypatch):
    """And where nothing rotates they stay until something does."""
    seen, rename = [], PATH.rename

    def steps() -> set[str]:
        return {path.name for path in directory.iterdir() if path.name.isdigit()}

    def look(path, target):
        seen.append(steps())
        return rename(path, target)

    with checkpoints(directory, keep=2) as saved:
        saved.save(40, state(40), rotate=False)
        saved.check_fingerprint()
        assert steps() == {"10", "20", "30", "40"}
        monkeypatch.setattr(PATH, "rename", look)
        saved.save(50, state(50))
    assert seen and all(there == {"10", "20", "30", "40"} for there in seen)
    assert steps() == {"40", "50"}


@pytest.mark.quick
def test_a_state_that_is_not_finite_is_not_saved_and_nothing_goes(directory, logged):
    before = files(directory)
    with checkpoints(directory, logged.append, keep=1) as saved:
        for value, found in (np.nan, "1 nan"), (-np.inf, "1 inf"):
            said = f"step 40 is not saved: params.matrix holds {found}$"
            with pytest.raises(ValueError, match=said):
                saved.save(40, broken(40, value))
        moments = np.array([1, np.nan], np.float32)
        with pytest.raises(ValueError, match="optimizer_state.nu holds 1 nan$"):
            saved.save(40, state(40) | {"optimizer_state": {"nu": moments}})
    assert files(directory) == before and not logged
