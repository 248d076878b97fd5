"""Saves that fail: the run goes on where it can, and nothing good is lost."""

import errno
import time
from pathlib import Path
from typing import Any

import pytest
from etils import epath

from tests.checkpoints.small_state import (
    Told,
    abstract,
    assert_is,
    checkpoints,
    content,
    settle,
    state,
)

# Orbax leaves coroutines behind where a read or a write fails.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("swept"),
]


MOMENTS = ["write_text", "rename"]


def fill_the_disk(patch: pytest.MonkeyPatch, moment: str) -> None:
    def refuse(path: Any, *args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    patch.setattr(type(epath.Path("/")), moment, refuse)


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
    # Orbax' threads of the save that failed may still be at it.
    deadline = time.monotonic() + 60
    while any("tmp" in path.name for path in directory.iterdir()):
        assert time.monotonic() < deadline
        checkpoints(directory, told, keep=1).close()


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
