"""Saves that fail: the run goes on where it can, and nothing good is lost."""

import contextlib
import errno
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from etils import epath

from tests.checkpoints.small_state import (
    LEAVES_COROUTINES,
    Told,
    assert_restores,
    checkpoints,
    content,
    settle,
    state,
)

pytestmark = LEAVES_COROUTINES


MOMENTS = ["write_text", "rename"]


@contextlib.contextmanager
def full_disk(moment: str = "rename") -> Iterator[None]:
    def refuse(path: Any, *args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(epath.Path("/")), moment, refuse)
        yield


@pytest.mark.thorough
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_goes_on_after_a_save_on_a_full_disk(
    directory: Path, told: Told, moment: str
) -> None:
    before = content(directory)
    with checkpoints(directory, told, keep=1) as saved:
        with full_disk(moment):
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
        assert_restores(saved, 50)
    assert len(told) == 1
    # Orbax' threads of the save that failed may still be at it.
    deadline = time.monotonic() + 60
    while any("tmp" in path.name for path in directory.iterdir()):
        assert time.monotonic() < deadline
        checkpoints(directory, told, keep=1).close()


@pytest.mark.thorough
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_second_failed_save_ends_the_run(
    directory: Path, told: Told, moment: str
) -> None:
    before = content(directory)
    said = "step 50 was NOT .*before it failed too"
    with full_disk(moment), pytest.raises(OSError, match=said):
        with checkpoints(directory, told, keep=1) as saved:
            for step in 40, 50, 60:
                saved.save(step, state(step))
    assert before.items() <= content(directory).items() and len(told) == 1


@pytest.mark.thorough
def test_a_last_save_that_fails_is_an_error(directory: Path, told: Told) -> None:
    said = "step 40 was NOT saved .*No space left"
    with full_disk(), pytest.raises(OSError, match=said):
        with checkpoints(directory, told) as saved:
            saved.save(40, state(40))


@pytest.mark.thorough
def test_a_failed_save_leaves_the_error_that_ends_the_run(
    directory: Path, told: Told
) -> None:
    with full_disk(), pytest.raises(ZeroDivisionError):
        with checkpoints(directory, told) as saved:
            saved.save(40, state(40))
            raise ZeroDivisionError
    assert "step 40 was NOT saved" in told[0]


def test_old_steps_go_only_when_the_new_one_is_there(
    directory: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    rename = type(epath.Path("/")).rename

    def look(path: Any, target: Any) -> Any:
        seen.append({p.name for p in directory.iterdir()} & {"10", "20", "30"})
        return rename(path, target)

    with checkpoints(directory, told, keep=1) as saved:
        monkeypatch.setattr(type(epath.Path("/")), "rename", look)
        saved.save(40, state(40))
    assert seen and all(there == {"10", "20", "30"} for there in seen)
    assert [path.name for path in directory.iterdir()] == ["40"]
