"""One run at a time in a directory, whatever became of the one before."""

import errno
import fcntl
import os
import re
import signal
import socket
from pathlib import Path
from unittest import mock

import pytest

from tests.processes import Processes
from training import workdir
from training.workdir import LOCK, locked, make_writable, replace_text

HOLDS = """
import sys, time
from training.workdir import locked

with locked(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.quick
def test_another_run_is_refused_by_name_until_the_kernel_frees_a_killed_ones_lock(
    tmp_path,
):
    with Processes([["-c", HOLDS, str(tmp_path)]]) as one:
        one.wait_for("held")
        (holder,) = one.running
        name = f"process {holder.pid} on {socket.gethostname()} since 20"
        with pytest.raises(ValueError, match=re.escape(name)), locked(str(tmp_path)):
            raise AssertionError("two runs in one directory")
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert (tmp_path / LOCK).exists()
    with locked(str(tmp_path)):
        assert f"process {os.getpid()} on" in (tmp_path / LOCK).read_text()
    assert not list(tmp_path.iterdir())


def test_a_file_that_its_holder_removes_meanwhile_is_not_the_one_to_lock(
    tmp_path, monkeypatch
):
    lock, removed = fcntl.flock, []

    def leave_then_lock(*arguments: object) -> None:
        if not removed:
            (tmp_path / LOCK).unlink()
            removed.append(True)
        lock(*arguments)

    monkeypatch.setattr(fcntl, "flock", leave_then_lock)
    with locked(str(tmp_path)):
        with pytest.raises(ValueError, match="in use"), locked(str(tmp_path)):
            raise AssertionError("each has a file of its own")
    assert removed


def test_what_cannot_be_locked_is_said_and_no_error(tmp_path, monkeypatch):
    said = []
    error = OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=error))
    with locked(str(tmp_path), said.append), locked("gs://bucket/run", said.append):
        pass
    first, second = said
    assert "No locks available" in first and "is a bucket" in second


def test_a_place_that_cannot_be_written_to_is_one_line(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("of mine")
    (tmp_path / LOCK).mkdir()
    acts = make_writable, lambda place: locked(str(place)).__enter__()
    for act, place, named in [
        *((act, place, place) for act in acts for place in (file, file / "below")),
        (acts[1], tmp_path, tmp_path / "lock"),
    ]:
        with pytest.raises(OSError, match=f"^nothing can be written to {named}: "):
            act(place)
    # As on a file system that is mounted for reading only; the user may be root.
    monkeypatch.setattr(workdir.os, "access", lambda *_: False)
    with pytest.raises(OSError, match="Permission denied"):
        make_writable(tmp_path)
    assert file.read_text() == "of mine"


def test_a_full_disk_is_named_by_its_path_and_leaves_the_file_before(tmp_path):
    path, full = tmp_path / "config.json", OSError(28, "No space left on device")
    replace_text(path, "before")
    with pytest.raises(OSError, match=f"No space left on device: '{path}"):
        with mock.patch.object(Path, "write_text", side_effect=full):
            replace_text(path, "{}")
    assert path.read_text() == "before"


@pytest.mark.parametrize("name", ["", " ", "~/run", "~"])
def test_a_name_that_would_lie_elsewhere_is_refused(tmp_path, monkeypatch, name):
    """They were made as /checkpoints, and as a directory that is called "~"."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"config.workdir='{name}' must be the path"):
        locked(name).__enter__()
    assert not list(tmp_path.iterdir())
