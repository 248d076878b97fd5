"""Saves that fail or are refused: the run goes on where it can; nothing good goes."""

import errno
import time
from typing import Any
from unittest import mock

import numpy as np
import pytest
from etils import epath

from tests.small.runs import files
from tests.small.states import (
    LEAVES_COROUTINES,
    assert_restores,
    broken,
    checkpoints,
    state,
)

pytestmark = LEAVES_COROUTINES
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
