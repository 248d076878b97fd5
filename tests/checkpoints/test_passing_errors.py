"""Errors that pass are no damage: what could not be read is tried again, and stays."""

import errno
import os
import resource
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest

from tests.checkpoints.small_state import (
    LEAVES_COROUTINES,
    Told,
    abstract,
    assert_restores,
    checkpoints,
    content,
    state,
)
from training.manager import Manager

pytestmark = LEAVES_COROUTINES


def within(cause: Exception) -> Exception:
    """As Orbax gives on an error of TensorStore in the middle of an array."""
    error = Exception("Encountered error while reading array index")
    error.__cause__ = cause
    return error


# As the operating system, TensorStore, JAX and clients of buckets raise them.
PASSING = [
    *(
        OSError(code, os.strerror(code))
        for code in (
            *(errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.EIO, errno.ENETDOWN),
            *(errno.ENOMEM, errno.ETIMEDOUT, errno.EACCES, errno.EHOSTDOWN),
        )
    ),
    TimeoutError(),
    MemoryError(),
    ConnectionResetError("by the bucket"),
    RuntimeError("the client has no credentials"),
    ValueError("UNAVAILABLE: the bucket does not answer"),
    ValueError("RESOURCE_EXHAUSTED: Failed to open [os_error_code='24']"),
    ValueError("ABORTED: Failed to open: Stale file handle [os_error_code='116']"),
    within(ValueError("UNKNOWN: Input/output error [os_error_code='5']")),
    # This status is also that of an array that cannot be unpacked.
    within(ValueError("FAILED_PRECONDITION: not connected [os_error_code='107']")),
]


def fail(patch: pytest.MonkeyPatch, handler: str, times: int, error: Exception) -> None:
    """Lets a reader fail some times."""
    place = f"orbax.checkpoint.{handler}.restore"
    restore, failures = getattr(ocp, handler).restore, []

    def failing(*args: Any, **options: Any) -> Any:
        if len(failures) < times:
            failures.append(error)
            raise error
        return restore(*args, **options)

    patch.setattr(place, failing)


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize(
    ("error", "handler"),
    [
        # One of each kind is fast: of the system, of Python, and in each wrapping.
        *(
            pytest.param(error, "PyTreeCheckpointHandler", marks=marks)
            for number, error in enumerate(PASSING)
            for marks in [() if number in (0, 9, 14, 16, 17) else pytest.mark.slow]
        ),
        *((error, "JsonCheckpointHandler") for error in PASSING[:3]),
    ],
    ids=str,
)
def test_what_could_not_be_read_is_tried_again_and_stays(
    directory: Path,
    told: Told,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    handler: str,
) -> None:
    before, waits = content(directory), []
    with checkpoints(directory, told, sleep=waits.append) as saved:
        fail(monkeypatch, handler, 2, error)
        assert_restores(saved, 30)
        assert waits == [1, 4]
        monkeypatch.undo()
        fail(monkeypatch, handler, 100, error)
        said = "step 30 in .* cannot be read .4 attempts.* nothing was changed"
        with pytest.raises(OSError, match=said) as caught:
            saved.restore(abstract(state(0)))
    assert "\n" not in str(caught.value) and waits[2:] == [1, 4, 15]
    assert content(directory) == before and not told


@pytest.mark.thorough
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ENOENT])
def test_a_list_that_could_not_be_read_is_read_again(
    directory: Path, told: Told, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    find, waits, errors = Manager._load_checkpoint_infos, [], 2 * [code]

    def failing(*args: Any, **options: Any) -> Any:
        if errors:
            raise OSError(errors.pop(), os.strerror(code))
        return find(*args, **options)

    monkeypatch.setattr(Manager, "_load_checkpoint_infos", failing)
    with checkpoints(directory, told, sleep=waits.append) as saved:
        assert_restores(saved, 30)
    assert not errors and waits == [1, 4]


def test_too_many_open_files_are_waited_out(directory: Path, told: Told) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    waits = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    with checkpoints(directory, told, sleep=wait) as saved:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            assert_restores(saved, 30)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert waits == [1] and not told
