"""Writers of corpora and of trajectories: files appear whole or not at all."""

import errno
import os
import socket

import numpy as np
import pytest

from data.agents.trajectory_file import TrajectoryFile, TrajectoryWriter
from data.text.token_file import TokenFile, TokenFileWriter
from data.text.tokenizer import ByteTokenizer


class Tokens:
    """A corpus of one document of so many tokens."""

    nothing, there = "no documents were written", "already holds a corpus and is left"

    @staticmethod
    def open(directory):
        return TokenFileWriter(directory, ByteTokenizer())

    @staticmethod
    def put(writer, size):
        writer.write("train", np.arange(size))

    @staticmethod
    def size(directory):
        return TokenFile.open(directory, "train").tokens.size


class Trajectories:
    """A trajectory file of one episode of so many steps."""

    nothing, there = "no episodes were written", "already exists and is left"

    @staticmethod
    def open(directory):
        return TrajectoryWriter(directory, {})

    @staticmethod
    def put(writer, size):
        writer.write(np.ones((size, 3)), np.ones((size, 2)), np.ones(size))

    @staticmethod
    def size(directory):
        return int(TrajectoryFile.open(directory).lengths.sum())


each_kind = pytest.mark.parametrize("kind", [Tokens, Trajectories])


def write(kind, directory, size):
    with kind.open(directory) as writer:
        kind.put(writer, size)


@each_kind
def test_nothing_is_there_before_it_is_whole(tmp_path, kind):
    directory = tmp_path / "deep" / "new"
    with kind.open(directory) as writer:
        kind.put(writer, 4)
        assert not directory.exists()
    assert [path.name for path in directory.parent.iterdir()] == ["new"]
    assert directory.parent.stat().st_mode == directory.stat().st_mode
    assert kind.size(directory) == 4


@each_kind
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_writer_leaves_nothing(tmp_path, kind, error):
    with pytest.raises(error):
        with kind.open(tmp_path / "new") as writer:
            kind.put(writer, 4)
            raise error
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/new'"):
        with kind.open(tmp_path / "new"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(ValueError, match=kind.nothing):
        with kind.open(tmp_path / "new"):
            pass
    assert list(tmp_path.iterdir()) == []


@each_kind
def test_what_exists_is_left_as_it_is(tmp_path, kind):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one").write_text("precious")
    (tmp_path / "file").write_text("precious")
    write(kind, tmp_path / "old", 4)
    for name in ("photos", "file", "old"):
        why = kind.there if name == "old" else "already exists and is left"
        with pytest.raises(FileExistsError, match=f"{name} {why}"):
            write(kind, tmp_path / name, 5)
    assert (tmp_path / "photos" / "one").read_text() == "precious"
    assert kind.size(tmp_path / "old") == 4
    assert len(list(tmp_path.iterdir())) == 3


@each_kind
def test_the_slower_of_two_writers_is_refused(tmp_path, kind):
    with pytest.raises(FileExistsError, match=f"new {kind.there}"):
        with kind.open(tmp_path / "new") as slow:
            kind.put(slow, 4)
            write(kind, tmp_path / "new", 6)
    assert kind.size(tmp_path / "new") == 6
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


@each_kind
def test_what_a_killed_writer_left_is_removed_and_what_a_live_one_has_is_not(
    tmp_path, kind
):
    host = socket.gethostname()
    others = {f".new2.{host}.0.partial", ".new.elsewhere.0.partial", f".new.{host}.0"}
    for name in others:
        (tmp_path / name).mkdir()
    new = tmp_path / "new"
    stopped = pytest.raises(KeyboardInterrupt)
    with stopped, kind.open(new) as alive, kind.open(new) as dead:
        dead._new._locked.close()  # as the kernel does
        write(kind, new, 6)
        found = {path.name for path in tmp_path.iterdir()}
        assert found == {"new", alive._new.partial.name, *others}
        raise KeyboardInterrupt
    assert kind.size(new) == 6
